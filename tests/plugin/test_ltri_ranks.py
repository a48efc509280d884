"""Ltri-LLM on tensor-parallel ranks without an engine: threads, of which each has some of the heads, decide as one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from sglang_ext import compat
from sglang_ext.attention import ltri
from sglang_ext.attention.ltri import LtriPolicy
from sglang_ext.attention.ltri_chunks import TorchChunks
from sglang_ext.attention.ltri_stores import KernelChunks
from sglang_ext.attention.ltri_warm_up import WarmUp
from sglang_ext.attention.policy import Caches, Request, ServedModel
from sglang_ext.attention.readers.ltri import check_ranks
from sglang_ext.config import POLICY_ENV
from sglang_ext.kernels.cells import Rotation
from sglang_ext.kernels.clamped_attention import reference
from sglang_ext.kernels.rope import Rope
from sglang_ext.policies.heads import Heads
from sglang_ext.policies.ltri import TensorRanks
from sglang_ext.serving import streams

POLICY: dict[str, Any] = {"sinks": 8, "window": 16, "block": 8, "chunk": 16, "last": 5, "retrieved": 2, "theta": 0.5}
POLICY |= {"spans": 2, "rate": 0.05, "early_rate": 0.05, "host_gb": 0.001}
LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 16
ROPE = Rope(0.5 ** torch.arange(DIM // 2))
PROMPT, TOKENS = 150, 160
SCORES = ((0.1, 0.4, 0.0, 0.2), (0.1, 0.0, 0.0, 0.1), (0.3, 0.2, 0.5, 0.6))
"""Head 1 votes in the first layer, head 3 in the last, and none between them."""


@dataclass
class Exchange:
    """Adds tensors of threads that are ranks.

    Attributes:
        calls: of each rank.
    """

    count: int
    calls: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = [0] * self.count
        self._given: list[torch.Tensor] = [torch.empty(0)] * self.count
        self._barrier = threading.Barrier(self.count, timeout=60)

    def add(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        self._given[rank], self.calls[rank] = values, self.calls[rank] + 1
        self._barrier.wait()
        assert len({(each.shape, each.dtype) for each in self._given}) == 1
        total = torch.stack(self._given).sum(0)
        self._barrier.wait()
        return total


KV_CACHES = WeakKeyDictionary[LtriPolicy, dict[int, tuple[torch.Tensor, torch.Tensor]]]()
"""What each rank's policy computes in: layer -> (keys, values)."""


def policy_on(ranks: int, rank: int, add: Callable[[torch.Tensor], torch.Tensor], kernels: bool = False) -> LtriPolicy:
    """The policy of one rank, on a model of which it has its share of the heads; references stand for kernels."""
    policy = LtriPolicy()
    policy.spread(ranks)
    shape = (1 + policy.config.slots, KV_HEADS // ranks, DIM)
    caches = {layer: (torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for layer in range(LAYERS)}
    KV_CACHES[policy] = caches
    policy.bind(lambda: caches, torch.float32)
    policy.compute_in(TorchChunks(policy.config, lambda: caches, policy.blocks_on_host, TensorRanks(ranks, add)))
    policy.meet(ServedModel("model", LAYERS, HEADS // ranks, KV_HEADS, False, rank))
    if kernels:
        voters, host = {layer: policy.voter(layer) for layer in caches}, policy.blocks_on_host
        own = HEADS // ranks, 1, Rotation.of(ROPE), reference, TensorRanks(ranks, add)
        policy.compute_in(KernelChunks(policy.config, host, caches, voters, *own))
    return policy


@dataclass(frozen=True)
class Read:
    """A stream that one rank has read.

    Attributes:
        out: [all chunks of all layers, heads of the rank, dim].
        blocks: what each layer got back, chunk by chunk.
        chunks: how many.
    """

    out: torch.Tensor
    blocks: list[list[int]]
    chunks: int


def read(policy: LtriPolicy, text: torch.Tensor) -> Read:
    """A prompt and an answer.

    Args:
        policy: of the rank.
        text: [layers, 3, tokens, heads of the rank, dim] queries, keys and values; of these the first heads count.
    """
    request = Request(1, "r", None, {}, prompt=PROMPT)
    policy.host_reserve(1, policy.host_need(TOKENS + 1))
    policy.start(request)
    slots, outs, blocks = torch.arange(1, 1 + policy.config.slots, dtype=torch.int32), list[torch.Tensor](), []
    bounds = policy.config.chunks(0, TOKENS, PROMPT)
    for low, high in bounds:
        carry: dict[str, Any] = {}
        for layer, (keys, values) in KV_CACHES[policy].items():
            caches = Caches(layer, keys, values, torch.empty(0, dtype=torch.int32), ROPE, DIM**-0.5, carry)
            query, new = text[layer, 0, low:high], text[layer, 1:, low:high, : keys.shape[1]]
            outs.append(policy.attend(request, caches, slots, low, query, new[0], new[1]).clone())
            blocks.append(policy._computing.retrieved(policy.stream(request).layers[layer]))
    policy.finish(request)
    assert policy.blocks_on_host.used == policy.blocks_on_host.promised == 0
    return Read(torch.cat(outs), blocks, len(bounds))


def texts(ranks: int) -> list[torch.Tensor]:
    """What each rank has: its query heads, and, first among the others, its key-value heads."""
    gen = torch.Generator().manual_seed(0)
    query = torch.randn(LAYERS, 1, TOKENS, HEADS, DIM, generator=gen)
    new = torch.randn(LAYERS, 2, TOKENS, KV_HEADS, DIM, generator=gen)
    wide = [torch.cat([part, part], 3)[:, :, :, : HEADS // ranks] for part in new.chunk(ranks, 3)]
    return [torch.cat(parts, 1) for parts in zip(query.chunk(ranks, 3), wide, strict=True)]


CASES: dict[str, dict[str, Any]] = {
    "sum": {"similarity": "sum", "heads": "all"},
    "max": {"similarity": "max", "heads": "all", "ratio": "rowcol"},
    "mass": {"similarity": "mass", "heads": "all", "vote": "preceding", "ratio": "col"},
    "off": {"vote": "off", "heads": "all", "sinks": 11, "last": 16},
    "heads, sum": {"similarity": "sum"},
    "heads, max": {"similarity": "max", "persist": False, "far": True},
    "heads, mass": {"similarity": "mass"},
    "heads, few vectors": {"similarity": "max", "vectors": 4},
    "heads, four bits": {"similarity": "max", "four_bits": True},
    "heads, keys' dtype": {"similarity": "max", "four_bits": False},
    "heads, infllm": {"index": "infllm"},
    "mean": {"index": "mean", "heads": "all"},
    "random": {"index": "random"},
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    Heads("tiny", "", SCORES, {}).save(tmp_path / "heads.json")
    found = {**POLICY, "heads": str(tmp_path / "heads.json"), **CASES[request.param]}
    monkeypatch.setenv(POLICY_ENV, json.dumps(found))
    return found


def test_ranks_answer_as_one(case: dict[str, Any]) -> None:
    alone = read(policy_on(1, 0, lambda values: values), texts(1)[0])
    exchange = Exchange(2)
    policies = [policy_on(2, rank, partial(exchange.add, rank)) for rank in range(2)]
    assert len({policy.blocks_on_host.total for policy in policies}) == 1
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(read, policies, texts(2))
    assert first.blocks == second.blocks == alone.blocks
    assert (torch.cat([first.out, second.out], 1) - alone.out).abs().max() < 1e-5
    assert len({tuple(blocks) for blocks in alone.blocks}) > 4
    voting = 0 if case.get("index") == "random" else LAYERS if case["heads"] == "all" else 2
    assert exchange.calls[0] == exchange.calls[1] <= 3 * voting * alone.chunks if voting else exchange.calls == [0, 0]


OF_KERNELS = {"block": 16, "window": 32, "chunk": 32, "sinks": 16}
"""Kernels cut no smaller tiles."""


def warmed(policy: LtriPolicy) -> None:
    """Have whole chunks recorded, at most two in a run; on a CPU, what is recorded is run again."""
    chunks: Any = policy._computing
    WarmUp(policy, chunks, KV_CACHES[policy], HEADS // policy.ranks, ROPE, DIM**-0.5).read(2)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].get("heads") != "all"])
def test_kernels_of_ranks_answer_as_one(
    name: str, recorded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the rank with a layer's retrieval head has its index, and all get the blocks that it finds."""
    Heads("tiny", "", SCORES, {}).save(tmp_path / "heads.json")
    settings = {**POLICY, **OF_KERNELS, "heads": str(tmp_path / "heads.json"), **CASES[name]}
    monkeypatch.setenv(POLICY_ENV, json.dumps(settings))
    alone = read(policy_on(1, 0, lambda values: values), texts(1)[0])
    exchange = Exchange(2)
    policies = [policy_on(2, rank, partial(exchange.add, rank), kernels=True) for rank in range(2)]
    if policies[0].config.remembers:
        stores = [policy._computing.stores for policy in policies]  # type: ignore[attr-defined]
        assert [[stores[rank][layer].index is not None for layer in range(LAYERS)] for rank in range(2)] == [
            [True, False, False],
            [False, False, True],
        ]
    with ThreadPoolExecutor(2) as threads:
        if recorded:
            list(threads.map(warmed, policies))
        first, second = threads.map(read, policies, texts(2))
    replays = recorded and policies[0].config.alike_from is not None
    chunks: Any = [policy._computing for policy in policies]
    assert [each.prompts["replayed"] > 0 for each in chunks] == [replays, replays]
    assert first.blocks == second.blocks
    pairs = zip(first.blocks, alone.blocks, strict=True)
    assert all(sorted(mine) == sorted(one) for mine, one in pairs if mine or not replays)  # a replay names none
    assert (torch.cat([first.out, second.out], 1) - alone.out).abs().max() < 1e-5
    assert len({tuple(blocks) for blocks in alone.blocks}) > 4
    assert exchange.calls[0] == exchange.calls[1]


@pytest.mark.parametrize(("index", "heads", "ranks"), [("ltri", "all", 1), ("random", "all", 2), ("ltri", "file", 2)])
def test_kernels_serve_ranks_where_one_head_votes(
    index: str, heads: str, ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Heads("tiny", "", SCORES, {}).save(tmp_path / "heads.json")
    named = "all" if heads == "all" else str(tmp_path / "heads.json")
    monkeypatch.setenv(POLICY_ENV, json.dumps({**POLICY, **OF_KERNELS, "index": index, "heads": named}))
    check_ranks(policy_on(ranks, 0, lambda values: values))


def test_kernels_refuse_ranks_where_all_heads_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICY_ENV, json.dumps({**POLICY, **OF_KERNELS, "heads": "all"}))
    with pytest.raises(ValueError, match=r"tp_size=2 with kernels, and all heads of a layer vote.*sglang-ext heads"):
        check_ranks(policy_on(2, 0, lambda values: values))


def test_ranks_that_do_not_ask_decide_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above shows something."""
    monkeypatch.setenv(POLICY_ENV, json.dumps({**POLICY, "heads": "all"}))
    first, second = (read(policy_on(2, rank, lambda values: values), texts(2)[rank]) for rank in range(2))
    assert first.blocks != second.blocks


def test_a_share_of_host_memory_holds_as_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`host_gb` is of all ranks together, and a block of one rank has its heads alone."""
    monkeypatch.setenv(POLICY_ENV, json.dumps({**POLICY, "heads": "all"}))
    one, two = (policy_on(ranks, 0, lambda values: values) for ranks in (1, 2))
    assert one.blocks_on_host.total == two.blocks_on_host.total > 10
    assert one.blocks_on_host.block_bytes == 2 * two.blocks_on_host.block_bytes


def test_ranks_take_what_the_smallest_share_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks look at the free memory one after the other, and may find different numbers."""
    monkeypatch.setenv(POLICY_ENV, json.dumps({**POLICY, "heads": "all"}))
    own = policy_on(2, 0, lambda values: values).blocks_on_host
    monkeypatch.setattr(ltri, "least_over_ranks", lambda share: share // 2)
    assert policy_on(2, 0, lambda values: values).blocks_on_host.total in (own.total // 2, own.total // 2 + 1)


def test_a_prompt_that_is_too_long_is_told_the_memory_of_all_ranks() -> None:
    host = SimpleNamespace(total=3, block_bytes=2**29)
    cache: Any = SimpleNamespace(most_tokens=100, policy=SimpleNamespace(ranks=2, host=host))
    assert "for which the server's 3.00 GiB of host memory have room" in streams._too_long(cache, 200)


def test_ranks_that_do_not_divide_the_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICY_ENV, json.dumps({**POLICY, "heads": "all"}))
    policy = LtriPolicy()
    policy.spread(2)
    with pytest.raises(ValueError, match="tp_size=2 for a model with 3 key-value heads a layer: ranks cannot have"):
        policy.meet(ServedModel("model", LAYERS, 6, 3, False, 0))


@pytest.mark.parametrize(("own", "expected"), [(3, 3), (None, 4)])
def test_heads_of_zeros_are_not_counted(own: int | None, expected: int) -> None:
    """Without a GPU, SGLang makes 4 key-value heads of 3 for two ranks."""
    config = SimpleNamespace(hf_config=SimpleNamespace(), get_total_num_kv_heads=lambda: 4)
    if own is not None:
        config.hf_config.original_total_num_kv_heads = own
    assert compat.model_kv_heads(SimpleNamespace(model_config=config)) == expected
