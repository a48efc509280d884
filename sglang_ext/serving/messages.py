"""Messages between the tokenizer process and the schedulers, on SGLang's own ZMQ path."""

from __future__ import annotations

from sglang.srt.managers.io_struct import BaseReq


class ExtAdminReqInput(BaseReq, kw_only=True):  # type: ignore[call-arg]  # msgspec's
    """An operation on the schedulers' blocks; `payload` is JSON (see serving.admin.Admin)."""

    op: str
    payload: str = "{}"


class ExtAdminReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """The answer of the first rank; `payload` is JSON, with `error` when the operation failed."""

    payload: str
