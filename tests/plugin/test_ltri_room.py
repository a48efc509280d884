"""How many blocks on the host Ltri-LLM uses: no more than the GPU has room for the index of, unless somebody asks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.attention import ltri, ltri_stores
from sglang_ext.attention.ltri import LtriPolicy
from sglang_ext.attention.ltri_index import LayerIndex, index_bytes
from sglang_ext.attention.ltri_layer import Voter
from sglang_ext.attention.ltri_stores import RESERVED, blocks_that_fit
from sglang_ext.attention.policy import ServedModel
from sglang_ext.config import POLICY_ENV
from sglang_ext.policies.ltri_options import Ltri

SETTINGS = Ltri(similarity="max")
VOTERS = {0: Voter(), 1: None, 2: Voter()}
HEADS, ROWS = 8, 5


class OnGPU(torch.Tensor):
    """Keys that say that they are on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def keys() -> torch.Tensor:
    found: torch.Tensor = torch.zeros(10, 2, 64, dtype=torch.float16).as_subclass(OnGPU)
    return found


@pytest.mark.parametrize("blocks", [0, 1, 1000])
def test_the_index_of_as_many_blocks_fits(blocks: int, keys: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the streams' attention maps, and the blocks that came back."""
    settings, index = SETTINGS, index_bytes(SETTINGS, VOTERS, blocks + 1, HEADS, keys)
    maps = 2 * ROWS * (HEADS * settings.block**2 + 2 * settings.slots) * 4
    cached = 3 * ROWS * settings.ways * settings.block * 2 * 2 * 64 * 2
    for more, expected in ((0, blocks), (index_bytes(settings, VOTERS, 1, HEADS, keys) - 1, blocks), (-1, blocks - 1)):
        free = RESERVED + maps + cached + index + more
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        assert blocks_that_fit(settings, VOTERS, HEADS, ROWS, keys) == max(0, expected)


def test_an_index_that_does_not_fit_is_refused_with_its_size(
    keys: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = 1000
    maps, cached = ltri_stores._beside_index(SETTINGS, VOTERS, HEADS, ROWS, keys)
    needed = RESERVED + maps + cached + index_bytes(SETTINGS, VOTERS, blocks, HEADS, keys)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (needed, needed))
    ltri_stores._check_room(SETTINGS, VOTERS, blocks, HEADS, ROWS, keys)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (needed - 1, needed))
    with pytest.raises(ValueError, match=r"the index of 1000 blocks takes .* in 2 layers that vote, and 5 streams"):
        ltri_stores._check_room(SETTINGS, VOTERS, blocks, HEADS, ROWS, keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "changes", [{"four_bits": True}, {"four_bits": False}, {"similarity": "sum"}, {"index": "infllm"}], ids=str
)
def test_the_index_takes_what_it_is_said_to(changes: dict[str, Any], dtype: torch.dtype) -> None:
    settings, keys = Ltri(**{"spans": 2, "vectors": 12, "block": 16, "chunk": 32, **changes}), torch.zeros(1, 2, 64)
    index = LayerIndex.empty(settings, 5, 64, keys.to(dtype))
    tensors = [each for each in (index.vectors, index.counts, index.scales) if each is not None]
    voters = {0: Voter(0.5, 1), 1: None, 2: Voter(0.5, 3), 3: Voter(0.5, 2, here=False)}
    wanted = 2 * sum(each.numel() * each.element_size() for each in tensors)
    assert index_bytes(settings, voters, 5, 4, keys.to(dtype)) == wanted


def test_any_number_fits_where_there_is_no_index(keys: torch.Tensor) -> None:
    """On a CPU the index is not looked at; nor is one of no voting layer, or of a head on another rank."""
    assert blocks_that_fit(SETTINGS, VOTERS, HEADS, ROWS, torch.zeros(10, 2, 64)) is None
    for voters in ({0: None}, {0: Voter(0.5, 3, here=False)}):
        assert blocks_that_fit(SETTINGS, voters, HEADS, ROWS, keys) is None


@pytest.mark.parametrize(
    ("host_gb", "most", "other", "expected"),
    [
        (None, 30, None, 30),
        (None, None, None, 100),
        (None, 1000, None, 100),
        (None, 30, 20, 20),
        (None, None, 20, 20),
        (None, 0, None, 100),
        (1.0, 30, None, 100),
    ],
)
def test_blocks_that_are_used(
    host_gb: float | None,
    most: int | None,
    other: int | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where nobody says how much host memory there is to be; `other` is what fits another rank."""
    monkeypatch.setenv(POLICY_ENV, json.dumps({} if host_gb is None else {"host_gb": host_gb}))
    policy, shape = LtriPolicy(), (1 + SETTINGS.slots, 2, 8)
    block = 2 * SETTINGS.block * 2 * 8 * 4
    monkeypatch.setattr(ltri, "host_bytes", lambda _: 100 * block)
    policy.bind(lambda: {0: (torch.zeros(shape), torch.zeros(shape))}, torch.float32)
    assert policy.blocks_on_host.total == 100
    if other is not None:
        monkeypatch.setattr(ltri, "least_over_ranks", lambda share: min(int(share), other))
    with caplog.at_level(logging.WARNING):
        policy.fit_host(most)
    host = policy.blocks_on_host
    assert host.total == host.available == host.stats()["host_blocks_total"] == expected
    assert (f"uses {expected} of 100 blocks on the host" in caplog.text) == (expected < 100)
    lease = host.lease(expected)
    assert sorted(lease.take() for _ in range(expected)) == list(range(expected)) and host.available == 0
    with pytest.raises(ValueError, match="are held: expected none"):
        host.use(1)


@pytest.mark.parametrize("sinks", [0, SETTINGS.block, SETTINGS.block + 1])
def test_sinks_that_are_no_blocks_are_warned_of(
    sinks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(POLICY_ENV, json.dumps({"sinks": sinks, "heads": "all"}))
    with caplog.at_level(logging.WARNING):
        LtriPolicy().meet(ServedModel("model", 2, 4, 2, False))
    said = f"sinks={sinks} is not a multiple of block={SETTINGS.block}" in caplog.text
    assert said == bool(sinks % SETTINGS.block)


@pytest.mark.parametrize(
    ("given", "shipped", "vectors"),
    [
        ({"heads": "all"}, None, 12),
        ({}, None, 12),
        ({}, Path("heads.json"), 48),
        ({"heads": "heads.json"}, None, 48),
        ({"heads": "all", "vectors": 30}, None, 30),
    ],
)
def test_fewer_vectors_where_all_heads_vote(
    given: dict[str, object], shipped: Path | None, vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs are that much longer. A file of the package or of `heads` says which head of a layer votes."""
    monkeypatch.setenv(POLICY_ENV, json.dumps(given))
    monkeypatch.setattr(ltri, "shipped", lambda _: shipped)
    heads = SimpleNamespace(check=lambda *_: None, voters={1: (0, 0.5)})
    monkeypatch.setattr(ltri.Heads, "load", lambda _: heads)
    policy = LtriPolicy()
    policy.meet(ServedModel("model", 2, 4, 2, False))
    assert policy.config.most_vectors == vectors and policy.all_heads_vote == (
        shipped is None and "heads.json" not in given.values()
    )
