"""Asking an engine over pools, and comparing what it says with ``transformers``.

What must be right is computed by ``tests/oracle``, which uses none of this project's code. Read back from the engine
are only facts, never states: a pool's blocks with their token ids, the selection in view order, and the tokens that
were generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from tests.oracle import oracle

TOLERANCE = 1e-4  # on log-probabilities; the oracle's mistakes (test_oracle.py) are all above 1e-2
TOP = 8


@dataclass
class Ask:
    """One request: its own tokens behind a selection from a pool (no pool: a plain request).

    ``before`` are the tokens of earlier turns, which are part of what is sent.
    """

    pool: str | None
    own: list[int]
    select: dict[str, Any] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)
    new_tokens: int = 6

    @property
    def sent(self) -> list[int]:
        return [*self.before, *self.own]


@dataclass
class Answer:
    """What the engine said to an ``Ask``."""

    ask: Ask
    meta: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        return [token for _, token, *_ in self.meta["output_token_logprobs"]]

    @property
    def view(self) -> dict[str, Any]:
        return self.meta["sglang_ext"]


class Served:
    """One engine, the same checkpoint in ``transformers``, and what the oracle has encoded so far."""

    def __init__(
        self, engine: Any, model: torch.nn.Module, tokenizer: Any, answers: ModuleType = oracle, most: float = TOLERANCE
    ) -> None:
        """``answers`` is the oracle's module that says what is right, and ``most`` how far an answer may be from it."""
        self.engine, self.model, self.tokenizer = engine, model, tokenizer
        self.answers, self.most = answers, most
        self._encoded: dict[tuple[str, int], oracle.EncodedBlocks] = {}

    def text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def info(self, pool: str) -> dict[str, Any]:
        return self.engine.pool(pool, tokens=True)

    def blocks(self, pool: str) -> list[list[int]]:
        blocks = self.info(pool)["blocks"]
        assert [b["id"] for b in blocks] == list(range(len(blocks)))
        return [list(b["token_ids"]) for b in blocks]

    def encoded(self, pool: str) -> oracle.EncodedBlocks:
        info = self.info(pool)
        key = (pool, info["version"])
        if key not in self._encoded:
            options = {k: info["options"][k] for k in ("pattern", "sink_blocks", "previous_blocks", "positions")}
            self._encoded[key] = self.answers.encode(self.model, self.blocks(pool), **options)
        return self._encoded[key]

    def _arguments(self, asks: Sequence[Ask]) -> dict[str, Any]:
        params = []
        for ask in asks:
            p: dict[str, Any] = {"max_new_tokens": ask.new_tokens, "temperature": 0, "ignore_eos": True}
            if ask.pool is not None:
                p["custom_params"] = {"pool": ask.pool, "raw": True, **ask.select}
            params.append(p)
        return {
            "input_ids": [ask.sent for ask in asks],
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": TOP,
        }

    def generate(self, asks: Sequence[Ask], **arguments: Any) -> list[Answer]:
        """Send all ``asks`` as one batch."""
        out = self.engine.generate(**self._arguments(asks), **arguments)
        return [Answer(ask, o["meta_info"]) for ask, o in zip(asks, out, strict=True)]

    async def start(self, asks: Sequence[Ask]) -> list[Answer]:
        """The same, for the engine's event loop, beside other work."""
        out = await self.engine.async_generate(**self._arguments(asks))
        return [Answer(ask, o["meta_info"]) for ask, o in zip(asks, out, strict=True)]

    def pieces(self, answer: Answer) -> list[oracle.Piece]:
        """The whole blocks the engine says it stitched."""
        if answer.ask.pool is None:
            return []
        return oracle.whole_blocks(self.blocks(answer.ask.pool), answer.view["blocks"])

    def table(self, answer: Answer, pieces: Sequence[oracle.Piece]) -> torch.Tensor:
        """The oracle's log-probabilities over all sent and generated tokens, [tokens, vocabulary]."""
        nothing = oracle.EncodedBlocks([], [], [], [])
        encoded = self.encoded(answer.ask.pool) if answer.ask.pool else nothing
        options = {} if answer.ask.select.get("rebase", True) else {"rebase": False}
        return self.answers.log_probs(self.model, encoded, pieces, answer.ask.sent + answer.tokens, **options)

    def errors(self, answer: Answer, pieces: Sequence[oracle.Piece] | None = None) -> list[float]:
        """Of each generated token: the largest error of a log-probability, or of the choice (it was greedy)."""
        table = self.table(answer, self.pieces(answer) if pieces is None else list(pieces))
        first, found = len(answer.ask.sent) - 1, []
        for step, (logprob, token, *_) in enumerate(answer.meta["output_token_logprobs"]):
            row = table[first + step]
            known = [(logprob, token), *((lp, t) for lp, t, *_ in answer.meta["output_top_logprobs"][step])]
            error = max(abs(lp - row[t].item()) for lp, t in known)
            found.append(max(error, row.max().item() - row[token].item()))
        return found

    def deviation(self, answer: Answer, pieces: Sequence[oracle.Piece] | None = None) -> str | None:
        """None when the answer is exact, else one line that says where it first is not and by how much."""
        pieces = self.pieces(answer) if pieces is None else list(pieces)
        errors = self.errors(answer, pieces)
        worst = max(errors, default=0.0)
        where = next((step for step, error in enumerate(errors) if not error <= self.most), None)
        if where is None:
            return None
        ask = answer.ask
        return (
            f"{ask.pool} {ask.select}: pieces {pieces}, {len(ask.sent)} own tokens, cached_tokens "
            f"{answer.meta['cached_tokens']}; first wrong at generated token {where} of {len(answer.tokens)}, "
            f"largest error {worst:.2e}"
        )

    def assert_exact(self, answers: Sequence[Answer]) -> None:
        wrong = [line for line in (self.deviation(a) for a in answers) if line]
        assert not wrong, f"{len(wrong)} of {len(answers)} answers deviate:\n" + "\n".join(wrong[:20])
