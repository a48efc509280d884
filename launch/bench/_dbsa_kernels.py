"""The kernels' half of ``sglang-ext bench dbsa``: attention of one layer, Llama-3.1-8B's shape, bfloat16.

A pool of 48 blocks and requests that select 15 of them, the sink always, in pool order. Nothing is timed before its
output was compared with the float64 reference in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_ext.kernels.hopper import is_hopper
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.view_attention import Ranks, Segment, View, Written, hopper_impl, view_attention
from sglang_ext.kernels.view_attention import plan as planning
from sglang_ext.kernels.view_attention.buffers import PlanBuffers, PlanCapacity
from sglang_ext.kernels.view_attention.by_request import plan_by_request
from sglang_ext.kernels.view_attention.by_request_impl import attend_by_request, load
from sglang_ext.kernels.view_attention.config import Config, choose
from sglang_ext.kernels.view_attention.flash_attention_impl import FlashAttentionRequests
from sglang_ext.kernels.view_attention.flashinfer_impl import FlashInferRequests, LayerHeads
from sglang_ext.kernels.view_attention.planned import attend, merge
from sglang_ext.kernels.view_attention.virtual_requests import VirtualBatch, VirtualRequests
from sglang_ext.launch.bench._gpu import copy_bandwidth, matrix_rate, time_gpu
from sglang_ext.launch.bench._record import Figure, Timing, at_least, at_most
from sglang_ext.policies.dbsa import BlockSparse
from sglang_ext.types import JsonObject

HEADS, KV_HEADS, DIM = 32, 8, 128
LAYER = LayerHeads(HEADS, KV_HEADS, DIM, DIM, torch.bfloat16)
TOLERANCE = 2e-2  # bfloat16, of the largest value of the reference
DECODE_AIMS = {1: None, 8: 1.25, 32: 1.4, 128: 2.5}


@dataclass(frozen=True)
class KernelRequest:
    """One request: its blocks in view order, and its own tokens.

    Attributes:
        blocks: numbers of blocks.
        own: slots of the request's own tokens, its newest last.
    """

    blocks: tuple[int, ...]
    own: range


class PoolShape:
    """KV caches that hold a pool, block after block, and the own tokens of requests behind it."""

    def __init__(self, tokens: int, blocks: int, device: torch.device, seed: int = 0) -> None:
        self.dice = np.random.default_rng(seed)
        self.device = device
        # Length-balanced groups of 50 demonstrations differ by a few tokens.
        lengths = tokens // blocks + self.dice.integers(-12, 13, blocks)
        self.bounds = [0, *np.cumsum(lengths).tolist()]
        self.slots = self.bounds[-1] + 64 * 1024
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (self.slots, KV_HEADS, DIM)
        self.keys = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        self.values = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        # A block stands where it was encoded; a request's own tokens stand where they are seen.
        self.slot_pos = torch.zeros(self.slots, dtype=torch.int32, device=device)
        self.slot_pos[: self.bounds[-1]] = torch.arange(self.bounds[-1], dtype=torch.int32, device=device)
        frequency = 500000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        self.rope = Rope(frequency.float().to(device))
        self.table = torch.arange(self.slots, dtype=torch.int32, device=device)
        self.free = self.bounds[-1]
        self.scale = DIM**-0.5

    @property
    def blocks(self) -> int:
        return len(self.bounds) - 1

    def config(self, rows_per_run: float) -> Config:
        hopper = hopper_impl.serves(HEADS, KV_HEADS, DIM, DIM, self.keys.dtype, self.device)
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return choose(rows_per_run, HEADS // KV_HEADS, DIM, num_sms=sms, kv_heads=KV_HEADS, hopper=hopper)

    def length(self, block: int) -> int:
        return self.bounds[block + 1] - self.bounds[block]

    def request(self, chosen: int, own: int) -> KernelRequest:
        """A request over the sink and `chosen` - 1 other blocks, with `own` tokens."""
        others = 1 + self.dice.choice(self.blocks - 1, chosen - 1, replace=False)
        request = KernelRequest((0, *sorted(others.tolist())), range(self.free, self.free + own))
        self.free += own
        stitched = sum(map(self.length, request.blocks))
        positions = torch.arange(stitched, stitched + own, dtype=torch.int32, device=self.device)
        self.slot_pos[request.own.start : request.own.stop] = positions
        return request

    def requests(self, number: int, chosen: int, own: Sequence[int] | int) -> list[KernelRequest]:
        self.free = self.bounds[-1]
        sizes = [own] * number if isinstance(own, int) else own
        return [self.request(chosen, size) for size in sizes]

    def runs(self, request: KernelRequest, first_row: int, rows: int) -> planning.PlanRows:
        """The request as the planner takes it."""
        seen, starts = 0, []
        for block in request.blocks:
            starts.append(seen)
            seen += self.length(block)
        deltas = [start - self.bounds[block] for start, block in zip(starts, request.blocks, strict=True)]
        return planning.PlanRows(
            first_row=first_row,
            num_rows=rows,
            keys=np.array([*request.blocks, -1]),
            lengths=np.array([*map(self.length, request.blocks), len(request.own)]),
            deltas=np.array([*deltas, 0]),
            source=np.array([*(self.bounds[block] for block in request.blocks), request.own.start]),
            own=(len(request.blocks),),
            tail_column=seen,
        )

    def view(self, request: KernelRequest) -> tuple[View, int]:
        """The request as the reference takes it, and the position of its first own token."""
        parts = [torch.arange(self.bounds[b], self.bounds[b + 1], device=self.device) for b in request.blocks]
        slots = torch.cat(parts)
        own = torch.arange(request.own.start, request.own.stop, device=self.device)
        ranks = torch.arange(slots.numel(), device=self.device)
        return View((Segment(slots, Ranks(ranks)), Segment(own, Written(), causal=True))), slots.numel()

    def distinct_tokens(self, requests: Sequence[KernelRequest]) -> int:
        blocks = {block for request in requests for block in request.blocks}
        return sum(map(self.length, blocks)) + sum(len(request.own) for request in requests)


def _bytes(tokens: int) -> int:
    return tokens * KV_HEADS * DIM * 2 * 2


class PlannedBatch:
    """A batch planned for our kernel."""

    def __init__(self, pool: PoolShape, requests: Sequence[KernelRequest], rows: int, config: Config) -> None:
        self.pool, self.requests, self.rows = pool, requests, rows
        listed = [pool.runs(request, number * rows, rows) for number, request in enumerate(requests)]
        begin = time.perf_counter()
        self.plan = planning.plan_rows(listed, config=config, group=HEADS // KV_HEADS, kv_heads=KV_HEADS)
        self.planning = time.perf_counter() - begin
        self.buffers = PlanBuffers(
            PlanCapacity.of(self.plan),
            heads=HEADS,
            kv_heads=KV_HEADS,
            value_dim=DIM,
            rope=pool.rope,
            part_dtype=torch.bfloat16,
            rotated=torch.bfloat16 if config.groups else None,
        )
        self.buffers.load(self.plan, pool.table)
        total = len(requests) * rows
        self.query = torch.randn(total, HEADS, DIM, dtype=torch.bfloat16, device=pool.device)
        self.out = torch.empty_like(self.query)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        attend(query, self.buffers, keys, values, self.pool.scale)

    def merge(self, out: torch.Tensor) -> None:
        merge(self.buffers, out)

    def time(self) -> tuple[Timing, dict[str, Timing]]:
        """(attention, what goes with it): rotation where it is a launch of its own, the merge."""
        beside = {"merge": time_gpu(self.merge, self.out)}
        config, rotated = self.plan.config, self.buffers.rotated
        if not config.groups or rotated is None:
            return time_gpu(self.attend, self.query, self.pool.keys, self.pool.values), beside
        scale = self.pool.scale
        beside["rotation"] = time_gpu(lambda query: hopper_impl.rotate(query, self.buffers, scale), self.query)

        def attention(keys: torch.Tensor, values: torch.Tensor) -> None:
            hopper_impl.attend_rotated(self.buffers, rotated, keys, values, config)

        return time_gpu(attention, self.pool.keys, self.pool.values), beside

    def check(self, rows_checked: int = 6) -> float:
        """Largest error of some rows, of the largest value of the float64 reference.

        Raises:
            ValueError: it is larger than `TOLERANCE`; nothing is timed then.
        """
        self.out.fill_(float("nan"))
        self.attend(self.query, self.pool.keys, self.pool.values)
        self.merge(self.out)
        return self.compared(rows_checked)

    def compared(self, rows_checked: int = 6) -> float:
        """The same of what `out` holds, whatever wrote it."""
        worst = 0.0
        for number in np.linspace(0, len(self.requests) - 1, min(rows_checked, len(self.requests)), dtype=int).tolist():
            view, start = self.pool.view(self.requests[number])
            part = slice(number * self.rows, (number + 1) * self.rows)
            own = len(self.requests[number].own)
            positions = torch.arange(start + own - self.rows, start + own, device=self.pool.device)
            caches = (self.pool.keys, self.pool.values)
            expected, _ = view_attention(
                self.query[part].double(), positions, view, *caches, self.pool.slot_pos, self.pool.rope, self.pool.scale
            )
            error = (self.out[part].double() - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(error.nan_to_num(float("inf"))))
        if worst > TOLERANCE:
            raise ValueError(
                f"the kernel is wrong by {worst:.2g} of the largest value (at most {TOLERANCE}): not timed"
            )
        return worst


def _shared(
    pool: PoolShape, requests: Sequence[KernelRequest], rows: int, backend: str
) -> tuple[FlashInferRequests, torch.Tensor]:
    """FlashInfer over shared blocks: one virtual request a block and one a tail; queries rotated before."""
    virtual = FlashInferRequests(pool.device, LAYER, backend)
    counts, tokens, slots, seen_by = [], [], [], []
    users: dict[int, list[int]] = {}
    for number, request in enumerate(requests):
        for block in request.blocks:
            users.setdefault(block, []).append(number)
    for block, numbers in sorted(users.items()):
        counts.append(len(numbers) * rows)
        tokens.append(pool.length(block))
        slots.append(torch.arange(pool.bounds[block], pool.bounds[block + 1], dtype=torch.int32, device=pool.device))
        seen_by += [row for number in numbers for row in range(number * rows, (number + 1) * rows)]
    for number, request in enumerate(requests):
        counts.append(rows)
        tokens.append(len(request.own))
        slots.append(torch.arange(request.own.start, request.own.stop, dtype=torch.int32, device=pool.device))
        seen_by += list(range(number * rows, (number + 1) * rows))
    virtual.plan(VirtualBatch(counts, tokens, torch.cat(slots), causal=False, scale=pool.scale))
    return virtual, torch.tensor(seen_by, device=pool.device)


def decode(pool: PoolShape, batches: Sequence[int], chosen: int, bandwidth: float) -> list[Figure]:
    """Attention of one decode layer against the bytes of the distinct blocks."""
    figures = []
    for batch in batches:
        requests = pool.requests(batch, chosen, 30)
        config = pool.config(batch * chosen / pool.blocks)
        planned = PlannedBatch(pool, requests, 1, config)
        error = planned.check()
        floor = _bytes(pool.distinct_tokens(requests)) / bandwidth
        ours, beside = planned.time()
        virtual, seen_by = _shared(pool, requests, 1, "fa2")
        rotated = planned.query[seen_by]
        shared = time_gpu(virtual.run, rotated, pool.keys, pool.values)  # in a CUDA graph, as ours
        notes = {
            "batch": batch,
            "error": error,
            "config": vars(config),
            **{f"{name}_ms": timing.median * 1e3 for name, timing in beside.items()},
            "planning_ms": planned.planning * 1e3,
            "items": len(planned.plan.items),
            "entries": len(planned.plan.entry_row),
        }
        name = f"decode attention, one layer, {chosen} of {pool.blocks} blocks, batch {batch}"
        aim = DECODE_AIMS.get(batch)
        figures.append(at_most(name, ours, floor, "bytes of the distinct blocks", aim, notes=notes))
        figures.append(at_least(name + ", beside FlashInfer", ours, "fa2 over shared blocks", shared, None))
    return figures


def questions(pool: PoolShape, number: int, rows: int, chosen: int, rate: float) -> list[Figure]:
    """Prefill of questions over their stitched blocks against the tensor cores' floor."""
    requests = pool.requests(number, chosen, rows)
    per_block = number * rows * chosen / pool.blocks
    planned = PlannedBatch(pool, requests, rows, pool.config(per_block))
    error = planned.check(3)
    pairs = sum(sum(map(pool.length, r.blocks)) * rows + rows * (rows + 1) // 2 for r in requests)
    floor = 4 * pairs * HEADS * DIM / rate
    ours, beside = planned.time()
    one_by_one = _one_by_one(pool, planned)
    name = f"question prefill, one layer, {number} questions of {rows} tokens, {chosen} of {pool.blocks} blocks"
    notes: JsonObject = {"error": error, "config": vars(planned.plan.config)}
    notes |= {f"{name}_ms": timing.median * 1e3 for name, timing in beside.items()}
    figures = [at_most(name, ours, floor, "tensor-core rate of a large matrix product", 1.5, notes=notes)]
    for backend in ("fa2", "fa3"):
        virtual, seen_by = _shared(pool, requests, rows, backend)
        rotated = planned.query[seen_by]
        shared = time_gpu(virtual.run, rotated, pool.keys, pool.values, graph=False)
        figures.append(at_least(name + ", beside FlashInfer", ours, f"{backend} over shared blocks", shared, None))
    figures.append(at_least(name + ", each reads its own blocks", *one_by_one, None))
    return figures


def _one_by_one(pool: PoolShape, planned: PlannedBatch) -> tuple[Timing, str, Timing]:
    """The same batch where each request reads its runs one by one, beside a plan that reads them once: whole passes."""
    rows = planned.rows
    listed = [pool.runs(request, number * rows, rows) for number, request in enumerate(planned.requests)]
    sms = torch.cuda.get_device_properties(pool.device).multi_processor_count
    plan = plan_by_request(listed, group=HEADS // KV_HEADS, workers=2 * sms // KV_HEADS)
    loaded = load(plan, pool.table, pool.rope, KV_HEADS, DIM, torch.bfloat16)

    def by_request(query: torch.Tensor) -> None:
        attend_by_request(query, loaded, pool.keys, pool.values, pool.scale, planned.out)

    def once(query: torch.Tensor) -> None:
        planned.attend(query, pool.keys, pool.values)
        planned.merge(planned.out)

    planned.out.fill_(float("nan"))
    by_request(planned.query)
    planned.compared(3)
    words = "blocks read once for the batch, with rotation and merge"
    return time_gpu(by_request, planned.query), words, time_gpu(once, planned.query)


def _dense_kernels(device: torch.device) -> dict[str, VirtualRequests]:
    """What encodes blocks on one GPU or another, by name."""
    found: dict[str, VirtualRequests] = {
        f"FlashInfer's {backend}": FlashInferRequests(device, LAYER, backend) for backend in ("fa2", "fa3")
    }
    if is_hopper(device):
        found["FlashAttention-3"] = FlashAttentionRequests(device)
    return found


def encoding(pool: PoolShape) -> list[Figure]:
    """Block-sparse encoding as one batched prefill against dense causal prefill of the same tokens."""
    pattern = BlockSparse()
    tokens = pool.bounds[-1]
    query = torch.randn(tokens, HEADS, DIM, dtype=torch.bfloat16, device=pool.device)
    out = torch.empty_like(query)
    rows = [pool.length(block) for block in range(pool.blocks)]
    seen = [[*pattern.attended(block), block] for block in range(pool.blocks)]
    spans = [torch.cat([pool.table[pool.bounds[b] : pool.bounds[b + 1]] for b in blocks]) for blocks in seen]
    sparse: dict[str, Timing] = {}
    dense: dict[str, Timing] = {}
    whole = VirtualBatch([tokens], [tokens], pool.table[:tokens], causal=True, scale=pool.scale)
    blocks = VirtualBatch(rows, [span.numel() for span in spans], torch.cat(spans), causal=True, scale=pool.scale)
    for name, kernel in _dense_kernels(pool.device).items():
        kernel.plan(whole)
        dense[name] = time_gpu(kernel.run, query, pool.keys, pool.values, out, graph=False, milliseconds=1000)
        kernel.plan(blocks)
        _check_encoding(pool, kernel, query, out, seen)
        sparse[name] = time_gpu(kernel.run, query, pool.keys, pool.values, out, graph=False, milliseconds=500)
    ours = min(sparse, key=lambda b: sparse[b].median)
    theirs = min(dense, key=lambda b: dense[b].median)
    name = f"encoding attention, one layer, {tokens} tokens in {pool.blocks} blocks ({ours})"
    notes = {
        "ours_ms": {b: t.median * 1e3 for b, t in sparse.items()},
        "dense_ms": {b: t.median * 1e3 for b, t in dense.items()},
    }
    return [at_least(name, sparse[ours], f"dense causal prefill ({theirs})", dense[theirs], 6.6, notes=notes)]


def _check_encoding(
    pool: PoolShape, virtual: VirtualRequests, query: torch.Tensor, out: torch.Tensor, seen: Sequence[Sequence[int]]
) -> None:
    out.fill_(float("nan"))
    virtual.run(query, pool.keys, pool.values, out)
    for block in (0, pool.blocks // 2, pool.blocks - 1):
        rows = torch.arange(pool.bounds[block], pool.bounds[block + 1], device=pool.device)[-3:]
        segments = [
            Segment(torch.arange(pool.bounds[b], pool.bounds[b + 1], device=pool.device), Written(), causal=b == block)
            for b in seen[block]
        ]
        expected, _ = view_attention(
            query[rows].double(),
            rows,
            View(tuple(segments)),
            pool.keys,
            pool.values,
            pool.slot_pos,
            pool.rope,
            pool.scale,
        )
        error = float(((out[rows].double() - expected).abs().max() / expected.abs().max()).nan_to_num(float("inf")))
        if error > TOLERANCE:
            raise ValueError(f"encoding is wrong by {error:.2g} of the largest value (at most {TOLERANCE}): not timed")


def measure(device: torch.device, tokens: int, blocks: int, chosen: int, batches: Sequence[int]) -> list[Figure]:
    """All rows of the kernels' half."""
    bandwidth, rate = copy_bandwidth(device), matrix_rate(device)
    pool = PoolShape(tokens, blocks, device)
    figures = [*decode(pool, batches, chosen, bandwidth), *questions(pool, 32, 24, chosen, rate), *encoding(pool)]
    return figures
