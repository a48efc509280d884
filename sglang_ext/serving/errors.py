"""Errors that users see, with the HTTP status each one has."""

from __future__ import annotations

import fastapi
from fastapi.responses import JSONResponse

_TYPES = {
    400: "invalid_request_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "capacity_error",
    429: "rate_limit_error",
}


def reason_of(error: BaseException) -> str:
    """Why something failed, in words for whoever asked: without the path that the operating system names.

    Where a server keeps its files is the operator's business, who finds the path in the log.
    """
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def error_response(message: str, status: int) -> JSONResponse:
    """An error in OpenAI's envelope."""
    kind = _TYPES.get(status, "server_error")
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)


class PoolError(fastapi.HTTPException, ValueError):
    """A request about a pool that cannot be served; `status_code` is its HTTP status, `detail` says what to do."""

    def __init__(self, message: str, status: int = 400) -> None:
        fastapi.HTTPException.__init__(self, status_code=status, detail=message)

    def __str__(self) -> str:
        return str(self.detail)

    def fresh(self) -> PoolError:
        """The same without the frames that it went through: one that is kept must not keep what they had read."""
        return PoolError(str(self.detail), self.status_code)


class BlocksLost(PoolError):
    """Blocks that an encoding needs were evicted before it ran."""

    def __init__(self) -> None:
        super().__init__("blocks that the encoding attends to were evicted before it ran; retry", 503)


class UnknownPool(PoolError):
    """There is no pool of that name; says which there are, unless `known` is None: who asks may not see them."""

    def __init__(self, name: str, known: list[str] | None) -> None:
        if known is None:
            hint = "GET /v1/pools lists them to who holds the server's admin key"
        else:
            hint = f"pools on this server: {', '.join(sorted(known)) or 'none yet'}"
        super().__init__(f"unknown pool {name!r}; {hint}", 404)
