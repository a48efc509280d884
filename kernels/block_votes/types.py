"""What blocks are scored by and elected from: a chunk's spans, the index of a layer's memory, votes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SIMILARITIES = ("sum", "max", "mass")
VOTES = ("inclusive", "preceding", "off")
WEIGHTS = (torch.float32, torch.float64)

LOG2_E = math.log2(math.e)

MAX_COUNT = 64
"""Blocks that an election on a GPU chooses (the option `retrieved`), at most."""


@dataclass(frozen=True, slots=True)
class QuerySpans:
    """Index vectors of the spans of one chunk a request (Ltri-LLM, section 3.4), or of tokens, each as its own span.

    Attributes:
        vectors: [batch, query_spans, most_q, dim], a floating dtype. Vectors beyond a span's number may hold anything.
            For the similarity `sum` a span's vectors may be summed beforehand, most_q is 1 then.
        counts: [batch, query_spans] int32, vectors of each span; 0 where there is no such span.
    """

    vectors: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """The index of one layer's memory, and which entries of it belong to each request (Ltri-LLM, section 3.3).

    An entry is a block's, whatever streams hold the block: streams that begin alike share blocks on the host, and so
    their entries. Entries have the numbers of the blocks on the host (`HostLease.ids`).

    Attributes:
        vectors: [entries, spans, most, dim], a floating dtype. Vectors beyond a span's number may hold anything, and so
            may entries that no request names. For the similarity `sum` a span's vectors may be summed beforehand, most
            is 1 then. With `scales`, [entries, spans, most, dim / 2] uint8, two components in each byte
            (`kernels.packed_vectors.PackedSpans`); the query's vectors are rotated then as these were.
        counts: [entries, spans] int32, vectors of each span; 0 where there is no such span. A block without spans is
            never retrieved. Entries that no request names may hold anything.
        ids: [batch, max_blocks] int32, the entry of each of a request's blocks, in the order of the stream; requests
            may share entries. What lies beyond a request's blocks may hold anything.
        blocks: [batch] integer, how many blocks each request has.
        scales: [entries, spans] float32, by which the components of a span's packed vectors are multiplied; None where
            vectors are not packed.
    """

    vectors: torch.Tensor
    counts: torch.Tensor
    ids: torch.Tensor
    blocks: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def dim(self) -> int:
        """Components of a vector."""
        return self.vectors.shape[-1] * (1 if self.scales is None else 2)


def score_dtype(query: QuerySpans, index: BlockIndex) -> torch.dtype:
    """The dtype of scores: float64 where the query or the index is, otherwise float32."""
    wide = torch.float64 in (query.vectors.dtype, index.vectors.dtype)
    return torch.float64 if wide else torch.float32


def check(query: QuerySpans, index: BlockIndex, kind: str, out: torch.Tensor | None) -> None:
    """Look at what `score_blocks` is given, but not at values on the device.

    Raises:
        ValueError: shapes, dtypes, devices or the similarity do not fit.
    """
    asked, kept = query.vectors, index.vectors
    if asked.dim() != 4 or kept.dim() != 4 or asked.shape[3] != index.dim:
        raise ValueError(
            f"query vectors {tuple(asked.shape)}, index vectors {tuple(kept.shape)}: expected [batch, query_spans, "
            "most_q, dim] and [entries, spans, most, dim] of one dim, or dim / 2 where they are packed"
        )
    packed = index.scales is not None
    if not asked.is_floating_point() or (kept.dtype != torch.uint8 if packed else not kept.is_floating_point()):
        raise ValueError(
            f"query vectors are {asked.dtype}, index vectors {kept.dtype}: expected floating dtypes, or uint8 for an "
            "index with scales"
        )
    batch, tensors = asked.shape[0], [asked, query.counts, kept, index.counts]
    expected = [
        ("query counts", query.counts, asked.shape[:2], torch.int32),
        ("index counts", index.counts, kept.shape[:2], torch.int32),
    ]
    if index.scales is not None:
        expected.append(("index scales", index.scales, kept.shape[:2], torch.float32))
        tensors.append(index.scales)
    for name, tensor, shape, dtype in expected:
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} are {tensor.dtype} {tuple(tensor.shape)}: expected {dtype} {tuple(shape)}")
    ids, blocks = index.ids, index.blocks
    if ids.dim() != 2 or ids.shape[0] != batch or ids.dtype != torch.int32:
        raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)}: expected int32 [{batch}, max_blocks]")
    if blocks.shape != (batch,) or blocks.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"blocks is {blocks.dtype} {tuple(blocks.shape)}: expected int32 or int64 {(batch,)}")
    tensors += [ids, blocks]
    if kind not in SIMILARITIES:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(SIMILARITIES)}")
    if out is not None:
        tensors.append(out)
        wanted = score_dtype(query, index)
        if out.shape != ids.shape or out.dtype != wanted:
            raise ValueError(f"out is {out.dtype} {tuple(out.shape)}: expected {wanted} {tuple(ids.shape)}")
    _check_devices(tensors)


def check_election(
    votes: torch.Tensor,
    scores: torch.Tensor | None,
    weight: float | torch.Tensor,
    count: int,
    mode: str,
    out: torch.Tensor | None,
) -> None:
    """The same for `elect`.

    Raises:
        ValueError: shapes, dtypes, devices, the mode or the count do not fit.
    """
    if votes.dim() != 2 or votes.dtype not in WEIGHTS:
        raise ValueError(f"votes are {votes.dtype} {tuple(votes.shape)}: expected float32 [batch, max_blocks]")
    tensors = [votes]
    if scores is not None:
        tensors.append(scores)
        if scores.shape != votes.shape or scores.dtype not in WEIGHTS:
            raise ValueError(f"scores are {scores.dtype} {tuple(scores.shape)}: expected float32 {tuple(votes.shape)}")
    if isinstance(weight, torch.Tensor):
        tensors.append(weight)
        if weight.shape != votes.shape[:1] or weight.dtype != votes.dtype:
            raise ValueError(
                f"weight is {weight.dtype} {tuple(weight.shape)}: expected a number, or {votes.dtype} "
                f"{tuple(votes.shape[:1])}"
            )
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"count={count!r}: expected a whole number of at least 0")
    if mode not in VOTES:
        raise ValueError(f"mode={mode!r}: expected one of {', '.join(VOTES)}")
    if out is not None:
        tensors.append(out)
        if out.shape != (votes.shape[0], count) or out.dtype != torch.int32:
            raise ValueError(f"out is {out.dtype} {tuple(out.shape)}: expected int32 {(votes.shape[0], count)}")
    _check_devices(tensors)


def _check_devices(tensors: list[torch.Tensor]) -> None:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors on {', '.join(sorted(map(str, devices)))}: expected one device")
