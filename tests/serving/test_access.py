"""Who may see definitions, whose key a request shows, and what of the server's arguments is shown."""

from __future__ import annotations

import asyncio
import contextvars
from types import SimpleNamespace
from typing import Any

import fastapi
import pytest

from sglang_ext import compat
from sglang_ext.config import PoolOptions
from sglang_ext.serving import access
from sglang_ext.serving.access import CallerMiddleware, Keys, bearer_token, hide_secrets, may_read, may_see_definitions
from sglang_ext.serving.errors import PoolError

USER, ADMIN = "user", "admin"


def manager(keys: Keys | None) -> SimpleNamespace:
    return SimpleNamespace(ext_keys=keys)


def shown(key: str | None, keys: Keys | None) -> bool:
    """Whether who has shown `key` may see definitions."""

    def ask() -> bool:
        access._shown.set(key)
        return may_see_definitions(manager(keys))

    return contextvars.copy_context().run(ask)


@pytest.mark.parametrize(
    ("keys", "allowed"),
    [
        (None, [None, USER, ADMIN, "other"]),  # an engine of one's own
        (Keys(None, None), [None, USER, ADMIN, "other"]),
        (Keys(USER, None), [USER]),
        (Keys(None, ADMIN), [ADMIN]),
        (Keys(USER, ADMIN), [ADMIN]),
    ],
)
def test_definitions_need_the_strongest_key_there_is(keys: Keys | None, allowed: list[Any]) -> None:
    assert [key for key in (None, USER, ADMIN, "other") if shown(key, keys)] == allowed
    assert keys is None or not shown("", Keys(USER, ADMIN))


def test_what_may_be_read() -> None:
    closed, free = manager(Keys(USER, ADMIN)), manager(None)
    secret, readable = PoolOptions(), PoolOptions(readable=True)
    assert not may_read(closed, secret) and may_read(closed, readable) and may_read(free, secret)
    for field in ("return_prompt_token_ids", "return_routed_experts", "return_indexer_topk"):
        asked = SimpleNamespace(**{field: True})
        with pytest.raises(PoolError, match=f"^{field} would show .* 'p'.*readable=true") as error:
            access.check_reading(closed, asked, "p", secret)
        assert error.value.status_code == 400
        access.check_reading(closed, asked, "p", readable)
        access.check_reading(free, asked, "p", secret)
    access.check_reading(closed, SimpleNamespace(return_prompt_token_ids=False), "p", secret)


def test_answers_belong_to_a_key_where_there_are_keys() -> None:
    def owner(key: str | None, keys: Keys | None) -> str:
        def ask() -> str:
            access._shown.set(key)
            return access.owner_of_answers(manager(keys))

        return contextvars.copy_context().run(ask)

    assert owner("a", None) == owner("a", Keys(None, None)) == owner(None, Keys(USER, None)) == ""
    found = {owner(key, Keys(None, ADMIN)) for key in (None, "a", "b")}
    assert len(found) == 3 and "a" not in found


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (b"Bearer a b", "a b"),
        (b"bearer a", "a"),
        (b"Basic a", None),
        (b"Bearer", None),
        (b"Bearer ", None),
        (b"", None),
        (b"Bearer \xe9", None),
    ],
)
def test_bearer_tokens(header: bytes, token: str | None) -> None:
    assert bearer_token([(b"host", b"x"), (b"Authorization", header)]) == token
    assert bearer_token([(b"host", b"x")]) is None


def test_keys_are_hidden_wherever_arguments_are() -> None:
    info = {"api_key": "a", "admin_api_key": None, "port": 1, "internal_states": [{"admin_api_key": "b", "n": 2}]}
    info["launch_command"] = "sglang-ext serve m --api-key a"
    assert hide_secrets(info) == {
        "api_key": "hidden",
        "admin_api_key": None,
        "launch_command": "hidden",
        "port": 1,
        "internal_states": [{"admin_api_key": "hidden", "n": 2}],
    }
    assert info["api_key"] == "a"


def served(keys: Keys, scope: dict[str, Any]) -> tuple[list[str | None], list[dict[str, Any]]]:
    """(keys that the app behind the middleware found shown, what was sent to the client)."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    routes = fastapi.FastAPI()
    routes.add_api_route("/v1/pools", auth_level(AuthLevel.ADMIN_OPTIONAL)(lambda: None), methods=["GET"])
    routes.add_api_route("/generate", lambda: None, methods=["POST"])
    seen: list[str | None] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(access._shown.get())

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    asyncio.run(CallerMiddleware(app, keys, routes)(scope, receive, send))
    assert access._shown.get() is None
    return seen, sent


def scope(path: str, key: str | None, kind: str = "http", method: str = "GET") -> dict[str, Any]:
    headers = [(b"host", b"a/health?")] + ([(b"authorization", f"Bearer {key}".encode())] if key else [])
    found = {"type": kind, "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    return found if kind == "websocket" else {**found, "method": method}


@pytest.mark.parametrize(
    ("path", "method", "allowed"),
    [("/v1/pools", "GET", [ADMIN]), ("/generate", "POST", [USER]), ("/health", "GET", [None, USER, ADMIN])],
)
def test_the_path_that_is_routed_says_which_key(path: str, method: str, allowed: list[Any]) -> None:
    both = Keys(USER, ADMIN)
    for key in (None, USER, ADMIN, "other"):
        seen, sent = served(both, scope(path, key, method=method))
        if key in allowed:
            assert seen == [key] and not sent
        elif path != "/health":
            assert not seen and sent[0]["status"] == 401
        assert served(Keys(None, None), scope(path, key, method=method))[0] == [key]


def test_websockets_show_a_key() -> None:
    keys = Keys(USER, ADMIN)
    assert served(keys, scope("/v1/realtime", USER, "websocket"))[0] == [USER]
    seen, sent = served(keys, scope("/v1/realtime", None, "websocket"))
    assert not seen and sent == [{"type": "websocket.close", "code": 1008, "reason": "Unauthorized"}]
    assert served(keys, {"type": "lifespan"})[0] == [None]


def test_a_server_without_its_info_route_is_not_started() -> None:
    args = SimpleNamespace(api_key=USER, admin_api_key=ADMIN)
    with pytest.raises(RuntimeError, match="has no route /server_info"):
        access.guard(fastapi.FastAPI(), SimpleNamespace(), args)


def test_a_short_id_ends_no_other_requests() -> None:
    sent: list[Any] = []
    under_way = dict.fromkeys(["a", "ab", "c", "c_1", "d"])
    server = SimpleNamespace(ext_pools=object(), rid_to_state=under_way, child_rid_to_logical_rid={"c_1": "c"})

    def dispatch(message: Any) -> None:
        access.around_dispatch(lambda _, message: sent.append(message), server, message)

    for rid in ("a", "ab", "c", "d", "gone"):
        dispatch(compat.AbortReq(rid=rid))
    assert [message.rid for message in sent] == ["ab", "c", "d", "gone"]
    dispatch(compat.AbortReq(rid="", abort_all=True))
    dispatch("another message")
    server.ext_pools = None
    dispatch(compat.AbortReq(rid="a"))
    assert sent[4].abort_all and sent[5] == "another message" and sent[6].rid == "a"


def test_work_in_the_loops_threads_knows_whose_key_was_shown() -> None:
    """SGLang 0.5.23 converts chats there, which asks whether the caller may see a pool's definition."""
    keys, found = Keys(USER, ADMIN), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            loop = asyncio.get_running_loop()
            found.append(await loop.run_in_executor(None, may_see_definitions, manager(keys)))

    async def serve() -> None:
        middleware = CallerMiddleware(app, keys, fastapi.FastAPI())
        await middleware({"type": "lifespan"}, None, None)
        for key in (ADMIN, USER, ADMIN):
            headers = [(b"authorization", f"Bearer {key}".encode())]
            await middleware({"type": "http", "path": "/health", "headers": headers}, None, None)

    asyncio.run(serve())
    assert found == [True, False, True]
