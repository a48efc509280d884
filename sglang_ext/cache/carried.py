"""What requests of SGLang's carry for us: the row of a request, its turn, and what its answers used.

SGLang hands `sampling_params.custom_params` on from process to process, and nothing else of ours; within a process we
set attributes of our own on its objects. Both are read and written here alone.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from sglang_ext import compat
from sglang_ext.cache.rows import WIRE_KEY, Row
from sglang_ext.names import Req, RequestInput, TokenizedInput
from sglang_ext.types import JsonObject

if TYPE_CHECKING:
    from sglang_ext.cache.streams import Conversation

_ROW = "sglang_ext_row"
_WRITTEN = "sglang_ext_written"
_INTERNAL = "sglang_ext_internal"
_STITCHED = "sglang_ext_stitched_tokens"
_NOTES = "sglang_ext_notes"


def set_request_row(req: Req, row: Row | None) -> None:
    """Give a scheduler request its stitched row."""
    setattr(req, _ROW, row)


def request_row(req: Req) -> Row | None:
    """The stitched row of a scheduler request, or None for a plain one."""
    return getattr(req, _ROW, None)


def set_request_written(req: Req, written: tuple[int, ...]) -> None:
    """Note what `request_written` returns."""
    setattr(req, _WRITTEN, written)


def request_written(req: Req) -> tuple[int, ...]:
    """Position at which the first token of each prefix piece of a request's row was written."""
    return getattr(req, _WRITTEN, ())


def request_options(req: Req) -> JsonObject:
    """What a scheduler request's custom_params say, besides what SGLang and we put there."""
    custom = req.sampling_params.custom_params
    if not isinstance(custom, dict):
        return {}
    return {name: value for name, value in custom.items() if name not in ("__req__", WIRE_KEY)}


def sent_row(request: TokenizedInput | Req) -> Row | None:
    """The row that a TokenizedGenerateReqInput or a `Req` has in its custom_params, or None for a plain one.

    It takes its text's place there: SGLang hands the same custom_params from the one to the other.
    """
    custom = request.sampling_params.custom_params
    sent = custom.get(WIRE_KEY) if isinstance(custom, dict) else None
    if isinstance(sent, str) and sent:
        custom[WIRE_KEY] = sent = Row.load(sent)
    return sent if isinstance(sent, Row) else None


def sent_turn(req: Req) -> Conversation | None:
    """What `set_sent_turn` put into the message of a scheduler request, or None."""
    custom = req.sampling_params.custom_params
    return custom.get(WIRE_KEY) if isinstance(custom, dict) else None


def set_sent_turn(message: TokenizedInput, turn: Conversation | None, last: int | None) -> None:
    """Have a TokenizedGenerateReqInput, which is no `Req` yet, go on from a turn, beginning with the token `last`."""
    message.sampling_params.custom_params[WIRE_KEY] = turn
    if last is not None:
        message.input_ids = array("q", [last]) + message.input_ids


def encode_request(rid: str, token_ids: list[int], row: Row, priority: int | None) -> RequestInput:
    """A request that only writes keys and values, of `token_ids` behind the row's prefix: nothing is generated."""
    request = compat.GenerateReqInput(
        rid=rid,
        input_ids=token_ids,
        sampling_params={"max_new_tokens": 0, "temperature": 0.0, "custom_params": {WIRE_KEY: row.dump()}},
        stream=False,
        priority=priority,
    )
    setattr(request, _INTERNAL, True)
    set_stitched_tokens(request, row.prefix_tokens)
    return request


def score_request(
    rid: str,
    token_ids: list[int],
    row: Row,
    first: int,
    extra_key: str | None,
    priority: int | None,
    asked: list[int] | None = None,
) -> RequestInput:
    """An `encode_request` that returns the log-probability of every token of its row behind column `first`.

    Args:
        asked: tokens whose log-probabilities it also returns, behind column `first` and every later one.
    """
    request = encode_request(rid, token_ids, row, priority)
    request.return_logprob, request.logprob_start_len, request.token_ids_logprob = True, first, asked
    request.extra_key = extra_key
    return request


def is_internal(request: RequestInput) -> bool:
    """Whether `encode_request` made this request; unlike its id, nothing a client sends can say so."""
    return getattr(request, _INTERNAL, False)


def set_stitched_tokens(request: RequestInput, tokens: int) -> None:
    """Note what `stitched_tokens` returns."""
    setattr(request, _STITCHED, tokens)


def stitched_tokens(request: RequestInput) -> int:
    """How many tokens of blocks the scheduler will put in front of a GenerateReqInput's own."""
    return getattr(request, _STITCHED, 0)


def take_notes(request: RequestInput) -> dict[int, JsonObject | None]:
    """Have `serving.answers` note here, by the number of the choice, what each answer to a GenerateReqInput used."""
    notes: dict[int, JsonObject | None] = {}
    setattr(request, _NOTES, notes)
    return notes


def notes_of(request: RequestInput) -> dict[int, JsonObject | None] | None:
    """Where the answers to a GenerateReqInput are to be noted; None where nobody asked."""
    return getattr(request, _NOTES, None)
