"""Probabilities of a pool's labels as the answer to one question."""

from __future__ import annotations

import asyncio
import math
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, replace

import fastapi

from sglang_ext import compat
from sglang_ext.cache import carried
from sglang_ext.cache.rows import INTERNAL, Row
from sglang_ext.compat.manager import abort_request
from sglang_ext.names import Tokenizer, TokenizerManager
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.grammar import LabelCheck
from sglang_ext.serving.label_tree import LabelTokens, branches, cut
from sglang_ext.serving.layout import encode_texts
from sglang_ext.serving.plan import ROOM_FOR_REQUESTS
from sglang_ext.serving.pool import Definition
from sglang_ext.types import JsonObject, Options

SCORED_AT_ONCE = 256  # tokens of labels in one scoring request: others are scheduled between two


@dataclass(frozen=True)
class AskedLabels:
    """The request that a prompt came in, where SGLang does not hand it on.

    Attributes:
        client: the HTTP request; None for the offline engine.
        scored: how many of its prompts have labels scored.
    """

    client: fastapi.Request | None = None
    scored: int = 1


ASKED: ContextVar[AskedLabels] = ContextVar("sglang_ext_asked", default=AskedLabels())  # noqa: B039 - it is frozen


@dataclass(frozen=True)
class Prompt:
    """What the labels follow.

    Attributes:
        row: the selected blocks.
        own: the request's own tokens behind them, at least one.
        extra_key: the request's, which its cached tokens are kept under.
        priority: the request's.
    """

    row: Row
    own: list[int]
    extra_key: str | None = None
    priority: int | None = None


def label_tokens(tokenizer: Tokenizer, labels: tuple[str, ...], lead: str, end: str) -> LabelTokens:
    """Tokens of every label with the white space before it and what ends an answer.

    A label that begins another does not take the other's probability: it is scored with its end, too, which is the
    end of the sequence where `end` is empty (in a chat).
    """
    texts = [lead + label + end for label in labels]
    eos = [tokenizer.eos_token_id] if not end and tokenizer.eos_token_id is not None else []
    return LabelTokens.of(list(encode_texts(tokenizer, texts, lambda encoding: [*encoding.ids, *eos])))


def check_labels(check: LabelCheck, definition: Definition, before: Definition | None = None) -> None:
    """ValueError, naming the label, where a pool has one that could not be an answer; takes a moment.

    Args:
        before: a definition that was checked.
    """
    known: set[str] = set()
    if before is not None and before.options == definition.options:
        known.update(before.labels)
    labels = [label for label in definition.labels if label not in known]
    check.check(labels, definition.options.render_query("")[1], definition.options.answer_end)
    check.check(labels, "", "")  # in a chat


def check_quota(labels: int, needed: int, limit: int, pool: str, option: str) -> None:
    """PoolError (413) when so many `labels` of a pool need more than `limit` tokens, over all prompts of a request.

    Args:
        needed: tokens of the labels' tree, or their number, which is less: it is known before they are tokenized.
        option: of the request, which asks for this.
    """
    prompts = ASKED.get().scored
    if needed * prompts > limit:
        least = "at least " if needed == labels else ""
        times = f" for each of {prompts} prompts" if prompts > 1 else ""
        raise PoolError(
            f"{option}: the {labels} labels of pool {pool!r} need {least}{needed} tokens{times} (shared beginnings"
            f" counted once), this server scores at most {limit} a request: leave out {option}, send fewer prompts,"
            " use fewer or shorter labels, or raise --max-label-tokens",
            413,
        )


async def label_probabilities(
    manager: TokenizerManager, labels: tuple[str, ...], tokens: LabelTokens, prompt: Prompt, state: Options
) -> dict[str, float]:
    """Share of each label among all labels, from the log-probability of its whole text after the prompt.

    One scoring request follows the other, each over a part of the labels' tree: what others ask is scheduled between
    two of them, and when the client has gone or this task is cancelled, the rest is not asked.

    Args:
        state: the schedulers' (`Channel.ask`), for how much KV cache there is.

    Raises:
        ClientGone: the client hung up.
        PoolError: (500) the model's numbers are none.
    """
    client, scores = ASKED.get().client, {}
    for group in cut(sorted(set(tokens.token_ids)), _most(tokens, prompt, state)):
        if client is not None and await client.is_disconnected():
            raise ClientGone
        scores.update(await _score(manager, client, group, prompt))
    found = [scores[ids] for ids in tokens.token_ids]
    if not all(map(math.isfinite, found)):
        label = labels[next(number for number, score in enumerate(found) if not math.isfinite(score))]
        raise PoolError(f"label {label!r}: the model gives it a log-probability that is no number", 500)
    top = max(found)
    weights = [math.exp(score - top) for score in found]
    total = sum(weights)
    return {label: weight / total for label, weight in zip(labels, weights, strict=True)}


class ClientGone(PoolError):
    """The client hung up while its labels were scored; nobody reads this."""

    def __init__(self) -> None:
        super().__init__("the client hung up while its labels were scored", 499)


def check_labels_fit(row: Row, own: int, longest: int, context: int) -> None:
    """Whether the longest label stays within the model's context behind a row and a question.

    Args:
        row: of the question.
        own: tokens of the question.
        longest: tokens of the longest label.
        context: tokens of the longest prompt that SGLang takes.

    Raises:
        ValueError: it does not; has the numbers.
    """
    if row.reach + own + longest > context:
        raise ValueError(
            f"the question has {own} tokens behind {row.reach} of blocks, and the longest label {longest}; together"
            f" they must be at most {context}, for labels to be scored: shorten the question or lower the ratio"
        )


def _most(tokens: LabelTokens, prompt: Prompt, state: Options) -> int:
    """Tokens of one scoring request's tree; a branch repeats a token, so the row may have twice as many.

    At least twice the longest label, so that what the labels share is computed again for few of them.
    """
    longest = max(len(ids) for ids in tokens.token_ids)
    own = len(prompt.own)
    check_labels_fit(prompt.row, own, longest, state["max_req_input_len"])
    free = state["total_tokens"] - state["held_tokens"] - own - ROOM_FOR_REQUESTS
    columns = state["max_req_input_len"] - prompt.row.reach - own - 1
    return max(1, min(max(SCORED_AT_ONCE, 2 * longest), free // 4, columns // 2))


async def _score(
    manager: TokenizerManager, client: fastapi.Request | None, group: list[tuple[int, ...]], prompt: Prompt
) -> dict[tuple[int, ...], float]:
    """Sum of the natural-log probabilities of each sequence of `group` after the prompt; aborted when cancelled."""
    own = len(prompt.own) - 1  # every first branch begins with the last one
    first = prompt.row.prefix_tokens + own
    found = branches(group, prompt.own[-1], first + prompt.row.shift)
    if not found.blocks:  # there is nothing in `group` but an empty sequence
        return dict.fromkeys(group, 0.0)
    row = replace(prompt.row, new=tuple(found.blocks), own=own)
    meta = await scored_row(manager, client, prompt.own[:-1] + found.token_ids, row, first, prompt)
    values = [value for value, *_ in meta["input_token_logprobs"]]
    if len(values) != len(found.token_ids):
        raise RuntimeError(f"{len(values)} log-probabilities of {len(found.token_ids)} tokens of labels")
    return found.scores([value or 0.0 for value in values])  # the first column is the prompt's last token: it has none


async def scored_row(
    manager: TokenizerManager,
    client: fastapi.Request | None,
    token_ids: list[int],
    row: Row,
    first: int,
    prompt: Prompt,
    asked: list[int] | None = None,
) -> JsonObject:
    """What SGLang says of one scoring request (`carried.score_request`), which is aborted when this task is cancelled.

    Raises:
        PoolError: (503) the request was aborted.
    """
    rid = f"{INTERNAL}label-{uuid.uuid4().hex}"
    request = carried.score_request(rid, token_ids, row, first, prompt.extra_key, prompt.priority, asked)
    try:
        async for out in compat.generate(manager, request, client):
            meta: JsonObject = out["meta_info"]
            reason = meta.get("finish_reason") or {}
            if reason.get("type") == "abort":
                raise PoolError(f"the scoring of labels was aborted: {reason.get('message')}; retry", 503)
            return meta
    except asyncio.CancelledError:
        abort_request(manager, request.rid)
        raise
    raise RuntimeError("the scoring request gave no answer")
