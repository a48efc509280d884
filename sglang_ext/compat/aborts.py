"""Requests that end early: how SGLang is told, and what it says of them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_ext.compat.line import refresh_fill_ids

_ABORT = "sglang_ext_abort"
_KINDS = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestEntityTooLargeError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}


def abort(req: Any, message: str, status: int) -> None:
    """End a request that has not been scheduled yet, with an HTTP status."""
    req.set_finish_with_abort(message)
    kind = _KINDS[HTTPStatus(status)]
    req.to_finish = FINISH_ABORT(message, HTTPStatus(status), kind)
    setattr(req, _ABORT, req.to_finish)


def keep_first_abort(req: Any) -> None:
    """SGLang goes on checking an aborted request, whose prompt is one token now, and finds faults with that."""
    first = getattr(req, _ABORT, None)
    if first is not None:
        req.to_finish = first


_MISSING = "sglang_ext: demonstration blocks are not in the KV cache"


def missing_message(count: int) -> str:
    """What a request is told whose blocks are not in the cache; `blocks_were_missing` knows it again."""
    return f"{_MISSING} ({count} of them); retry"


def is_aborted(req: Any) -> bool:
    """Whether a request was or is about to be aborted."""
    return isinstance(req.finished_reason or req.to_finish, FINISH_ABORT)


def is_missing_message(message: str) -> bool:
    """Whether an abort's message is `missing_message`."""
    return message.startswith(_MISSING)


def grammar_failed(message: str) -> bool:
    """Whether an abort's message is SGLang's of a token that the request's grammar refused."""
    return message.startswith("Grammar accept_token failed")


def blocks_were_missing(error: Any) -> bool:
    """Whether an HTTPException carries `missing_message`."""
    return error.status_code == HTTPStatus.SERVICE_UNAVAILABLE and str(error.detail).startswith(_MISSING)


def abort_unscheduled(req: Any, message: str, status: int) -> None:
    """`abort` while the scheduler looks up a prefix: what the request would prefill shrinks to one token."""
    abort(req, message, status)
    refresh_fill_ids(req)
