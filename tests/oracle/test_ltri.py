"""The oracle of Ltri-LLM equals dense and windowed attention where it must, and tells every setting from another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import models, oracle
from tests.oracle.ltri import LtriOracle, LtriSizes

TOKENS = torch.randint(7, models.VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(4)).tolist()
PROMPT = 85
SIZES = LtriSizes(sinks=4, window=16, block=8, chunk=16, last=5, retrieved=2, spans=2, vectors=6, early_layers=1)
TOLERANCE = 2e-5  # float64, but for the tables of the model's own rotation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ltri(folder: Path) -> Iterator[LtriOracle]:
    yield LtriOracle(folder)


def dense(folder: Path, sees: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """The checkpoint itself in float64, with a mask [tokens, tokens]."""
    model = models.load_model(folder, torch.float64)
    where = torch.arange(len(TOKENS)) if positions is None else positions
    return torch.log_softmax(oracle._forward(model, TOKENS, where, sees), -1)


def test_nothing_evicted_is_dense_attention(folder: Path, ltri: LtriOracle) -> None:
    whole = dense(folder, torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).tril())
    got = ltri.log_probs(TOKENS, PROMPT, replace(SIZES, window=96, chunk=16))
    assert (got - whole).abs().max() < TOLERANCE


def test_all_blocks_at_true_distances_are_dense_attention(folder: Path, ltri: LtriOracle) -> None:
    whole = dense(folder, torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).tril())
    got = ltri.log_probs(TOKENS, PROMPT, replace(SIZES, far=True, everything=True))
    assert (got - whole).abs().max() < TOLERANCE


def test_without_retrieval_it_is_a_window_with_sinks(folder: Path, ltri: LtriOracle) -> None:
    """At true distances, so that `transformers` can say it with a mask."""
    tokens = len(TOKENS)
    sees = torch.zeros(tokens, tokens, dtype=torch.bool)
    bounds = sorted({*range(0, PROMPT, 16), PROMPT - 5, *range(PROMPT, tokens + 1)})
    for begin, end in pairwise(bounds):
        local = min(begin, 4) + max(0, (begin - 4 - 16) // 8) * 8
        sees[begin:end, :4] = sees[begin:end, local:] = True
    got = ltri.log_probs(TOKENS, PROMPT, replace(SIZES, retrieved=0, far=True))
    assert (got - dense(folder, sees.tril())).abs().max() < TOLERANCE


def test_every_setting_shows(ltri: LtriOracle) -> None:
    heads = {0: (1, 0.4), 2: (3, 0.6)}
    base = replace(SIZES, heads=heads, similarity="max")
    wanted = ltri.log_probs(TOKENS, PROMPT, base)
    assert any(chunk.lists[0] != chunk.lists[2] for chunk in ltri.chunks), "layers differ"
    assert all(len(chunk.lists[1]) <= 2 for chunk in ltri.chunks) and ltri.chunks[-1].lists[2]
    changes: tuple[dict[str, Any], ...] = (
        {"sinks": 12},
        {"window": 24},
        {"chunk": 8},
        {"last": 9},
        {"retrieved": 1},
        {"spans": 1},
        {"theta": 0.6},
        {"similarity": "sum"},
        {"similarity": "mass"},
        {"vote": "preceding"},
        {"vote": "off"},
        {"heads": None},
        {"heads": {0: (0, 0.4), 2: (3, 0.6)}},
        {"far": True},
        {"four_bits": True, "retrieved": 1},
        {"everything": True},
    )
    for change in changes:
        got = ltri.log_probs(TOKENS, PROMPT, replace(base, **change))
        assert (got - wanted).abs().max() > 1e-3, change


def test_an_answer_keeps_the_lists_of_the_last_chunk(ltri: LtriOracle) -> None:
    ltri.log_probs(TOKENS, PROMPT, replace(SIZES, heads={0: (1, 0.4), 2: (3, 0.6)}))
    last = next(chunk for chunk in ltri.chunks if chunk.end == PROMPT)
    for chunk in ltri.chunks:
        if chunk.begin >= PROMPT:
            assert chunk.lists == last.lists
