"""A system of another package, installed by its entry point alone, against `transformers` with the same rule.

`attic_system.py` needs what the systems here have not needed together: memory of a stream that grows on the host, other
blocks in each layer and head, layers that vote, and tokens at one shared distance.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from tests.e2e.server import until
from tests.e2e.streams import (
    CASCADES,
    TOLERANCE,
    TURNS,
    Served,
    abort_some,
    converse,
    deviation,
    prompt_of,
    retract_often,
    save,
    sequence,
    serving,
)
from tests.e2e.warm import SPAWN
from tests.oracle import models, oracle

WINDOW, BLOCK, PICKED, FAR = 12, 4, 2, 20
POLICY = {"window": WINDOW, "block": BLOCK, "picked": PICKED, "far": FAR}


class Oracle:
    """The model in `transformers`: the rule on all tokens of a sequence at once.

    Attributes:
        voting: whether layers count in what those before them liked.
    """

    def __init__(self, folder: Path) -> None:
        self.model, self.voting, self.votes = models.load_model(folder), True, torch.zeros(0)

        def attention(module, query, key, value, attention_mask, scaling, **kwargs):
            logits = self.logits(module.layer_idx, query[0], key[0]) * scaling
            values = value[0].repeat_interleave(query.shape[1] // key.shape[1], 0)
            return (torch.softmax(logits, -1) @ values).transpose(0, 1)[None], None

        AttentionInterface.register("attic", attention)
        self.model.set_attn_implementation("attic")

    def log_probs(self, tokens: Sequence[int], _sizes: Any = None) -> torch.Tensor:
        """[tokens, vocabulary] log-probabilities of the next token."""
        with torch.no_grad():
            return torch.log_softmax(self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0], -1)

    def logits(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """[heads, tokens, tokens] without the scale; -inf for what is not seen."""
        (heads, tokens, _), group = query.shape, query.shape[0] // key.shape[0]
        column = torch.arange(tokens)
        plain_query, plain_key = (oracle.rotate(self.model, x, -column) for x in (query, key))
        shifted = oracle.rotate(self.model, plain_key, torch.full((tokens,), -FAR)).repeat_interleave(group, 0)
        near, far = query @ key.repeat_interleave(group, 0).transpose(1, 2), plain_query @ shifted.transpose(1, 2)
        cut = (column + 1 - WINDOW).clamp(min=0) // BLOCK * BLOCK
        inside = (column[None] >= cut[:, None]) & (column[None] <= column[:, None])
        means = plain_key[:, : tokens // BLOCK * BLOCK].unflatten(1, (-1, BLOCK)).mean(2)
        liked = torch.einsum("hgtd,hbd->htb", plain_query.view(-1, group, tokens, query.shape[2]), means)
        votes = self.votes if layer else torch.zeros_like(liked[0])
        self.votes = votes + liked.mean(0)
        gone = torch.arange(liked.shape[2])[None] < (cut // BLOCK)[:, None]  # [tokens, blocks]
        score = (liked + (votes if self.voting else 0)).masked_fill(~gone, float("-inf"))
        best = torch.zeros_like(score, dtype=torch.bool)
        if score.shape[2]:
            best.scatter_(2, score.topk(min(PICKED, score.shape[2])).indices, True)
        picked = torch.zeros(len(score), tokens, tokens, dtype=torch.bool)
        picked[:, :, : score.shape[2] * BLOCK] = (best & gone).repeat_interleave(BLOCK, 2)
        found = torch.full((heads, tokens, tokens), float("-inf"))
        found = torch.where(inside, near, found)
        return torch.where(picked.repeat_interleave(group, 0), far, found)


@pytest.fixture(scope="module", params=["overlap", "retracted"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from sglang_ext.systems.registry import systems

    site = tmp_path_factory.mktemp("site")
    shutil.copy(Path(__file__).with_name("attic_system.py"), site)
    info = site / "attic-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attic\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang_ext.systems]\nattic = attic_system:SYSTEM\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv(SPAWN, "1")  # a process that has read the entry points does not see new ones
        retracts = request.param == "retracted"
        if retracts:
            retract_often(patch)
        systems.cache_clear()
        folder = save(tmp_path_factory.mktemp("model"))
        try:
            with serving(folder, attention_backend="attic", policy=POLICY, disable_overlap_schedule=retracts) as served:
                served.cascades = Oracle(folder)  # type: ignore[assignment]
                served.retracts = retracts  # type: ignore[attr-defined]
                yield served
        finally:
            systems.cache_clear()


def clean(served: Served) -> None:
    """Nothing runs, and nothing is left on the host."""
    served.idle()
    until(lambda: served.engine.flush_cache().success)
    assert served.stats()["host_blocks"] == 0


def test_answers_are_the_rule_s(served: Served) -> None:
    prompts = [prompt_of(length, length) for length in (7, 61, 150)]
    answers = served.generate(prompts, [{}] * 3)
    oracle = served.cascades
    for prompt, answer in zip(prompts, answers, strict=True):
        assert deviation(prompt, answer, oracle.log_probs(sequence(prompt, answer), CASCADES)) <= TOLERANCE
    retracted = sum(answer["meta_info"].get("num_retractions", 0) for answer in answers)
    assert bool(retracted) == served.retracts  # type: ignore[attr-defined]
    oracle.voting = False  # type: ignore[attr-defined]
    try:
        table = oracle.log_probs(sequence(prompts[2], answers[2]), CASCADES)
        assert deviation(prompts[2], answers[2], table) > 100 * TOLERANCE, "votes decide"
    finally:
        oracle.voting = True  # type: ignore[attr-defined]
    clean(served)


def test_turns_go_on_from_what_is_on_the_host(served: Served) -> None:
    if served.retracts:  # type: ignore[attr-defined]
        pytest.skip("a turn that is retracted ends")
    converse(served, "a", {}, CASCADES, TURNS)
    assert served.stats()["host_blocks"] > 50
    clean(served)


def test_aborted_streams_leave_nothing(served: Served) -> None:
    abort_some(served)
    clean(served)
