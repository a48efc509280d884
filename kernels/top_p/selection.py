"""What a selection says: compacted lists of clusters with device-side counts, in fixed buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUPS = ("union", "mean")


@dataclass(frozen=True)
class Selection:
    """Clusters of every (request, key-value head): read token by token, or by their centroid.

    The lists are in ascending cluster order; what lies behind their counts is stale. The tokens of the exact clusters
    are numbered one after the other in list order: that is the work that attention splits. With `align`, those of each
    `run` clusters begin at a multiple of it, and the numbers between are nobody's.

    Attributes:
        counts: [batch, kv_heads, 5] int32: exact clusters, their tokens, approximated clusters, non-empty clusters,
            numbers of tokens, nobody's counted.
        exact: [batch, kv_heads, cells] int32 clusters computed token by token.
        prefix: [batch, kv_heads, cells] int32, number of the first token of each listed exact cluster.
        shift: [batch, kv_heads, cells] int32: token number + shift = index into the list of members.
        approx: [batch, kv_heads, cells] int32 clusters computed by their centroid.
        run, align: see above; align 1: no numbers are left out.
        expanded: whether what the lists stand for was written out with them (`Expansion`).
    """

    counts: torch.Tensor
    exact: torch.Tensor
    prefix: torch.Tensor
    shift: torch.Tensor
    approx: torch.Tensor
    run: int = 1
    align: int = 1
    expanded: bool = False

    @staticmethod
    def empty(
        batch: int, kv_heads: int, cells: int, device: torch.device | str, run: int = 1, align: int = 1
    ) -> Selection:
        """Uninitialised buffers.

        Args:
            batch, kv_heads: rows of the buffers.
            cells: the most clusters of a request, empty ones counted.
            device: of the buffers.
            run, align: of the numbers of tokens.
        """

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(batch, kv_heads, *shape, dtype=torch.int32, device=device)

        return Selection(ints(5), ints(cells), ints(cells), ints(cells), ints(cells), run, align)

    def of(self, requests: slice) -> Selection:
        """That of some requests: the same memory."""
        return Selection(
            self.counts[requests],
            self.exact[requests],
            self.prefix[requests],
            self.shift[requests],
            self.approx[requests],
            self.run,
            self.align,
        )


@dataclass(frozen=True)
class Expansion:
    """Where a kernel that selects also writes out what attention reads, so that no other kernel has to; with align 1.

    Attributes:
        members: [kv_heads, tokens] int32 contiguous: KV slots, which the clusters' starts point into.
        tiles: [batch, most tiles] int32 contiguous: places of each request's tiles of clusters.
        width: clusters of a tile, a multiple of 4.
        slots: [batch * kv_heads, most tokens] int32: written, the members of a row's exact clusters by their numbers.
        summaries: [batch * kv_heads, cells] int32: written, (place of the tile * kv_heads + head) * width + number in
            the tile of each approximated cluster.
    """

    members: torch.Tensor
    tiles: torch.Tensor
    width: int
    slots: torch.Tensor
    summaries: torch.Tensor


def check_buffers(out: Selection, run: int, align: int) -> None:
    """Raise ValueError where buffers are for other numbers of tokens than asked for."""
    if run < 1 or align < 1 or run & (run - 1):
        raise ValueError(f"run={run}, align={align}: expected a power of two, and at least 1")
    if max(align, out.align) > 1 and (out.run, out.align) != (run, align):
        raise ValueError(
            f"buffers for run={out.run}, align={out.align}: expected {run} and {align}; make them with Selection.empty"
        )


def check(
    logits: torch.Tensor, sizes: torch.Tensor, starts: torch.Tensor, cells: torch.Tensor, p: torch.Tensor, group: str
) -> None:
    """Raise ValueError where shapes, dtypes or the group rule do not fit `select`."""
    if logits.dim() != 4:
        raise ValueError(f"logits of shape {tuple(logits.shape)}: expected [batch, kv_heads, group, cells]")
    batch, kv_heads, _, width = logits.shape
    for name, tensor, shape in (
        ("sizes", sizes, (batch, kv_heads, width)),
        ("starts", starts, (batch, kv_heads, width)),
        ("cells", cells, (batch,)),
        ("p", p, (batch, 2)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)}: expected {shape} for logits {tuple(logits.shape)}"
            )
    if group not in GROUPS:
        raise ValueError(f"group={group!r}: expected one of {', '.join(GROUPS)}")


def check_memory(
    logits: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    cells: torch.Tensor,
    p: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError where tensors are not contiguous, or not of the types that kernels read: logits of `dtype`."""
    check_types(
        ("logits", logits, dtype),
        ("sizes", sizes, torch.int32),
        ("starts", starts, torch.int32),
        ("cells", cells, torch.int32),
        ("p", p, torch.float32),
    )


def check_types(*tensors: tuple[str, torch.Tensor, torch.dtype]) -> None:
    """Raise ValueError where one of (name, tensor, type) is not contiguous or of another type."""
    for name, tensor, expected in tensors:
        if tensor.dtype != expected or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype}, strides {tensor.stride()}: expected contiguous {expected}")


def check_expansion(expansion: Expansion | None, batch: int, kv_heads: int, cells: int, align: int) -> None:
    """Raise ValueError where what is to be written out does not fit rows of so many clusters."""
    if expansion is None:
        return
    if align > 1:
        raise ValueError(f"an expansion with align={align}: expected 1")
    members, tiles, width = expansion.members, expansion.tiles, expansion.width
    if width < 4 or width % 4 or tiles.shape[0] != batch or tiles.shape[1] * width != cells:
        raise ValueError(
            f"tiles {tuple(tiles.shape)} of {width} clusters: expected those of {batch} requests, {cells} clusters "
            "together, and a multiple of 4"
        )
    if members.shape[0] != kv_heads or expansion.slots.shape[0] != batch * kv_heads:
        raise ValueError(
            f"members of {members.shape[0]} heads and slots of {expansion.slots.shape[0]} rows: expected {kv_heads} "
            f"and {batch * kv_heads}"
        )
    if tuple(expansion.summaries.shape) != (batch * kv_heads, cells):
        raise ValueError(f"summaries {tuple(expansion.summaries.shape)}: expected {(batch * kv_heads, cells)}")
    for name in ("members", "tiles", "slots", "summaries"):
        tensor = getattr(expansion, name)
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype}, strides {tensor.stride()}: expected contiguous int32")
