"""Who may see what on a server: one rule, and whose key the request at hand has shown.

SGLang asks for keys route by route (`sglang.srt.utils.auth`) and forgets who asked. A pool's definition (its texts,
labels, template, system prompt, and the names of pools) shows in answers of routes that any client may use, so those
who write such answers ask here. Whose names a request means, on a server with tenants, is known here, too: what they
name is looked up in `tenancy.pools_of`.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import fastapi
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Send

from sglang_ext import compat
from sglang_ext.config import PoolOptions, RequestOptions
from sglang_ext.names import Passed, RequestInput, ServerArgs, TokenizerManager
from sglang_ext.retrievers.dense import MODEL_VARIABLE
from sglang_ext.serving import page, ready
from sglang_ext.serving.errors import PoolError, error_response
from sglang_ext.serving.tenants import HEADER, NOBODYS, ROUTES, not_for_tenants
from sglang_ext.types import JsonObject

logger = logging.getLogger(__name__)

_Scope: TypeAlias = dict[str, Any]
"""An ASGI scope; `compat.key_opens` takes nothing wider."""

_shown: ContextVar[str | None] = ContextVar("sglang_ext_shown_key", default=None)
"""The bearer token of the HTTP request that is being served; tasks that it starts inherit it."""

_tenant: ContextVar[str] = ContextVar("sglang_ext_tenant", default="")
"""The tenant whose names that request means; "" for nobody's: the operator's, or everybody's."""

SECRET_ARGUMENTS = ("api_key", "admin_api_key", "ssl_keyfile_password", "launch_command")
"""What /server_info hides. The last is how SGLang 0.5.23 was started, keys included, as a shell would quote them."""
HIDDEN = "hidden"
_HAS_TENANTS = "sglang_ext_has_tenants"  # of an app's state
_INFO_ROUTES = ("/server_info", "/get_server_info")
_WHOLE_PROMPT = ("return_prompt_token_ids", "return_routed_experts", "return_indexer_topk")
"""Fields of a request whose answer tells of every token of the prompt, those of blocks among them."""


@dataclass(frozen=True)
class Keys:
    """The keys of a server that takes requests over HTTP; None where it was started without.

    Attributes:
        api: `--api-key`.
        admin: `--admin-api-key`.
    """

    api: str | None
    admin: str | None

    def opens_definitions(self, shown: str | None) -> bool:
        """Whether who has shown this key may see pools' definitions: as SGLang asks for keys on admin routes."""
        needed = self.admin or self.api
        return not needed or (shown is not None and same(shown, needed))


def same(given: str, expected: str) -> bool:
    """Whether two secrets are equal, in a time that does not tell how much of them is."""
    return secrets.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode("utf-8", "surrogatepass"))


# ---- the rule ----


def tenant_at_hand() -> str:
    """The tenant whose names the caller at hand means: its own, or one in whose place the operator asks; else ""."""
    return _tenant.get()


def is_operator(manager: TokenizerManager) -> bool:
    """Whether the caller at hand operates the server; an engine in one's own process has no other callers."""
    keys: Keys | None = getattr(manager, "ext_keys", None)
    return keys is None or keys.opens_definitions(_shown.get())


def may_see_definitions(manager: TokenizerManager) -> bool:
    """Whether the caller at hand may see the definitions of the pools that it can name: a tenant may, its own."""
    return bool(tenant_at_hand()) or is_operator(manager)


def may_read(manager: TokenizerManager, pool: PoolOptions) -> bool:
    """Whether the caller at hand may be given the texts of a pool word by word."""
    return pool.readable or may_see_definitions(manager)


def check_retriever(manager: TokenizerManager, retriever: str) -> None:
    """Refuse a retriever whose model the operator did not choose, to everybody else.

    Loading one takes memory, and reads any folder and any model of a hub.

    Raises:
        PoolError: (403) says which retrievers there are.
    """
    kind, colon, model = retriever.partition(":")
    chosen = (kind, colon) != ("dense", ":") or model == os.environ.get(MODEL_VARIABLE)
    if not chosen and not is_operator(manager):
        raise PoolError(
            f"retriever {retriever!r}: expected a model that the operator chose ({MODEL_VARIABLE}), or the admin key;"
            " use bm25, random, all or dense",
            403,
        )


def check_reading(manager: TokenizerManager, obj: RequestInput, name: str, pool: PoolOptions) -> None:
    """Refuse a request whose answer would show the tokens of a pool's blocks to a caller who may not read them.

    Raises:
        PoolError: (400) names the field, and what to change.
    """
    asked = [field for field in _WHOLE_PROMPT if getattr(obj, field, False)]
    if asked and not may_read(manager, pool):
        raise PoolError(
            f"{asked[0]} would show the demonstrations of pool {name!r}, which its options do not let you read: leave"
            f" {asked[0]} out (on the OpenAI routes return_token_ids asks for it, too), or have the pool put with"
            " readable=true"
        )


def check_explain(manager: TokenizerManager, asked: RequestOptions, pool: PoolOptions) -> None:
    """Refuse `explain` to a caller who may not read a pool: scores tell which words are in it, too.

    Raises:
        PoolError: (403) says what to change.
    """
    if asked.explain and not may_read(manager, pool):
        raise PoolError(
            f"explain would show the demonstrations of pool {asked.pool!r}, which its options do not let you read: "
            "leave explain out, or have the pool put with readable=true",
            403,
        )


def owner_of_answers(manager: TokenizerManager) -> str:
    """Names whose stored answers the caller at hand may read: a tenant's, or else a hash of the key it has shown.

    Nothing where there are no keys.
    """
    if tenant := tenant_at_hand():
        return f"tenant:{tenant}"
    keys: Keys | None = getattr(manager, "ext_keys", None)
    shown = _shown.get()
    if keys is None or not (keys.api or keys.admin) or shown is None:
        return ""
    return hashlib.sha256(shown.encode()).hexdigest()


# ---- what a client ends ----


def around_dispatch(
    original: Callable[[TokenizerManager, Passed], None], manager: TokenizerManager, message: Passed
) -> None:
    """AROUND TokenizerManager._dispatch_to_scheduler: who chose a short id for its request ends no others with it.

    Schedulers end every request whose id begins with that of one to be ended. Where others' do, this one runs to its
    end instead.
    """
    if isinstance(message, compat.AbortReq) and not message.abort_all and manager.ext_pools is not None:
        others = ids_beginning_with(manager, message.rid)
        if others:
            logger.warning(
                "sglang_ext: request %r is not aborted: the ids of %d other requests begin with its id, and the"
                " schedulers would abort these, too", message.rid, len(others),
            )  # fmt: skip
            return
    original(manager, message)


def ids_beginning_with(manager: TokenizerManager, rid: str) -> list[str]:
    """Ids of other requests under way that begin with `rid`; those of its own parallel answers do not count."""
    parents = getattr(manager, "child_rid_to_logical_rid", {})
    return [
        other
        for other in manager.rid_to_state
        if other != rid and str(other).startswith(rid) and parents.get(other) != rid
    ]


# ---- the caller ----


def bearer_token(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The token of an `Authorization: Bearer` header, as SGLang reads it; one that is not ASCII is no key."""
    for name, value in headers:
        if name.lower() == b"authorization":
            kind, _, token = value.decode("latin-1").partition(" ")
            return token if kind.lower() == "bearer" and token and token.isascii() else None
    return None


def around_decide_request_auth(original: Callable[..., Passed], **request: Passed) -> Passed:
    """AROUND decide_request_auth: the page for people and /ready, which name nothing, need no key.

    A header that is not ASCII holds no key, where SGLang would answer with a 500.
    """
    header = request["authorization_header"]
    changed: dict[str, Passed] = {"authorization_header": header if header and header.isascii() else None}
    if request["method"] == "GET" and request["path"] in (page.PATH, ready.PATH):
        changed |= {"api_key": None, "admin_api_key": None}
    return original(**{**request, **changed})


def around_add_api_key_middleware(original: Callable[..., None], app: fastapi.FastAPI, **keys: Passed) -> None:
    """AROUND add_api_key_middleware: SGLang's check knows no tenants' keys, so a server with tenants goes without it.

    `CallerMiddleware` then does all of the checking, by SGLang's rule where no tenant's key is sent.
    """
    if not getattr(app.state, _HAS_TENANTS, False):
        original(app, **keys)


class TenantKeys(Protocol):
    """What the check of keys asks of a server's tenants (`tenancy.Tenancy`)."""

    def of_key(self, shown: str | None) -> str | None:
        """The tenant whose key was shown."""

    def known(self) -> Collection[str]:
        """Names of all tenants, those among them whose keys were taken away."""

    def begin(self) -> None:
        """The event loop of the server runs, and this is its thread."""


class _ContextExecutor(ThreadPoolExecutor):
    """Threads of an event loop whose work knows what the task knew that asked for it, whose key was shown among it.

    SGLang 0.5.23 renders and tokenizes chats in such threads.
    """

    def submit(self, work: Callable[..., Passed], /, *args: Passed, **kwargs: Passed) -> Future[Passed]:
        return super().submit(copy_context().run, work, *args, **kwargs)


class CallerMiddleware:
    """Notes the key that a request shows, and asks for it wherever SGLang's own check did not look.

    SGLang's check lets WebSockets pass, and takes the path from the URL, which some versions of Starlette put together
    with the client's `Host` header: a header that ends in "/health?" opens every route there. The path that is routed
    is `scope["path"]`.
    """

    def __init__(self, app: ASGIApp, keys: Keys, routes: fastapi.FastAPI, tenancy: TenantKeys | None = None) -> None:
        self.app, self.keys, self.routes, self.tenancy = app, keys, routes, tenancy

    async def __call__(self, scope: _Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            asyncio.get_running_loop().set_default_executor(_ContextExecutor())  # this is the server's start
            if self.tenancy is not None:
                self.tenancy.begin()
            return await self.app(scope, receive, send)
        shown = bearer_token(scope["headers"])
        try:
            tenant = self._admitted(scope, shown)
        except PoolError as error:
            return await _refuse(scope, receive, send, error)
        before = _shown.set(shown), _tenant.set(tenant)
        try:
            await self.app(scope, receive, send)
        finally:
            _shown.reset(before[0])
            _tenant.reset(before[1])

    def _admitted(self, scope: _Scope, shown: str | None) -> str:
        """The tenant whose names a request means, or "".

        Raises:
            PoolError: (401) the key does not open the route; (403, 404) it opens no such thing to this caller.
        """
        tenant = self.tenancy.of_key(shown) if self.tenancy is not None else None
        asked = _header(scope, HEADER)
        if tenant is not None:
            route = compat.route_path(self.routes, scope)
            if route not in ROUTES:
                raise PoolError(not_for_tenants(scope.get("method", "a websocket"), scope["path"]), 403)
            if asked not in (None, tenant):
                raise PoolError(f"{HEADER}: {asked}: you are tenant {tenant!r}; leave the header out", 403)
            return "" if route in NOBODYS else tenant
        # The admin key asks questions, too, in a tenant's place: elsewhere SGLang wants the api key for them.
        operates = asked is not None and self.keys.admin is not None and self.keys.opens_definitions(shown)
        if not (operates or self._opens(scope, shown)):
            raise PoolError("Unauthorized", 401)
        return "" if asked is None else self._in_place_of(asked, shown)

    def _opens(self, scope: _Scope, shown: str | None) -> bool:
        """Whether a key that is no tenant's opens a route."""
        api, admin = self.keys.api, self.keys.admin
        if not (api or admin):
            return True
        if self.tenancy is None:
            return compat.key_opens(self.routes, scope, shown, api, admin)
        if scope["path"].startswith("/metrics"):  # it names tenants
            return shown is not None and any(same(shown, key) for key in (api, admin) if key)
        return compat.key_opens(self.routes, scope, shown, api or admin, admin)

    def _in_place_of(self, asked: str, shown: str | None) -> str:
        """The tenant that the operator names; PoolError for everybody else."""
        if not self.keys.opens_definitions(shown):
            raise PoolError(f"{HEADER}: only whoever operates the server asks in a tenant's place; leave it out", 403)
        if self.tenancy is None:
            raise PoolError(f"{HEADER}: this server has no tenants (--tenants); leave the header out")
        known = self.tenancy.known()
        if asked not in known:
            raise PoolError(f"{HEADER}: no tenant {asked!r}; there are {', '.join(sorted(known)) or 'none'}", 404)
        return asked


def _header(scope: _Scope, name: str) -> str | None:
    """A header of a request; of several, the first."""
    found = (value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name.encode())
    return next(found, None)


async def _refuse(scope: _Scope, receive: Receive, send: Send, error: PoolError) -> None:
    from fastapi.responses import JSONResponse

    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
    elif error.status_code == 401:  # as SGLang answers
        await JSONResponse({"error": str(error)}, status_code=401)(scope, receive, send)
    else:
        await error_response(str(error), error.status_code)(scope, receive, send)


def keys_of(server_args: ServerArgs) -> Keys:
    """The keys that a server was started with."""
    return Keys(server_args.api_key or None, server_args.admin_api_key or None)


def guard(
    app: fastapi.FastAPI, manager: TokenizerManager, server_args: ServerArgs, tenancy: TenantKeys | None = None
) -> None:
    """Have `app` note who asks, and show of the server what the caller may see; before SGLang adds its own check.

    Raises:
        RuntimeError: this SGLang has no /server_info where it used to be, so nothing would hide its keys.
    """
    manager.ext_keys = keys_of(server_args)
    app.add_middleware(CallerMiddleware, keys=manager.ext_keys, routes=app, tenancy=tenancy)
    setattr(app.state, _HAS_TENANTS, tenancy is not None)
    for path in _INFO_ROUTES:
        route = next((each for each in app.router.routes if isinstance(each, APIRoute) and each.path == path), None)
        if route is None:
            raise RuntimeError(f"this SGLang has no route {path}: sglang_ext hides the server's keys there")
        app.router.routes.remove(route)
        app.add_api_route(path, _without_secrets(route.endpoint), methods=sorted(route.methods or ()))


def _without_secrets(endpoint: Callable[[], Awaitable[JsonObject]]) -> Callable[[], Awaitable[JsonObject]]:
    @functools.wraps(endpoint)
    async def server_info() -> JsonObject:
        return hide_secrets(await endpoint())

    return server_info


def hide_secrets(info: JsonObject) -> JsonObject:
    """What /server_info answers, with the server's keys left out wherever SGLang puts its arguments."""
    found: JsonObject = {}
    for name, value in info.items():
        if name == "internal_states":
            value = [hide_secrets(state) for state in value]
        found[name] = HIDDEN if name in SECRET_ARGUMENTS and value else value
    return found
