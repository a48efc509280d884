"""Probabilities of a pool's labels as the answer to one question."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from typing import Any

from sglang_ext import compat
from sglang_ext.cache.rows import INTERNAL, Row


async def label_probabilities(
    manager: Any, labels: Sequence[str], lead: str, end: str, own: list[int], row: Row
) -> dict[str, float]:
    """Share of each label among all labels, from the log-probability of its whole text after the prompt.

    Every label is scored with what ends an answer (the separator, or end of sequence in a chat), so that a label that
    begins another does not take the other's probability. The prompt (the row's blocks and the request's `own` tokens)
    has its keys and values cached: each label costs its own tokens.
    """
    token_ids = manager.tokenizer([lead + label + end for label in labels], add_special_tokens=False)["input_ids"]
    if not end and manager.tokenizer.eos_token_id is not None:
        token_ids = [[*ids, manager.tokenizer.eos_token_id] for ids in token_ids]
    scores = await asyncio.gather(*(_score(manager, own, ids, row) for ids in token_ids))
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return {label: weight / sum(weights) for label, weight in zip(labels, weights, strict=True)}


async def _score(manager: Any, own: list[int], answer: list[int], row: Row) -> float:
    """Sum of the natural-log probabilities of `answer` after the prompt."""
    request = compat.encode_request(f"{INTERNAL}label-{uuid.uuid4().hex}", own + answer, row)
    request.return_logprob, request.logprob_start_len = True, row.prefix_tokens + len(own) - 1
    async for out in compat.generate(manager, request):
        values = out["meta_info"]["input_token_logprobs"][-len(answer) :]
        return float(sum(value for value, *_ in values))
    raise RuntimeError("the scoring request gave no answer")
