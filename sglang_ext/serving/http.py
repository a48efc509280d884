"""Pools over HTTP, on SGLang's own server: its api keys, its errors, its port."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import fastapi
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from sglang_ext import compat
from sglang_ext.config import RequestOptions, check_name
from sglang_ext.names import Passed, ServerArgs, TokenizerManager
from sglang_ext.serving import access, checks, drain, page, ready, routes
from sglang_ext.serving.bodies import BodyLimit
from sglang_ext.serving.errors import PoolError, error_response
from sglang_ext.serving.explain import would_select
from sglang_ext.serving.planned import would_take
from sglang_ext.serving.poolless import no_pools
from sglang_ext.serving.pools import PoolService
from sglang_ext.serving.submitted import Source, query_flag, read_body, read_json, refuse_query
from sglang_ext.serving.tenancy import Tenancy, pools_of, standing, tenants_of
from sglang_ext.settings import POOL_DIR_ENV
from sglang_ext.types import JsonObject

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Handler = Callable[[fastapi.Request], Awaitable[fastapi.Response]]


def before_setup_and_run_http_server(
    server_args: ServerArgs, tokenizer_manager: TokenizerManager, *args: Passed, **kwargs: Passed
) -> tuple[tuple[Passed, ...], dict[str, Passed]] | None:
    """BEFORE _setup_and_run_http_server: add our routes, and encode the pools of --pool-dir once the server is up."""
    if not checks.is_active(server_args):
        return None
    from sglang.srt.entrypoints.http_server import app

    add_routes(app, tokenizer_manager)
    if not no_pools(tokenizer_manager):
        page.add_page(app)
    service, tenancy = pools_of(tokenizer_manager), _tenancy(tokenizer_manager, server_args)
    ready.add_route(app, tokenizer_manager, service)  # all tenants are there
    routes.guard(app)
    # SGLang adds its check of api keys after this, around it: bodies of strangers are not read at all.
    app.add_middleware(BodyLimit, settings=service.settings)
    of_pools = {field.name for field in dataclasses.fields(RequestOptions)}
    app.add_middleware(routes.QueryOptions, options=of_pools | tokenizer_manager.ext_policy.request_options)
    access.guard(app, tokenizer_manager, server_args, tenancy)
    drain.guard(app, tokenizer_manager, service.settings.drain_seconds)
    then = kwargs.get("launch_callback")

    def launched() -> None:
        # SGLang calls this from its warm-up thread, when the event loop is serving.
        loop = tokenizer_manager.event_loop
        if loop is not None:
            services = list(service.shared.services.values())
            asyncio.run_coroutine_threadsafe(_settle(tokenizer_manager, services), loop)
        if then is not None:
            then()

    kwargs["launch_callback"] = launched
    return (server_args, tokenizer_manager, *args), kwargs


async def _settle(manager: TokenizerManager, services: Sequence[PoolService]) -> None:
    """Encode the pools of --pool-dir, and have garbage collections leave alone what is there to stay.

    A full collection looks at all objects, those that SGLang imports among them, and no token leaves meanwhile.
    """
    restored = [asyncio.ensure_future(each.restored()) for each in services]
    await _freeze(manager)
    await asyncio.gather(*restored, return_exceptions=True)  # requests that need them are told what failed
    await _freeze(manager)


async def _freeze(manager: TokenizerManager) -> None:
    """Have garbage collections leave alone what there is; a server that cannot do so is slower at times."""
    try:
        await compat.freeze_objects(manager)
    except Exception:
        logger.exception("sglang_ext: collections of garbage look at all objects, as before")


def _tenancy(manager: TokenizerManager, server_args: ServerArgs) -> Tenancy | None:
    """The tenants of the server, where it has some."""
    own = pools_of(manager)
    if own.settings.tenants is None:
        return None
    directory = os.environ.get(POOL_DIR_ENV) or None
    return Tenancy(manager, own, own.settings.tenants, access.keys_of(server_args), directory)


def add_routes(app: fastapi.FastAPI, manager: TokenizerManager) -> None:
    """The routes of /v1/pools on `app`."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    def route(method: str, path: str, *query: str) -> Callable[[_Handler], None]:
        """Add a route that takes the query parameters named `query`; those of a body are looked at with it."""

        def add(handler: _Handler) -> None:
            async def guarded(request: fastapi.Request) -> fastapi.Response:
                try:
                    if method not in ("PUT", "POST"):
                        refuse_query(request.query_params, f"the parameters of {method} {path}", query)
                    await pools_of(manager).restored()
                    return await handler(request)
                except fastapi.HTTPException as error:
                    return error_response(str(error.detail), error.status_code)
                except ValueError as error:
                    return error_response(str(error), 400)

            app.add_api_route(path, auth_level(AuthLevel.ADMIN_OPTIONAL)(guarded), methods=[method])

        return add

    def service() -> PoolService:
        return pools_of(manager)

    @route("GET", "/v1/pools")
    async def list_pools(request: fastapi.Request) -> fastapi.Response:
        return JSONResponse(_listed(manager))

    @route("POST", "/v1/pools/plan")
    async def plan(request: fastapi.Request) -> fastapi.Response:
        source = await _source(request)
        return JSONResponse(await while_connected(request, would_take(service(), source)))

    @route("PUT", "/v1/pools/{name}")
    async def put(request: fastapi.Request) -> fastapi.Response:
        name, source = check_name(request.path_params["name"]), await _source(request)
        return _changed(await while_connected(request, service().put_from(name, source)))

    @route("GET", "/v1/pools/{name}", "tokens")
    async def show(request: fastapi.Request) -> fastapi.Response:
        tokens = query_flag(request.query_params, "tokens", False)
        return JSONResponse(await service().info(request.path_params["name"], tokens))

    @route("DELETE", "/v1/pools/{name}")
    async def delete(request: fastapi.Request) -> fastapi.Response:
        return JSONResponse(await service().delete(request.path_params["name"]))

    @route("POST", "/v1/pools/{name}/cancel")
    async def cancel(request: fastapi.Request) -> fastapi.Response:
        refuse_query(request.query_params, "the parameters of POST /v1/pools/{name}/cancel")
        return JSONResponse(await service().cancel(request.path_params["name"]))

    @route("POST", "/v1/pools/{name}/select")
    async def select(request: fastapi.Request) -> fastapi.Response:
        refuse_query(request.query_params, "the options of a selection stand beside the text, in the body")
        question = read_json(await _body(request))
        return JSONResponse(await would_select(service(), request.path_params["name"], question))

    @route("POST", "/v1/pools/{name}/demonstrations")
    async def append(request: fastapi.Request) -> fastapi.Response:
        source = await _source(request)
        return _changed(await while_connected(request, service().append_from(request.path_params["name"], source)))

    @route("DELETE", "/v1/pools/{name}/demonstrations/{id:path}", "purge", "wait")
    async def delete_demonstration(request: fastapi.Request) -> fastapi.Response:
        params, query = request.path_params, request.query_params
        purge, wait = query_flag(query, "purge", False), query_flag(query, "wait", True)
        work = service().delete_demonstration(params["name"], params["id"], purge, wait)
        return _changed(await while_connected(request, work))


def _listed(manager: TokenizerManager) -> JsonObject:
    """The pools that the caller can name; what a tenant takes; and to the operator, who is no tenant, all of theirs."""
    service, operator = pools_of(manager), access.is_operator(manager)
    listed = _pools(service, operator)
    if service.tenant:
        listed["tenant"] = standing(service)
    elif operator and (theirs := tenants_of(service)):
        listed["tenants"] = [{**standing(each), **_pools(each, operator)} for each in theirs.values()]
    return listed


def _pools(service: PoolService, operator: bool) -> JsonObject:
    """A line for each pool, and what is wrong with files, whose places are the operator's business."""
    found = service.folder.damaged if operator else []
    return {"pools": service.list(), **({"damaged": found} if found else {})}


def _changed(info: JsonObject) -> JSONResponse:
    return JSONResponse(info, status_code=202 if info["status"] == "encoding" else 200)


async def _body(request: fastapi.Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise PoolError("the client went away", 499) from error


async def _source(request: fastapi.Request) -> Source:
    """What reads the request's body, away from the event loop; the body itself is here."""
    raw = await _body(request)
    kind, query = request.headers.get("content-type", ""), dict(request.query_params)
    return lambda: read_body(raw, kind, query)


async def while_connected(request: fastapi.Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away; the request's body was read.

    Raises:
        PoolError: (499) the client went away; nobody reads it.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        return await task
    except asyncio.CancelledError:
        if not gone.done():  # this handler itself is cancelled
            task.cancel()
            raise
        raise PoolError("the client went away", 499) from None
    finally:
        gone.cancel()
        del task, gone  # an error's frames would refer to the task that has the error, and both keep the request's body


async def _disconnected(request: fastapi.Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
