"""Pools over HTTP, on SGLang's own server: its api keys, its errors, its port."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any

import fastapi
from fastapi.responses import JSONResponse

from sglang_ext.config import PoolOptions
from sglang_ext.serving import checks
from sglang_ext.serving.layout import parse_jsonl
from sglang_ext.serving.tokenizer import pools_of

logger = logging.getLogger(__name__)

_JSONL = ("application/jsonl", "application/x-ndjson", "application/x-jsonlines")
_TYPES = {400: "invalid_request_error", 404: "not_found_error", 409: "conflict_error", 413: "capacity_error"}


def error_response(message: str, status: int) -> JSONResponse:
    """An error in OpenAI's envelope."""
    kind = _TYPES.get(status, "server_error")
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)


def before_setup_and_run_http_server(server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> Any:
    """BEFORE _setup_and_run_http_server: add our routes, and encode the pools of --pool-dir once the server is up."""
    if not checks.is_active(server_args):
        return None
    from sglang.srt.entrypoints.http_server import app

    add_routes(app, tokenizer_manager)
    then = kwargs.get("launch_callback")

    def launched() -> None:
        # SGLang calls this from its warm-up thread, when the event loop is serving.
        loop = tokenizer_manager.event_loop
        if loop is not None:
            asyncio.run_coroutine_threadsafe(pools_of(tokenizer_manager).restored(), loop)
        if then is not None:
            then()

    kwargs["launch_callback"] = launched
    return (server_args, tokenizer_manager, *args), kwargs


def add_routes(app: fastapi.FastAPI, manager: Any) -> None:
    """The routes of /v1/pools on `app`."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    def route(method: str, path: str) -> Callable[[Callable[..., Awaitable[Any]]], None]:
        def add(handler: Callable[..., Awaitable[Any]]) -> None:
            async def guarded(request: fastapi.Request) -> fastapi.Response:
                try:
                    await pools_of(manager).restored()
                    return await handler(request)
                except fastapi.HTTPException as error:
                    return error_response(str(error.detail), error.status_code)
                except ValueError as error:
                    return error_response(str(error), 400)

            app.add_api_route(path, auth_level(AuthLevel.ADMIN_OPTIONAL)(guarded), methods=[method])

        return add

    def service() -> Any:
        return pools_of(manager)

    @route("GET", "/v1/pools")
    async def list_pools(request: fastapi.Request) -> fastapi.Response:
        return JSONResponse({"pools": service().list()})

    @route("POST", "/v1/pools/plan")
    async def plan(request: fastapi.Request) -> fastapi.Response:
        demonstrations, options, _ = await _body(request)
        return JSONResponse(await service().plan(demonstrations, options, await service().admin("state")))

    @route("PUT", "/v1/pools/{name}")
    async def put(request: fastapi.Request) -> fastapi.Response:
        demonstrations, options, wait = await _body(request)
        return _changed(await service().put(request.path_params["name"], demonstrations, options, wait))

    @route("GET", "/v1/pools/{name}")
    async def show(request: fastapi.Request) -> fastapi.Response:
        tokens = _flag(request, "tokens", False)
        return JSONResponse(await service().info(request.path_params["name"], tokens))

    @route("DELETE", "/v1/pools/{name}")
    async def delete(request: fastapi.Request) -> fastapi.Response:
        return JSONResponse(await service().delete(request.path_params["name"]))

    @route("POST", "/v1/pools/{name}/cancel")
    async def cancel(request: fastapi.Request) -> fastapi.Response:
        return JSONResponse(await service().cancel(request.path_params["name"]))

    @route("POST", "/v1/pools/{name}/demonstrations")
    async def append(request: fastapi.Request) -> fastapi.Response:
        demonstrations, options, wait = await _body(request)
        if options:
            raise ValueError(f"{', '.join(sorted(options))}: a pool's options are set when it is put, not on appending")
        return _changed(await service().append(request.path_params["name"], demonstrations, wait))

    @route("DELETE", "/v1/pools/{name}/demonstrations/{id:path}")
    async def delete_demonstration(request: fastapi.Request) -> fastapi.Response:
        params = request.path_params
        purge, wait = _flag(request, "purge", False), _flag(request, "wait", True)
        return _changed(await service().delete_demonstration(params["name"], params["id"], purge, wait))


def _changed(info: dict[str, Any]) -> JSONResponse:
    return JSONResponse(info, status_code=202 if info["status"] == "encoding" else 200)


def _flag(request: fastapi.Request, name: str, default: bool) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise ValueError(f"query parameter {name}={value!r}: expected true or false")
    return value.lower() in ("true", "1")


async def _body(request: fastapi.Request) -> tuple[list[Any], dict[str, Any], bool]:
    """(demonstrations, options, wait) of a JSON body, or of a JSON-lines body with the rest as query parameters."""
    raw = await request.body()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8 ({error.reason} at byte {error.start})") from error
    if request.headers.get("content-type", "").split(";")[0].strip().lower() in _JSONL:
        options = {key: _query_option(key, value) for key, value in request.query_params.items() if key != "wait"}
        return parse_jsonl(text), options, _flag(request, "wait", True)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the body is not JSON: {error.msg} at line {error.lineno}; for JSON lines set Content-Type: {_JSONL[0]}"
        ) from error
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    if not isinstance(data, dict) or not isinstance(data.get("demonstrations"), list):
        raise ValueError('the body must be an object with a list "demonstrations", and options beside it')
    demonstrations, wait = data.pop("demonstrations"), data.pop("wait", True)
    if not isinstance(wait, bool):
        raise ValueError(f"wait={wait!r}: expected true or false")
    return demonstrations, data, wait


def _query_option(name: str, text: str) -> Any:
    """An option from a query string, in the type it has in PoolOptions."""
    kinds = {field.name: str(field.type) for field in fields(PoolOptions)}
    kind = kinds.get(name, "str")
    if kind.startswith("str"):
        return text
    try:
        return json.loads(text.lower() if kind == "bool" else text)
    except json.JSONDecodeError as error:
        raise ValueError(f"query parameter {name}={text!r}: expected {kind}") from error
