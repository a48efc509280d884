"""The kernels' half of ``sglang-ext bench ltri``: whole chunks of a long stream, in the engine's own code, and parts.

There are three layers, of which the first two vote. Their keys, queries and index vectors are random. What a chunk
reads from the host is decided here (`Ltri.renewed`), so that a chunk with transfers and one without do the same else.

As in an engine, products of matrices run before each run of chunks that is timed. Blocks that have left the window with
the run before are copied to the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sglang_ext.attention.ltri_graphs import ChunkGraphs
from sglang_ext.attention.ltri_index import LayerIndex
from sglang_ext.attention.ltri_kernels import KernelChunk
from sglang_ext.attention.ltri_layer import LayerTokens, Voter
from sglang_ext.attention.ltri_memory import LayerHost
from sglang_ext.attention.ltri_plan import SpanRing, on_device
from sglang_ext.attention.ltri_runs import PlacedRun
from sglang_ext.attention.ltri_state import KernelMemory
from sglang_ext.attention.ltri_stores import KernelChunks
from sglang_ext.attention.policy import Caches, Carry
from sglang_ext.cache.host_blocks import HostBlocks
from sglang_ext.kernels.block_votes import QuerySpans, elect, score_blocks
from sglang_ext.kernels.clamped_attention import dense_impl, reference
from sglang_ext.kernels.host_fetch import Found, fetch
from sglang_ext.kernels.span_index import SpanRule, Spans, SpanWorkspace, cut_spans
from sglang_ext.launch.bench._cascade_layer import LayerShape, rotation_of
from sglang_ext.launch.bench._gpu import time_turns
from sglang_ext.launch.bench._record import Timing
from sglang_ext.policies.ltri_options import Ltri

FIRST, VOTES, LISTENS = 0, 1, 2
"""Numbers of the layers: the first that votes, another that votes, and one that gets what they have voted for."""
TOGETHER = 8
"""Chunks of a run: as many as an engine reads in a pass."""
TOLERANCE = 2e-2  # bfloat16, of the largest value
COLD = 100 << 20
"""Bytes of the indices of layers that are scored in turn, at least: twice the L2 cache of an H200."""
PRODUCTS = 13
"""Columns of the matrices of a layer of Llama-3.1-8B, in multiples of the model's width."""
EXACT = ("keys", "values", "bounds", "counts", "numbers of vectors", "scales")
"""What is copied or counted, and equal: replays launch the same kernels in the same order, and none has atomics."""


class Layers:
    """Layers of a stream of so many tokens, whose next whole chunk is recorded.

    Args:
        settings: of the method; `renewed` blocks come from the host in each chunk.
        tokens: that the stream has, a multiple of the chunk, from which on chunks are alike.
        shape: of the layers.
        device: of the KV cache.

    Raises:
        ValueError: chunks are not alike there, or their own votes decide what comes back (`renewed` is 0).
    """

    def __init__(self, settings: Ltri, tokens: int, shape: LayerShape, device: torch.device) -> None:
        first = settings.alike_from
        if first is None or tokens < first or tokens % settings.chunk:
            raise ValueError(f"tokens={tokens}: expected a multiple of {settings.chunk}, at least {first}")
        if not settings.renewed:
            raise ValueError("renewed=0, so that the chunks' own votes decide: expected at least 1")
        self.settings, self.tokens, self.shape, self.device = settings, tokens, shape, device
        torch.manual_seed(0)
        rows = (1 + settings.slots, shape.kv_heads, shape.dim)
        draw = lambda: torch.randn(*rows, device=device).to(shape.dtype)  # noqa: E731
        self.caches = {layer: (draw(), draw()) for layer in (FIRST, VOTES, LISTENS)}
        blocks = settings.evicted(tokens + TOGETHER * settings.chunk) + 1
        size = blocks * settings.block * len(self.caches) * 2 * shape.kv_heads * shape.dim * shape.dtype.itemsize
        self.host = HostBlocks(self.caches, settings.block, size)
        self.voters = {FIRST: Voter(0.5, 1), VOTES: Voter(0.5, 1), LISTENS: None}
        rotation = rotation_of(shape, device)
        attention = dense_impl if device.type == "cuda" else reference
        self.chunks = KernelChunks(settings, self.host, self.caches, self.voters, shape.heads, 1, rotation, attention)
        for each in self.chunks.stores.values():
            if each.index is not None:
                fill_index(each.index)
        self.lease = self.host.lease(blocks)
        self._rope = rotation.rope
        carry: Carry = {}
        self.chunks.record({layer: self._of(layer, carry) for layer in self.caches}, TOGETHER)
        graphs = self.chunks._graphs
        if graphs is None:
            raise ValueError("nothing was recorded")
        self.graphs = graphs
        chunks = [self._of(VOTES, {}, number) for number in range(TOGETHER)]
        for chunk in chunks:
            self.seat = self.chunks.seat(chunk)
        self._all = self._placed(graphs, chunks)
        count = TOGETHER * settings.chunk
        self.query = torch.randn(count, shape.heads, shape.dim, device=device).to(shape.dtype)
        self.new = [torch.randn(count, *rows[1:], device=device).to(shape.dtype) for _ in range(2)]
        width = shape.heads * shape.dim
        hidden, matrices = (torch.randn(n, width, device=device).to(shape.dtype) for n in (count, PRODUCTS * width))
        self._hidden, self._matrices, self._product = hidden, matrices.t(), hidden.new_empty(count, PRODUCTS * width)
        self._lists = self._blocks_in_turn()
        ids = list(self.lease.ids[: len(self._lists) * settings.renewed])  # of all blocks that come back
        for kept in (*self.host.keys.values(), *self.host.values.values()):
            kept[ids] = torch.randn(len(ids), *kept.shape[1:]).to(shape.dtype)
        self._replayed: dict[int, list[LayerTokens[Spans]]] = {}

    def _placed(self, graphs: ChunkGraphs, chunks: list[LayerTokens[Spans]]) -> PlacedRun:
        placed = graphs.place(chunks, self.seat, chunks[0].memory.stored, [])
        if placed is None or len(placed.plans) < len(chunks):
            raise ValueError(f"no run of {len(chunks)} chunks was recorded")
        return placed

    def _of(self, layer: int, carry: Carry, number: int = 0) -> LayerTokens[Spans]:
        settings, (keys, values) = self.settings, self.caches[layer]
        memory = KernelMemory.empty(settings, self.device)
        memory.stored = settings.evicted(self.tokens - settings.chunk)
        slots = torch.arange(1, 1 + settings.slots, dtype=torch.int32, device=self.device)
        return LayerTokens(
            settings=settings,
            memory=memory,
            host=LayerHost(self.host, self.lease, layer, self.device),
            caches=Caches(layer, keys, values, slots[:0], self._rope, self.shape.dim**-0.5, carry),
            slots=slots,
            voter=self.voters[layer],
            heads=self.shape.heads,
            begin=self.tokens + number * settings.chunk,
            end=self.tokens + (number + 1) * settings.chunk,
            answers=False,
            ending=False,
            given=(),
            kept=False,
        )

    def _blocks_in_turn(self) -> list[torch.Tensor]:
        """Lists of blocks, each with `renewed` that the one before has not; a block comes back when it has gone."""
        settings = self.settings
        count = 2 + -(-(settings.ways + settings.retrieved) // settings.renewed)
        return [
            on_device([(number * settings.renewed + each) % (count * settings.renewed) for each in
                       range(settings.retrieved)], self.device)
            for number in range(count)
        ]  # fmt: skip

    def take(self, number: int | None) -> None:
        """Have the next chunks want other lists of blocks than those before them; None: all of them the same list."""
        self._all.run.load(self._all)  # else the next replay would, over these lists
        for place, each in enumerate(self._all.run.places):
            renewed = each.standing.plan.plan.renewed
            if renewed is not None:  # as in all plans, since `settings.renewed` is not 0
                renewed.copy_(self._lists[0 if number is None else (number * TOGETHER + place) % len(self._lists)])

    def replay(self, layer: int) -> torch.Tensor:
        """All chunks of the run in a layer, [tokens, heads, head_dim]."""
        if layer not in self._replayed:
            self._replayed[layer] = [self._of(layer, {}, number) for number in range(TOGETHER)]
            self.chunks.launched(self._replayed[layer][0])  # its memory is in the stream's row now
        given = self.query, self.new[0], self.new[1]
        return self.graphs.attend(self._all, self._replayed[layer], self.seat.row, given)

    def check(self) -> None:
        """Chunks that are replayed together are those that are launched one by one, in all layers.

        Which blocks come back is decided here (`take`), so answers do not depend on votes. Votes are compared, too, and
        what layers remember.

        Raises:
            ValueError: they are not; says by how much.
        """
        carry: Carry = {}
        votes: dict[int, torch.Tensor] = {}
        for layer in self.caches:
            self._replayed.pop(layer, None)  # as what is launched, what is replayed begins with nothing received
            self.chunks.cached.forget(self.seat.row)
            before = [each.clone() for each in self._kept(layer).values()]
            self.take(0)
            found = {"answers": self.replay(layer).clone(), **self._snapshot(layer), **self._votes()}
            self.chunks.cached.forget(self.seat.row)
            for each, kept in zip(self._kept(layer).values(), before, strict=True):
                each.copy_(kept)
            wanted = {"answers": self._launched(layer, carry, votes), **self._snapshot(layer)}
            wanted |= {f"votes {number}": each for number, each in enumerate(votes.values())}
            for name, each in wanted.items():
                self._compare(layer, name, found[name].double(), each.double())

    def _compare(self, layer: int, name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if not bool(torch.isfinite(found).all()):
            raise ValueError(f"layer {layer}: {name} of replayed chunks have values that are not finite")
        off = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
        if not off <= (0.0 if name in EXACT else TOLERANCE):
            raise ValueError(
                f"layer {layer}: {name} of replayed chunks are {off:.3g} off the launched ones', of the largest value"
            )

    def _kept(self, layer: int) -> dict[str, torch.Tensor]:
        """What whole chunks leave in a layer, but for the blocks on the host."""
        store, (keys, values) = self.chunks.stores[layer], self.caches[layer]
        kept = {"keys": keys, "values": values}
        if store.state is not None and store.ring is not None:
            kept |= {"received": store.state.received, "received from the last token": store.state.last}
            kept |= {"bounds": store.ring.bounds, "counts": store.ring.counts}
        if store.index is not None:
            kept |= {"index": store.index.vectors, "numbers of vectors": store.index.counts}
            if store.index.scales is not None:
                kept |= {"scales": store.index.scales}
        return kept

    def _snapshot(self, layer: int) -> dict[str, torch.Tensor]:
        """`_kept` of the stream alone: a slot, a place and a block that are nobody's are written, too."""
        settings, row = self.settings, self.seat.row
        ids = list(self.lease.ids[: settings.evicted(self.tokens + (TOGETHER - 1) * settings.chunk)])
        spans = slice(row * SpanRing.blocks(settings), (row + 1) * SpanRing.blocks(settings))
        part: dict[str, slice | list[int] | int] = {"keys": slice(1, None), "values": slice(1, None)}
        part |= {"received": row, "received from the last token": row, "bounds": spans, "counts": spans}
        part |= {"index": ids, "numbers of vectors": ids, "scales": ids}
        found = {name: each[part[name]].clone() for name, each in self._kept(layer).items()}
        if "bounds" in found:
            found["bounds"][found["counts"] == 0] = 0  # of no span
        return found

    def _votes(self) -> dict[str, torch.Tensor]:
        """[1, blocks], of each chunk, after the layer that was replayed last."""
        return {f"votes {number}": place.votes.clone() for number, place in enumerate(self._all.run.places)}

    def _launched(self, layer: int, carry: Carry, votes: dict[int, torch.Tensor]) -> torch.Tensor:
        """[tokens, heads, head_dim], the chunks that `replay` has computed last, launched one by one."""
        memory, found, chunk = self._of(layer, carry).memory, [], self.settings.chunk
        for number, place in enumerate(self._all.run.places):
            launched = self.chunks.launched(replace(self._of(layer, carry, number), memory=memory))
            plan = replace(launched.plan, renewed=place.standing.plan.plan.renewed)
            rows = slice(number * chunk, (number + 1) * chunk)
            given = self.query[rows], self.new[0][rows], self.new[1][rows]
            found.append(KernelChunk(**{**vars(launched), "plan": plan}).attend(*given, votes).clone())
        return torch.cat(found)

    def timed(self, layer: int, new: bool, samples: int = 30, replays: int = 4) -> Timing:
        """Seconds of a chunk in a layer, one of `TOGETHER` that are replayed together, behind products of matrices.

        Args:
            layer: its number.
            new: whether each chunk wants other blocks, which come from the host; else all want those that are there.
            samples, replays: timed runs, and replays in a run.
        """
        number = iter(range(10**9))

        def before() -> None:
            self.take(next(number) if new else None)
            torch.mm(self._hidden, self._matrices, out=self._product)

        run = timed(lambda: self.replay(layer), self.device, samples, replays, before)
        return Timing(run.median / TOGETHER, run.low / TOGETHER, run.high / TOGETHER, run.samples)


def timed(
    work: Callable[[], object],
    device: torch.device,
    samples: int = 30,
    calls: int = 16,
    before: Callable[[], object] | None = None,
) -> Timing:
    """Seconds of one call out of `calls` that are launched one behind the other; on a CPU, of no meaning.

    Args:
        work: the call.
        device: where.
        samples, calls: timed samples, and calls in a sample.
        before: what is launched before each call, and not timed.
    """
    if device.type != "cuda":
        if before is not None:
            before()
        work()
        return Timing.of([1.0])

    def span(count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if before is not None:
            before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            work()
        end.record()
        return begin, end

    def seconds() -> float:
        spans = [span(calls)] if before is None else [span(1) for _ in range(calls)]
        torch.cuda.synchronize(device)
        return sum(begin.elapsed_time(end) for begin, end in spans) * 1e-3 / calls

    seconds()
    return Timing.of(seconds() for _ in range(samples))


def fetching(layers: Layers, count: int) -> tuple[Timing, int]:
    """(fetch of so many blocks alone, bytes of a block)."""
    each = layers.chunks.stores[LISTENS]
    ids = torch.arange(count, dtype=torch.int32, device=layers.device).unsqueeze(0)
    found, row = Found(ids, ids), layers.seat.at
    block = 2 * each.region.keys[0].numel() * each.region.keys.element_size()
    return timed(lambda: fetch(each.region, found, row, each.cache), layers.device), block


def pinned_bandwidth(device: torch.device, mib: int = 512) -> float:
    """Bytes a second of a plain copy out of pinned host memory."""
    source = torch.empty(mib << 20, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    timing = timed(lambda: target.copy_(source, non_blocking=True), device, samples=5, calls=4)
    return source.numel() / timing.median


def spans_of(tiles: int, settings: Ltri, shape: LayerShape, device: torch.device) -> Timing:
    """Seconds to cut the spans of so many tiles, inside a CUDA graph, as in a chunk."""
    entries = torch.rand(tiles, shape.heads, settings.block, settings.block, device=device).tril() ** 8
    rule = SpanRule(settings.theta, settings.phi, settings.spans, settings.most_vectors, settings.rate)
    rows = torch.full((tiles,), settings.block, dtype=torch.int32, device=device)
    out = Spans.empty(tiles, settings.spans, device)
    space = SpanWorkspace.empty(tiles, shape.heads, settings.block, device)
    return time_turns(lambda _: cut_spans(entries, rows, rule, out=out, **_space(space, device)).counts, 1, device)


def _space(space: SpanWorkspace, device: torch.device) -> dict[str, SpanWorkspace]:
    return {"workspace": space} if device.type == "cuda" else {}


def fill_index(index: LayerIndex) -> None:
    """Have random vectors, as many as it holds, in all entries of an index."""
    if index.scales is None:
        index.vectors.normal_()
    else:
        index.vectors.random_(256)
        index.scales.fill_(1 / index.vectors.shape[-1])
    index.counts.fill_(index.vectors.shape[2])


def election_of(
    blocks: int, settings: Ltri, shape: LayerShape, device: torch.device, *, tokens_ask: bool = False
) -> Timing:
    """Seconds to score so many blocks and to elect `retrieved` of them, in a layer in which one head votes.

    What is compared are the spans of a chunk, or with `tokens_ask` a prompt's last tokens (`Ltri.askers`).

    Inside a CUDA graph, as in a chunk, of as many layers' indices in turn as leave none in the L2 cache.
    """
    like = torch.empty(0, dtype=shape.dtype, device=device)
    layers = [LayerIndex.empty(settings, blocks, shape.dim, like)]
    if device.type == "cuda":
        layers += [LayerIndex.empty(settings, blocks, shape.dim, like) for _ in range(COLD // layers[0].vectors.nbytes)]
    for index in layers:
        fill_index(index)
    spans, most = layers[0].vectors.shape[1:3]
    tiles, queries = settings.chunk // settings.block, min(most, settings.most_queries)
    # As they are picked, and rotated with it.
    sizes = (settings.most_askers, 1) if tokens_ask else (tiles * spans, queries)
    asked = torch.randn(1, *sizes, shape.dim, device=device).to(shape.dtype)
    counts = torch.full(asked.shape[:2], sizes[1], dtype=torch.int32, device=device)
    ids = torch.randperm(blocks, device=device).to(torch.int32).unsqueeze(0)
    entries = [index.of(ids, torch.full((1,), blocks, dtype=torch.int32, device=device)) for index in layers]
    votes = torch.zeros(1, blocks, device=device)

    def work(turn: int) -> torch.Tensor:
        scores = score_blocks(QuerySpans(asked, counts), entries[turn], kind=settings.compared_by(tokens_ask))
        return elect(votes, scores, weight=0.5, count=settings.retrieved, mode=settings.vote)

    return time_turns(work, len(layers), device)
