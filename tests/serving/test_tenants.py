"""Tenants without a server: their file, their quotas, their namespaces, and whose names a request means."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastapi
import pytest

from sglang_ext.cache.conversation import NAMESPACE, name_of
from sglang_ext.launch import early
from sglang_ext.retrievers import dense
from sglang_ext.serving import access, checks
from sglang_ext.serving.access import CallerMiddleware, Keys, may_see_definitions, owner_of_answers
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.explain import would_select
from sglang_ext.serving.namespaces import put_into
from sglang_ext.serving.quota import Quota
from sglang_ext.serving.store import PoolStore
from sglang_ext.serving.tenancy import Tenancy, pools_of, standing, tenants_of
from sglang_ext.serving.tenants import FOLDER, HEADER, Tenant, TenantQuotas, Tenants, digest_of, namespace
from sglang_ext.settings import SETTINGS_ENV
from tests.oracle import models
from tests.serving.imitated import Service, quiet

ACME, BOLT, ADMIN, USER = "acme's key", "bolt's key", "the operator's key", "the users' key"


def entry(*keys: str, **quotas: Any) -> dict[str, Any]:
    return {"keys": [digest_of(key) for key in keys], **quotas}


def written(folder: Path, tenants: Any) -> Path:
    file = folder / "tenants.json"
    file.write_text(tenants if isinstance(tenants, str) else json.dumps(tenants), encoding="utf-8")
    return file


# ---- the file ----


def test_a_file_says_whose_key_is_whose(tmp_path: Path) -> None:
    upper = {"keys": [digest_of("another").upper()], "max_pools": 3}
    found = Tenants.read(written(tmp_path, {"acme": entry(ACME, max_tokens=9), "bolt": upper}))
    assert found.by_name.keys() == {"acme", "bolt"}
    assert found.of_key(ACME) == Tenant("acme", frozenset({digest_of(ACME)}), TenantQuotas(max_tokens=9))
    bolt = found.of_key("another")
    assert bolt is not None and (bolt.name, bolt.quotas) == ("bolt", TenantQuotas(max_pools=3))
    assert found.of_key(None) is found.of_key("") is found.of_key(digest_of(ACME)) is None
    assert Tenants.read(written(tmp_path, {})).by_name == {}


@pytest.mark.parametrize(
    ("tenants", "words"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ([], "it is a list; expected an object, like"),
        ({"acme": []}, "tenant 'acme' is a list; expected an object"),
        ({"a/b": entry(ACME)}, "tenant 'a/b': expected 1 to 128 letters"),
        ({"": entry(ACME)}, "tenant '': expected 1 to 128 letters"),
        ({"acme": {}}, "tenant 'acme': expected keys, a list of at least one SHA-256 of a key (printf"),
        ({"acme": {"keys": []}}, "tenant 'acme': expected keys, a list"),
        ({"acme": {"keys": "x"}}, "tenant 'acme': expected keys, a list"),
        ({"acme": {"keys": [digest_of(ACME), ACME]}}, "tenant 'acme': keys[1] is no SHA-256 of a key; expected 64"),
        ({"acme": {"keys": [7]}}, "tenant 'acme': keys[0] is no SHA-256"),
        ({"acme": entry(ACME, max_pool=3)}, "unknown option max_pool; known are max_pools, max_requests, max_tokens;"),
        ({"acme": entry(ACME, max_pools="3")}, "tenant 'acme': max_pools='3' is a str; expected int | None"),
        ({"acme": entry(ACME, max_pools=0)}, "tenant 'acme': max_pools=0: expected a whole number of at least 1"),
        ({"acme": entry(ACME, max_pools=True)}, "tenant 'acme': max_pools=True is a bool"),
        ({"acme": entry(ACME), "bolt": entry(ACME)}, "tenants 'acme' and 'bolt' have one key"),
        ('{"acme": {"keys": []}, "acme": {"keys": []}}', "'acme' stands twice in one object"),
        ({"acme": entry(ADMIN)}, "tenant 'acme' has --api-key or --admin-api-key of the server"),
    ],
)
def test_a_wrong_file_is_refused_without_a_key_in_the_words(tmp_path: Path, tenants: Any, words: str) -> None:
    file = written(tmp_path, tenants)
    with pytest.raises(ValueError) as error:
        Tenants.read(file, (USER, ADMIN, None))
    said = str(error.value)
    assert said.startswith(f"--tenants {file}: ") and words in said, said
    assert not any(key in said for key in (ACME, ADMIN, USER))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=f"--tenants {path}: it cannot be read .{why}"):
            Tenants.read(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"--tenants .*binary: .*codec"):
        Tenants.read(tmp_path / "binary")


def test_a_server_with_tenants_has_a_key_of_its_own(tmp_path: Path) -> None:
    file = str(written(tmp_path, {"acme": entry(ACME)}))
    early.check_tenants(None, [])
    for argv in (["--api-key", "x"], ["--admin-api-key=x"], ["--config", "server.yaml"]):
        early.check_tenants(file, argv)
    with pytest.raises(ValueError, match=r"--tenants .*: expected --api-key or --admin-api-key beside it"):
        early.check_tenants(file, ["--port", "1"])
    with pytest.raises(ValueError, match="Expecting"):
        early.check_tenants(str(written(tmp_path, "{")), ["--api-key", "x"])


def test_a_server_is_not_started_with_a_wrong_file_or_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for servers that SGLang's own command starts, and by the keys that they really have."""
    monkeypatch.setattr(checks.compat, "resolved", lambda server_args: server_args)
    found: list[list[str]] = []
    for tenants, keys in (({"acme": entry(ACME)}, (None, None)), ({"acme": entry(ADMIN)}, (None, ADMIN))):
        monkeypatch.setenv(SETTINGS_ENV, json.dumps({"tenants": str(written(tmp_path, tenants))}))
        args = SimpleNamespace(
            attention_backend="dbsa", tp_size=1, chunked_prefill_size=None, api_key=keys[0], admin_api_key=keys[1]
        )
        found.append(checks.refusals(args))
        args.api_key = USER
        assert len(checks.refusals(args)) == int(keys[1] is not None)
    assert [len(problems) for problems in found] == [1, 1]
    assert "without --api-key and --admin-api-key" in found[0][0] and "are the operator's" in found[1][0]


# ---- quotas ----


def refusal(status: int, call: Any, *args: Any) -> str:
    with pytest.raises(PoolError) as error:
        call(*args)
    assert error.value.status_code == status
    return str(error.value)


def test_quotas_refuse_with_their_numbers() -> None:
    free, tight = Quota(), Quota(TenantQuotas(2, 100, 3))
    free.check_pools(10**6)
    free.check_tokens("p", 10**9, 10**9)
    assert "you have 2 pools, and your quota is 2 (max_pools)" in refusal(403, tight.check_pools, 2)
    tight.check_pools(1)
    tight.check_tokens("p", 60, 40)
    words = refusal(403, tight.check_tokens, "p", 61, 40)
    assert "pool 'p' would have 61 tokens, your other pools have 40, and your quota is 100 (max_tokens)" in words


def test_answers_under_way_are_counted_once() -> None:
    quota = Quota(TenantQuotas(max_requests=3))
    assert "asks for 4 answers" in refusal(403, quota.enter, 4) and quota.running == 0
    one, two = quota.enter(1), quota.enter(2)
    words = refusal(429, quota.enter, 1)
    assert "asks for 1 answers" in words and "3 are under way" in words and "quota is 3 at a time" in words
    two()
    two()
    assert quota.running == 1
    quota.quotas = TenantQuotas(max_requests=1)
    assert quota.running == 1 and "1 are under way" in refusal(429, quota.enter, 1)
    one()
    quota.enter(1)()
    assert quota.running == 0


# ---- namespaces ----


def test_namespaces_do_not_begin_with_each_other() -> None:
    found = [namespace(name) for name in ("a", "aa", "b", "a:b", "é")]
    assert len({len(each) for each in found}) == 1 and len(set(found)) == len(found)
    assert namespace("a") == found[0] and found[0] not in (digest_of("a"), "a:")


@pytest.mark.parametrize(
    ("keys", "spaced"), [(None, "s:"), ("", "s:"), ("k", "s:k"), (["k", None], ["s:k", "s:"]), ("s:k", "s:k")]
)
def test_a_key_of_one_s_own_lies_within_the_namespace(keys: Any, spaced: Any) -> None:
    request = SimpleNamespace(extra_key=keys, sampling_params=None)
    put_into(request, "s:")
    assert request.extra_key == spaced


def test_conversations_lie_within_the_namespace() -> None:
    plain, named = {"custom_params": {"p1": 0.5}}, {"top_p": 1.0, "custom_params": {"conversation": "a"}}
    request = SimpleNamespace(extra_key=None, sampling_params=[plain, named, {}, None, {"custom_params": None}])
    put_into(request, "s:")
    spaced = {"top_p": 1.0, "custom_params": {"conversation": "a", NAMESPACE: "s:"}}
    assert request.sampling_params == [plain, spaced, {}, None, {"custom_params": None}]
    assert NAMESPACE not in named["custom_params"]  # it is the client's
    names = [name_of(options) for options in ({"conversation": "a"}, spaced["custom_params"], {}, {NAMESPACE: "s:"})]  # type: ignore[arg-type]
    assert names == ["a", ("s:", "a"), None, None]


# ---- whose names a request means ----


class Held:
    """Tenants of a middleware."""

    def of_key(self, shown: str | None) -> str | None:
        return {ACME: "acme", BOLT: "bolt"}.get(shown or "")

    def known(self) -> list[str]:
        return ["acme", "bolt", "gone"]

    def begin(self) -> None:
        pass


def asked(
    keys: Keys, path: str, key: str | None, place: str | None = None, method: str = "GET", tenants: Any = None
) -> tuple[int, str]:
    """(status, the tenant that the app finds, or what the caller is told)."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    routes = fastapi.FastAPI()
    routes.add_api_route("/v1/pools/{name}", auth_level(AuthLevel.ADMIN_OPTIONAL)(lambda name: None), methods=["GET"])
    routes.add_api_route("/flush_cache", auth_level(AuthLevel.ADMIN_OPTIONAL)(lambda: None), methods=["POST"])
    routes.add_api_route("/generate", lambda: None, methods=["POST"])
    routes.add_api_route("/health", lambda: None, methods=["GET"])
    sent: list[dict[str, Any]] = []
    found: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        server = SimpleNamespace(ext_keys=keys)
        tenant = access.tenant_at_hand()
        assert may_see_definitions(server) == (bool(tenant) or keys.opens_definitions(key))
        assert owner_of_answers(server) == f"tenant:{tenant}" if tenant else True
        found.append(tenant)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    headers += [(HEADER.encode(), place.encode())] if place is not None else []
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    asyncio.run(CallerMiddleware(app, keys, routes, tenants)(scope, None, send))  # type: ignore[arg-type]
    assert access.tenant_at_hand() == ""
    return (200, found[0]) if found else (sent[0]["status"], sent[1]["body"].decode())


BOTH, ALONE = Keys(USER, ADMIN), Keys(None, ADMIN)


@pytest.mark.parametrize("keys", [BOTH, ALONE, Keys(ADMIN, None)])
def test_a_tenant_s_key_opens_its_routes_alone(keys: Keys) -> None:
    held = Held()
    for path, method in (("/v1/pools/a", "GET"), ("/generate", "POST")):
        assert asked(keys, path, ACME, method=method, tenants=held) == (200, "acme")
        assert asked(keys, path, BOLT, "bolt", method=method, tenants=held) == (200, "bolt")
        assert asked(keys, path, None, method=method, tenants=held)[0] == 401
        assert asked(keys, path, ACME, method=method)[0] in (401, 200)  # without tenants it is any other key
    for path, method in (("/flush_cache", "POST"), ("/generate", "GET"), ("/v1/pools/a/b", "GET"), ("/metrics", "GET")):
        status, words = asked(keys, path, ACME, method=method, tenants=held)
        assert status == 403 and f"{method} {path} is not for tenants' keys: expected one of" in words
    assert asked(keys, "/health", ACME, tenants=held) == asked(keys, "/health", None, tenants=held) == (200, "")
    assert asked(keys, "/flush_cache", ADMIN, method="POST", tenants=held) == (200, "")
    assert asked(keys, "/metrics", ADMIN, tenants=held) == (200, "")
    assert asked(keys, "/metrics", None, tenants=held)[0] == 401 and asked(keys, "/metrics", None)[0] == 200


def test_the_operator_alone_asks_in_a_tenant_s_place() -> None:
    held = Held()
    assert asked(BOTH, "/v1/pools/a", ADMIN, "acme", tenants=held) == (200, "acme")
    assert asked(BOTH, "/flush_cache", ADMIN, "gone", "POST", held) == (200, "gone")
    assert asked(BOTH, "/generate", ADMIN, "acme", "POST", held) == (200, "acme")
    for key, place in ((ADMIN, None), (None, "acme"), ("wrong", "acme")):
        assert asked(BOTH, "/generate", key, place, "POST", held)[0] == 401
    status, words = asked(BOTH, "/v1/pools/a", ADMIN, "never", tenants=held)
    assert status == 404 and "no tenant 'never'; there are acme, bolt, gone" in words
    for key, place, path, method in ((USER, "acme", "/generate", "POST"), (ACME, "bolt", "/v1/pools/a", "GET")):
        status, words = asked(BOTH, path, key, place, method, held)
        assert status == 403 and HEADER in words and "gone" not in words
    status, words = asked(BOTH, "/v1/pools/a", ADMIN, "acme")
    assert status == 400 and "this server has no tenants (--tenants)" in words


def test_sglang_s_own_check_is_left_out_where_it_would_know_no_tenant() -> None:
    called: list[Any] = []
    server = SimpleNamespace(server_args=None)
    for tenants in (None, Held()):
        app = fastapi.FastAPI()
        for path in ("/server_info", "/get_server_info"):
            app.add_api_route(path, lambda: None, methods=["GET"])
        access.guard(app, server, SimpleNamespace(api_key=USER, admin_api_key=ADMIN), tenants)
        access.around_add_api_key_middleware(lambda app, **keys: called.append(keys), app, api_key=USER)
        middleware = [each for each in app.user_middleware if each.cls is CallerMiddleware]
        assert len(middleware) == 1
    assert called == [{"api_key": USER}]


# ---- the pools of each ----


@pytest.fixture
def served(manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(the pools that are no tenant's, what opens its tenants), beside schedulers that are imitated."""
    file = written(tmp_path, {"acme": entry(ACME), "bolt": entry(BOLT, max_pools=1)})
    monkeypatch.setenv(SETTINGS_ENV, json.dumps({"tenants": str(file)}))
    manager.server_args.api_key, manager.server_args.admin_api_key = None, ADMIN
    own = Service(manager, random.Random(0), str(tmp_path / "pools"))
    own.fails = 0.0

    def tenanted() -> Tenancy:
        return Tenancy(manager, own, str(file), ALONE, str(tmp_path / "pools"))

    return own, tenanted, file


def test_each_tenant_has_pools_of_its_own(served: Any, manager: Any, tmp_path: Path) -> None:
    async def run() -> None:
        own, tenanted, _ = served
        tenanted()
        manager.ext_pools = own
        theirs = tenants_of(own)
        demonstrations = models.demonstrations(4)
        for service in (own, *theirs.values()):
            await service.put("tickets", demonstrations, {"block_size": 2})
        assert theirs.keys() == {"acme", "bolt"} and all(pools_of(manager) is own for _ in range(2))
        keys = {
            name: {block["key"] for block in (await service.info("tickets"))["blocks"]}
            for name, service in (("", own), *theirs.items())
        }
        assert len(set.union(*keys.values())) == 6  # two blocks each, however equal
        before = access._tenant.set("acme")
        try:
            assert pools_of(manager) is theirs["acme"]
        finally:
            access._tenant.reset(before)
        await theirs["acme"].delete("tickets")
        assert "tickets" in own.pools and "tickets" in theirs["bolt"].pools and not theirs["acme"].pools
        with pytest.raises(PoolError, match="you have 1 pools, and your quota is 1"):
            await theirs["bolt"].put("more", demonstrations, {})
        assert standing(theirs["bolt"])["tokens"] == theirs["bolt"].pools["tickets"].current.tokens
        files = {str(path.relative_to(tmp_path / "pools")) for path in (tmp_path / "pools").rglob("*.json")}
        assert files == {"tickets.json", "tenants/bolt/tickets.json"}
        await quiet(own)

    asyncio.run(run())


def test_a_tenant_chooses_no_model_that_retrieves(served: Any, manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a retriever is named: loading a model reads any folder, and any model of a hub."""

    async def run() -> None:
        own, tenanted, _ = served
        tenanted()
        acme = tenants_of(own)["acme"]
        await acme.put("tickets", models.demonstrations(4), {})
        loaded: list[str] = []
        monkeypatch.setattr(dense, "_load", loaded.append)
        before = access._tenant.set("acme")
        try:
            with pytest.raises(PoolError, match="a model that the operator chose") as error:
                await would_select(acme, "tickets", {"text": "a question", "retriever": "dense:/etc"})
        finally:
            access._tenant.reset(before)
        assert error.value.status_code == 403 and not loaded
        await quiet(own)

    monkeypatch.setattr(manager, "ext_keys", ALONE, raising=False)
    asyncio.run(run())


def test_a_tenant_is_not_told_where_its_pools_lie(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator finds that in the log."""

    async def run() -> None:
        own, tenanted, _ = served
        tenanted()
        acme = tenants_of(own)["acme"]
        await acme.put("tickets", models.demonstrations(4), {})

        def fails(*_args: Any) -> None:
            raise OSError(errno.EACCES, "Permission denied", str(tmp_path / "pools" / FOLDER / "acme" / "tickets.json"))

        monkeypatch.setattr(PoolStore, "save", fails)
        monkeypatch.setattr(PoolStore, "delete", fails)
        for change in (acme.put("tickets", models.demonstrations(6), {}), acme.delete("tickets")):
            with pytest.raises(PoolError, match=r"Permission denied") as error:
                await change
            assert error.value.status_code == 503 and str(tmp_path) not in str(error.value)
        assert str(tmp_path) not in json.dumps(acme.list())
        await quiet(own)

    asyncio.run(run())
    assert sum(str(tmp_path) in each.message for each in caplog.records) == 2


def test_a_quota_of_tokens_counts_what_is_being_made(served: Any) -> None:
    async def run() -> None:
        own, tenanted, file = served
        tenancy_ = tenanted()
        bolt = tenants_of(own)["bolt"]
        one = (await bolt.put("a", models.demonstrations(4), {}))["tokens"]
        await bolt.delete("a")
        file.write_text(json.dumps({"bolt": entry(BOLT, max_tokens=2 * one)}), encoding="utf-8")
        await tenancy_.reread()
        work = [bolt.put(name, models.demonstrations(4), {}) for name in "abc"]
        found = await asyncio.gather(*work, return_exceptions=True)
        refused = [each for each in found if isinstance(each, PoolError)]
        assert len(refused) == 1 and refused[0].status_code == 403 and f"have {one}" in str(refused[0]), found
        assert len(bolt.pools) == 2 and bolt.tokens == 2 * one
        name = next(iter(bolt.pools))
        assert (await bolt.put(name, models.demonstrations(4), {}))["version"] == 2
        with pytest.raises(PoolError, match="max_tokens"):
            await bolt.append(name, models.demonstrations(2))
        await quiet(own)

    asyncio.run(run())


def test_the_file_is_read_again_and_a_wrong_one_changes_nothing(
    served: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def run() -> None:
        own, tenanted, _ = served
        tenancy_ = tenanted()
        bolt = tenants_of(own)["bolt"]
        written(tmp_path, {"bolt": entry("new key", max_pools=5), "late": entry("late")})
        await tenancy_.reread()
        shown = (ACME, BOLT, "new key", "late")
        assert [tenancy_.of_key(key) for key in shown] == [None, None, "bolt", "late"]
        assert tenants_of(own)["bolt"] is bolt and bolt.quota.quotas.max_pools == 5
        assert set(tenancy_.known()) == {"acme", "bolt", "late"}  # the operator may still delete acme's
        with caplog.at_level(logging.INFO):
            written(tmp_path, {"bolt": {"keys": ["plain"]}})
            await tenancy_.reread()
            written(tmp_path, {"bolt": entry(BOLT), "never": entry(ACME), "x": entry("x")})
            (tmp_path / "pools" / FOLDER / "x").write_text("where its folder should be", encoding="utf-8")
            await tenancy_.reread()
        said = [each.message for each in caplog.records if "the tenants stay as they were" in each.message]
        assert len(said) == 2 and "keys[0] is no SHA-256" in said[0] and "File exists" in said[1]
        assert [tenancy_.of_key(key) for key in shown] == [None, None, "bolt", "late"]
        assert set(tenancy_.known()) == {"acme", "bolt", "late"}
        assert all(service.folder.waits_for() is None for service in tenants_of(own).values())
        await quiet(own)

    asyncio.run(run())


def test_the_file_is_read_beside_the_event_loop(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are the folders of new tenants. Of two signals at once, what was read last counts."""
    threads: list[threading.Thread] = []

    async def run() -> None:
        own, tenanted, file = served
        tenancy_, read, load = tenanted(), Tenants.read, PoolStore.load

        def noted(work: Any) -> Any:
            def call(*args: Any) -> Any:
                threads.append(threading.current_thread())
                return work(*args)

            return call

        monkeypatch.setattr(Tenants, "read", noted(read))
        monkeypatch.setattr(PoolStore, "load", noted(load))
        written(file.parent, {"bolt": entry(BOLT), "late": entry("late")})
        await asyncio.gather(tenancy_.reread(), tenancy_.reread())
        assert set(tenancy_.known()) == {"acme", "bolt", "late"} and tenancy_.of_key("late") == "late"
        await quiet(own)

    asyncio.run(run())
    assert len(threads) == 3 and threading.main_thread() not in threads


@pytest.mark.usefixtures("served")  # its file and its settings
def test_a_tenant_s_pools_come_back_from_its_folder(manager: Any, tmp_path: Path) -> None:
    async def run(names: set[str], more: str) -> None:
        own = Service(manager, random.Random(1), str(tmp_path / "pools"))
        own.fails = 0.0
        Tenancy(manager, own, str(tmp_path / "tenants.json"), ALONE, str(tmp_path / "pools"))
        acme = tenants_of(own)["acme"]
        await acme.restored()
        assert set(acme.pools) == names
        await acme.put(more, models.demonstrations(4), {})
        await quiet(own)

    asyncio.run(run(set(), "a"))
    asyncio.run(run({"a"}, "b"))
    asyncio.run(run({"a", "b"}, "a"))
