"""A batch of decoding rows over clusters, on the device: static memory that serves every batch loaded into it.

Shapes, grids and pointers do not depend on the batch, counts are read on the device and nothing synchronises with the
host: a CUDA graph captured over `RowBuffers` serves every batch of its size. What a row reads is known on the host and
is loaded when the batch changes; a step in between only appends its newest slot (`advance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from sglang_ext.kernels.cluster_attention import attend_impl, joint_impl
from sglang_ext.kernels.cluster_attention import triton_impl as attention
from sglang_ext.kernels.cluster_attention.pool import ClusterPool
from sglang_ext.kernels.cluster_attention.rows import COPY, TILE, PlannedRow, RowCapacity
from sglang_ext.kernels.cluster_attention.types import (
    TUNING,
    ClusterReads,
    ClusterRows,
    ClusterTuning,
    ClusterWorkspace,
    DenseTokens,
    HeadShape,
    aligned,
)
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.rope.triton_impl import angle_tables, rotate_queries
from sglang_ext.kernels.top_p import dispatch
from sglang_ext.kernels.top_p.types import TUNING as SEARCH
from sglang_ext.kernels.top_p.types import (
    UNION,
    WITHOUT_GAPS,
    Expansion,
    Numbering,
    SearchedClusters,
    Selection,
    SetRule,
    TopPTuning,
    TopPWorkspace,
)

STAGING = 3
"""Batches that may be on their way to the device at once."""


@triton.jit
def _copy_slots(copies, table, dense, BLOCK: tl.constexpr):
    """dense[to : to + n] = table[source : source + n]; a copy is (source, to, n), int64."""
    copy = copies + tl.program_id(0) * 3
    source, to, size = tl.load(copy), tl.load(copy + 1), tl.load(copy + 2)
    at = tl.arange(0, BLOCK)
    tl.store(dense + to + at, tl.load(table + source + at, mask=at < size, other=0).to(tl.int32), mask=at < size)


@triton.jit(do_not_specialize=["batch"])
def _advance(seq_lens, new_slots, rows, tail, base, counts, dense, batch, most, BLOCK: tl.constexpr):
    """Let each row's own tokens reach its sequence length, and write its newest slot."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < batch) & (row < tl.load(rows))
    begin = tl.load(base + row, mask=inside, other=0)
    length = tl.load(seq_lens + row, mask=inside, other=0).to(tl.int32) - tl.load(tail + row, mask=inside, other=0)
    # A length outside the room is the caller's mistake; it must not reach another row's slots.
    count = tl.minimum(begin + tl.maximum(length, 1), most)
    slot = tl.load(new_slots + row, mask=inside, other=0).to(tl.int32)
    tl.store(counts + row, count, mask=inside)
    tl.store(dense + row.to(tl.int64) * most + count - 1, slot, mask=inside)


@dataclass(frozen=True, slots=True)
class _Part:
    """The first rows of the buffers: what a batch of a size, or the CUDA graph for it, works on.

    Attributes:
        rows: the clusters.
        dense: the tokens outside the clusters.
        p: [batch, 2] float32 (p1, p2), or numbers of clusters.
        rotations: [batch] int32 rotations of each row's query.
        cos, sin: [batch * rotations, rotary_dim / 2] float32 tables of them.
        rotated: [batch, rotations, heads, head_dim] the query in each; empty where there is one.
        scores: (logits, sizes, starts) of the clusters, as of `centroid_scores`.
        searched: these sizes and starts, to be searched.
        selection: what the search finds.
        search, workspace: buffers of the search, and of attention.
        lse: [batch, heads] float32 log-sum-exps.
    """

    rows: ClusterRows
    dense: DenseTokens
    p: torch.Tensor
    rotations: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    rotated: torch.Tensor
    scores: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    searched: SearchedClusters
    selection: Selection
    search: TopPWorkspace
    workspace: ClusterWorkspace
    lse: torch.Tensor


class RowBuffers:
    """Static device memory for one batch at a time, and the kernels of a layer over it.

    Load a batch outside of a CUDA graph, `advance` it each step outside, and `attend` inside. All work happens on the
    current stream.

    Attributes:
        capacity: the largest batch.
        width: clusters of a tile.
        rule: which clusters a row keeps; by count, rows keep numbers of clusters instead of shares of the mass.

    Raises:
        ValueError: a device without Triton.
    """

    def __init__(
        self,
        capacity: RowCapacity,
        shape: HeadShape,
        rope: Rope,
        width: int,
        *,
        rule: SetRule = UNION,
        tuning: ClusterTuning = TUNING,
        search: TopPTuning = SEARCH,
    ) -> None:
        device = rope.inv_freq.device
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ValueError(
                f"device {device}: expected CUDA; elsewhere Triton runs only with TRITON_INTERPRET=1 set before it is "
                "imported"
            )
        self.capacity, self.shape, self.rope, self.width = capacity, shape, rope, width
        self.rule, self.tuning, self.search = rule, tuning, search
        self.rows = 0
        c = capacity
        self._dense_tiles = -(-c.dense // TILE)
        sizes = {
            "copies": 6 * c.copies,  # int64
            "rows": 1,
            "tiles": c.rows * c.tiles,
            "sized": c.rows * c.tiles,
            "rotation": c.rows * c.tiles,
            "counts": c.rows,
            "cells": c.rows,
            "dense_counts": c.rows,
            "dense_rotation": c.rows * self._dense_tiles,
            "base": c.rows,
            "tail": c.rows,
            "rotations": c.rows,
            "deltas": c.rows * c.rotations,
            "p": 2 * c.rows,  # float32
        }
        # Every section begins at a multiple of 128 bytes: Triton compiles aligned pointers into wider loads.
        self._bounds: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in sizes.items():
            self._bounds[name] = (end, end + size)
            end += -(-size // 32) * 32
        cuda = device.type == "cuda"
        self._staging = [torch.zeros(end, dtype=torch.int32, pin_memory=cuda) for _ in range(STAGING if cuda else 1)]
        self._done: list[torch.cuda.Event | None] = [None] * len(self._staging)
        self._next = 0
        self._packed = torch.zeros(end, dtype=torch.int32, device=device)
        self.sections = {name: self._packed[a:b] for name, (a, b) in self._bounds.items()}
        self._copies = self.sections["copies"].view(torch.int64)
        self._dense = torch.full((c.rows, c.dense), -1, dtype=torch.int32, device=device)
        half = max(1, rope.inv_freq.numel())
        self._cos = torch.zeros(c.rows * c.rotations, half, dtype=torch.float32, device=device)
        self._sin = torch.zeros_like(self._cos)
        cells, kv_heads = c.tiles * width, shape.kv_heads
        self._rotated = torch.zeros(
            c.rows if c.rotations > 1 else 0, c.rotations, shape.heads, shape.head_dim, dtype=shape.dtype, device=device
        )
        self._logits = torch.zeros(c.rows, kv_heads, shape.group, cells, dtype=torch.float32, device=device)
        self._sizes = torch.zeros(c.rows, kv_heads, cells, dtype=torch.int32, device=device)
        self._starts = torch.zeros_like(self._sizes)
        self._numbering = Numbering(width, aligned(TILE)) if c.rotations > 1 else WITHOUT_GAPS
        align = self._numbering.align
        self._selection = Selection.empty(c.rows, kv_heads, cells, device, self._numbering)
        self._workspace = ClusterWorkspace.empty(
            c.rows,
            kv_heads,
            shape.group,
            shape.value_dim,
            cells,
            c.tokens + c.tiles * (align - 1),
            device,
            tuning,
            align=align,
            programs=attend_impl.PROGRAMS if tuning.fused else 0,
        )
        # Slots are written out after the search.
        lent = self._workspace.slots.view(-1)
        self._search = TopPWorkspace.empty(c.rows, kv_heads, shape.group, cells, device, lent)
        self._lse = torch.zeros(c.rows, shape.heads, dtype=torch.float32, device=device)
        self._parts: dict[int, _Part] = {}
        self._expanded = False

    @property
    def device(self) -> torch.device:
        return self._packed.device

    def load(self, rows: Sequence[PlannedRow], seq_lens: Sequence[int], table: torch.Tensor) -> None:
        """Bring a batch to the device: one asynchronous copy, then its exact tokens' slots and its angles.

        Args:
            rows: what each row reads; none for the capture of a CUDA graph.
            seq_lens: length of each row with its newest token.
            table: [n] int32 slots on the device, contiguous, which the rows' spans point into. It is read once, on the
                current stream.

        Raises:
            ValueError: the batch is larger than the capacity; nothing was written then.
        """
        needed = RowCapacity.of(rows, seq_lens)
        if not self.capacity.holds(needed):
            raise ValueError(f"a batch of {vars(needed)} for buffers of {vars(self.capacity)}: allocate larger ones")
        turn = self._next
        self._next = (turn + 1) % len(self._staging)
        event = self._done[turn]
        if event is not None:
            event.synchronize()  # waits only when three batches are still on their way
        copies = self._pack(rows, seq_lens, self._staging[turn].numpy())
        self._packed.copy_(self._staging[turn], non_blocking=True)
        if self.device.type == "cuda":
            event = event or torch.cuda.Event()
            event.record()
            self._done[turn] = event
        self._dense[: len(rows)].fill_(-1)
        if copies:
            _copy_slots[(copies,)](self._copies, table, self._dense, BLOCK=COPY, num_warps=4)
        if self.rope.inv_freq.numel():
            angle_tables(self.sections["deltas"], self.rope, self._cos, self._sin)
        self.rows = len(rows)

    def _pack(self, rows: Sequence[PlannedRow], seq_lens: Sequence[int], packed: npt.NDArray[np.int32]) -> int:
        c = self.capacity
        views = {name: packed[a:b] for name, (a, b) in self._bounds.items()}
        for name in ("counts", "cells", "dense_counts", "rotations"):
            views[name][:] = 0  # padded rows see nothing
        views["deltas"][:] = 0
        views["rows"][0] = len(rows)
        copies: list[tuple[int, int, int]] = []
        for at, (row, seq_len) in enumerate(zip(rows, seq_lens, strict=True)):
            count = len(row.tiles)
            for name, values in (("tiles", row.tiles), ("sized", row.sized), ("rotation", row.rotations)):
                views[name][at * c.tiles : at * c.tiles + count] = values
            views["counts"][at], views["cells"][at] = count, count * self.width
            spans, rotations, base = row.layout
            views["base"][at], views["tail"][at] = base, row.tail[1]
            views["dense_counts"][at] = row.dense(seq_len)
            dense_rotation = views["dense_rotation"][at * self._dense_tiles : (at + 1) * self._dense_tiles]
            for place, rotation in rotations:
                dense_rotation[place // TILE :] = rotation
            views["rotations"][at] = len(row.deltas)
            views["deltas"][at * c.rotations : at * c.rotations + len(row.deltas)] = row.deltas
            views["p"].view(np.float32)[2 * at : 2 * at + 2] = row.p
            for source, place, tokens in (*spans, (row.tail[0], base, seq_len - row.tail[1])):
                copies.extend(
                    (source + done, at * c.dense + place + done, min(COPY, tokens - done))
                    for done in range(0, tokens, COPY)
                )
        if copies:
            views["copies"].view(np.int64)[: 3 * len(copies)] = np.array(copies, dtype=np.int64).ravel()
        return len(copies)

    def advance(self, seq_lens: torch.Tensor, new_slots: torch.Tensor) -> None:
        """Let every row reach its sequence length; the same call twice does nothing more. It runs at every step.

        Args:
            seq_lens: [n] int32 or int64 on the device: each row's length with its newest token.
            new_slots: [n] int32 or int64 on the device: the slot of each row's newest token.
        """
        n, s = seq_lens.shape[0], self.sections
        _advance[(triton.cdiv(n, 128),)](
            seq_lens, new_slots, s["rows"], s["tail"], s["base"], s["dense_counts"], self._dense, n,
            self.capacity.dense, BLOCK=128, num_warps=4,
        )  # fmt: skip

    def _part(self, batch: int) -> _Part:
        if batch not in self._parts:
            c, s = self.capacity, self.sections
            tiles = {name: s[name].view(c.rows, c.tiles)[:batch] for name in ("tiles", "rotation", "sized")}
            rotation: torch.Tensor | None = None  # every key is seen where it was written
            dense_rotation: torch.Tensor | None = None
            if c.rotations > 1:
                rotation = tiles["rotation"]
                dense_rotation = s["dense_rotation"].view(c.rows, self._dense_tiles)[:batch]
            sizes, starts = self._sizes[:batch], self._starts[:batch]
            self._parts[batch] = _Part(
                rows=ClusterRows(tiles["tiles"], s["counts"][:batch], rotation, tiles["sized"]),
                dense=DenseTokens(self._dense[:batch], s["dense_counts"][:batch], dense_rotation, TILE),
                p=s["p"].view(torch.float32).view(c.rows, 2)[:batch],
                rotations=s["rotations"][:batch],
                cos=self._cos[: batch * c.rotations],
                sin=self._sin[: batch * c.rotations],
                rotated=self._rotated[:batch],
                scores=(self._logits[:batch], sizes, starts),
                searched=SearchedClusters(sizes, starts, s["cells"][:batch]),
                selection=self._selection.of(slice(batch)),
                search=self._search.first(batch),
                workspace=self._workspace.first(batch * self.shape.kv_heads),
                lse=self._lse[:batch],
            )
        return self._parts[batch]

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pool: ClusterPool, scale: float
    ) -> torch.Tensor:
        """One layer of one step: score the clusters, select them, attend (Double-P, equations 3 to 9).

        Args:
            query: [batch, heads, head_dim], each row contiguous, rotated at its own position; rows beyond the loaded
                batch are padding. At most `capacity.rows`.
            keys: [num_slots, kv_heads, head_dim] contiguous, in query's dtype or float8 e4m3.
            values: [num_slots, kv_heads, value_dim] likewise.
            pool: the clusters of this layer.
            scale: factor of the logits.

        Returns:
            [batch, heads, value_dim] in query's dtype, zeros for padding.
        """
        part = self._part(query.shape[0])
        rotated = query.unsqueeze(1)
        if self.capacity.rotations > 1:
            rotated = rotate_queries(query, part.cos, part.sin, part.rotations, self.rope, part.rotated)
        expansion: Expansion | None = None
        if self._numbering.align == 1:
            expansion = Expansion(
                pool.members, part.rows.tiles, self.width, part.workspace.slots, part.workspace.summaries
            )
        joint = self.tuning.joint and joint_impl.refusal(rotated, pool, part.rows, group=self.rule.group) is None
        if joint and expansion is not None:
            selection = joint_impl.score_and_select(
                rotated, pool, part.rows, part.searched.cells, part.p, scale, logits=part.scores[0],
                out=part.selection, expansion=expansion, rule=self.rule,
            )  # fmt: skip
        else:
            attention.centroid_scores(rotated, pool, part.rows, scale, out=part.scores, tuning=self.tuning)
            selection = dispatch.select(
                part.scores[0], part.searched, part.p, rule=self.rule, numbering=self._numbering, out=part.selection,
                expansion=expansion, workspace=part.search, tuning=self.search,
            )  # fmt: skip
        self._expanded = selection.expanded
        return self._read(part, selection, rotated, keys, values, pool, scale)

    def read_again(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pool: ClusterPool, scale: float
    ) -> torch.Tensor:
        """Attend to what the last `attend` chose, without scores and selection: for measuring what these take.

        Args: as of the `attend` before; queries in one rotation.

        Returns:
            As that one did.
        """
        part = self._part(query.shape[0])
        selection = part.selection.said_expanded(self._expanded)
        return self._read(part, selection, query.unsqueeze(1), keys, values, pool, scale)

    def _read(
        self, part: _Part, selection: Selection, rotated: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        pool: ClusterPool, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        out = rotated.new_empty(rotated.shape[0], self.shape.heads, self.shape.value_dim)
        to, workspace = (out, part.lse), part.workspace
        reads = ClusterReads(part.rows, part.dense, selection, part.scores[0])
        given = rotated, keys, values, pool, reads, scale
        fused = self.tuning.fused and selection.expanded
        if fused and attend_impl.refusal(rotated.device, rotated, keys, values, pool) is None:
            attend_impl.cluster_attention(*given, out=to, workspace=workspace)
        else:
            attention.cluster_attention(*given, out=to, workspace=workspace, tuning=self.tuning)
        return out

    def clusters(self, batch: int) -> ClusterRows:
        """What the first rows read: the buffers themselves."""
        return self._part(batch).rows

    def chosen(self, batch: int) -> tuple[Selection, torch.Tensor]:
        """What the last `attend` of so many rows chose: (selection, logits [batch, kv_heads, group, cells] float32).

        The buffers themselves, valid until the next layer.
        """
        part = self._part(batch)
        return part.selection, part.scores[0]
