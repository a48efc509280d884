"""Requests in SGLang's tokenizer manager: their ids, their parts, and who may send them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils import get_bool_env_var
from sglang.srt.utils.auth import _get_auth_level_from_app_and_scope, decide_request_auth
from sglang.srt.utils.log_utils import log_json
from starlette.routing import Match

from sglang_ext.compat.line import ABORT_FLAG


def generate(manager: Any, request: Any, client: Any = None) -> AsyncIterator[Any]:
    """SGLang's own generate_request, without our composition (the request already says what it needs).

    Args:
        client: the HTTP request it is made for: it is aborted when the client has hung up.
    """
    return manager.generate_request(request, client)


def abort_request(manager: Any, rid: str) -> None:
    """Have the scheduler abort a request whose task was cancelled.

    Where such a task ends, SGLang 0.5.18 forgets its request, and does not tell the scheduler of one that it forgot.
    """
    if rid in manager.rid_to_state:
        manager.abort_request(rid=rid)
    else:
        manager._dispatch_to_scheduler(AbortReq(rid=rid))


def before_abort_request(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """BEFORE TokenizerManager.abort_request: note which requests are to be aborted, as other releases of SGLang do."""
    for asked in manager.rid_to_state if abort_all else {rid} & manager.rid_to_state.keys():
        setattr(manager.rid_to_state[asked], ABORT_FLAG, True)


def logical_rid(manager: Any, rid: str) -> str:
    """The id that a request was sent under, of one of its `n` answers."""
    return str(getattr(manager, "child_rid_to_logical_rid", {}).get(rid, rid))


def abort_was_asked(manager: Any, rid: str, state: Any) -> bool:
    """Whether somebody asked for a request to be aborted, by its own id or by the one it was sent under."""
    states = (state, manager.rid_to_state.get(rid), manager.rid_to_state.get(logical_rid(manager, rid)))
    return any(getattr(each, ABORT_FLAG, False) for each in states)


def streams_parts(manager: Any, request: Any) -> bool:
    """Whether each event of a stream brings what is new of the text, and not all of it."""
    return bool(getattr(request, "stream", False) and getattr(manager, "incremental_streaming_output", False))


def key_opens(app: Any, scope: dict[str, Any], token: str | None, api_key: str | None, admin: str | None) -> bool:
    """Whether SGLang's own rule lets a bearer token through to the route of an ASGI scope."""
    decision = decide_request_auth(
        method=scope.get("method", "GET"),
        path=scope["path"],
        authorization_header=None if token is None else f"Bearer {token}",
        api_key=api_key,
        admin_api_key=admin,
        auth_level=_get_auth_level_from_app_and_scope(app, scope),
    )
    return bool(decision.allowed)


def route_path(app: Any, scope: dict[str, Any]) -> str | None:
    """The path of the route that serves an ASGI scope, as it was written (`/v1/pools/{name}`); None without one."""
    for route in app.router.routes:
        match, _ = route.matches(scope)
        if match == Match.FULL:
            found: str | None = getattr(route, "path", None)
            return found
    return None


def answer_index(request: Any, answer: dict[str, Any], place: int) -> int:
    """Which answer to a GenerateReqInput this one is; `place` is its place among those that came with it."""
    return int(answer.get("index", place)) if len(logical_rids(request)) * _copies(request) > 1 else 0


def prompt_index(request: Any, answer: dict[str, Any], place: int) -> int:
    """Which prompt of a GenerateReqInput an answer belongs to; `place` as in `answer_index`."""
    return answer_index(request, answer, place) // _copies(request)


def _copies(request: Any) -> int:
    """How many answers a GenerateReqInput asks for each of its prompts."""
    return getattr(request, "parallel_sample_num", 1) or 1


def logical_rids(request: Any) -> list[str]:
    """Request ids of a GenerateReqInput after normalisation, one a prompt."""
    return [request.rid] if isinstance(request.rid, str) else list(request.rid or [])


# ---- its start and its end ----


def listen(manager: Any) -> None:
    """Have a manager handle signals and answers from now on, and not only from its first request on."""
    manager.auto_create_handle_loop()


async def freeze_objects(manager: Any) -> None:
    """Have garbage collections leave alone all objects that there are, in the processes of a server."""
    await manager.freeze_gc()


def is_told_to_end(manager: Any) -> bool:
    """Whether the server has got SIGTERM."""
    return bool(manager.gracefully_exit)


def takes_requests(manager: Any) -> bool:
    """Whether a server has started, and neither is paused nor failed its last health check."""
    return manager.server_status == ServerStatus.Up and not manager.is_pause


def must_end_at_once(manager: Any) -> bool:
    """Whether a server that is told to end waits for no request: it could not answer, or somebody wants it so."""
    return manager.server_status == ServerStatus.UnHealthy or get_bool_env_var("SGL_FORCE_SHUTDOWN")


def requests_under_way(manager: Any) -> int:
    """How many requests SGLang has that have not ended, the plugin's own among them."""
    return len(manager.rid_to_state)


# ---- its log of requests ----


def logs_json(manager: Any) -> bool:
    """Whether the server logs requests as JSON."""
    log = manager.request_logger
    return bool(log.log_requests) and log.log_requests_format == "json"


def log_request(manager: Any, event: str, line: dict[str, Any]) -> None:
    """Write a line to the server's log of requests, where SGLang writes its own."""
    log_json(manager.request_logger.targets, event, line)
