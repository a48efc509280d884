"""What kernels of a cascading KV cache read and write while streams decode, beside the streams' own rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.compat import AttentionShape
from sglang_ext.kernels.cascade_update import Rings
from sglang_ext.kernels.cells import DecodeWorkspace, Rotation, dispatch, triton_impl
from sglang_ext.kernels.cells.types import chunks

ALIGNED = 4
"""Every how many int32 a tensor begins: Triton compiles kernels anew for pointers that are not aligned to 16 bytes."""


@dataclass(frozen=True)
class StrideStep:
    """Tokens [first, last) of a stream that one pass computes and that lie in one stride.

    Attributes:
        added: tokens before the stride, all of them in the sub-caches.
        before: columns that the first token sees before its own.
        grows: whether the stride before has to be added first.
        lists: whether what the stride sees has to be written down first.
        counted: the tokens whose queries are to be counted in the scores, and were not before.
    """

    first: int
    last: int
    added: int
    before: int
    grows: bool
    lists: bool
    counted: range

    @property
    def columns(self) -> int:
        """What the last token sees, itself included."""
        return self.before + self.last - self.first


class DecodeBuffers:
    """What decoding kernels read and write beside the state: allocated once, so that CUDA graphs can hold them.

    Args:
        rings: sizes of the cascade.
        shape: heads of a layer.
        rotation: the model's.
        scored: whether scores are kept.
        rows: requests of the largest batch.
        device: of everything.

    Attributes:
        entries: [rows, slots of a stream] int32, `Rings.columns` of every request.
    """

    def __init__(
        self, rings: Rings, shape: AttentionShape, rotation: Rotation, scored: bool, rows: int, device: torch.device
    ) -> None:
        self.rows, self._rings, self._scored = rows, rings, scored
        width = rings.entries
        self._sizes = shape.heads, shape.value_dim
        keys, values = (
            torch.empty(0, shape.kv_heads, size, dtype=shape.dtype, device=device)
            for size in (shape.head_dim, shape.value_dim)
        )
        self._shares = {
            batch: dispatch.splits(batch, shape.heads, keys, values, rotation, width, shape.num_sms)
            for batch in range(1, rows + 1)
        }
        most = max(batch * shares for batch, shares in self._shares.items())
        make = lambda size: torch.empty(size, dtype=torch.float32, device=device)  # noqa: E731
        self._parts, self._levels = make(most * shape.heads * shape.value_dim), make(most * shape.heads)
        self._logits = make(rows * shape.heads * width if scored else 0)
        self._tops = make(rows * shape.heads * chunks(width) if scored else 0)
        self._arrived = torch.zeros(rows, shape.kv_heads, 2, dtype=torch.int32, device=device)
        self.entries = torch.full((rows, width), -1, dtype=torch.int32, device=device)
        self._numbers = torch.zeros(5 * _aligned(rows), dtype=torch.int32, device=device)
        self._entries_of: list[tuple[int, int]] = []

    def numbers(self, batch: int) -> tuple[torch.Tensor, ...]:
        """(rows, columns seen, columns settled, whether to be counted, tokens added), each [batch] int32."""
        return self._numbers[: 5 * _aligned(batch)].view(5, -1)[:, :batch].unbind()

    def workspace(self, batch: int) -> DecodeWorkspace:
        """Room for the partial results of a batch of so many rows."""
        (heads, value_dim), shares = self._sizes, self._shares[batch]
        size = batch * heads * shares
        width = self.entries.shape[1] if self._scored else 0
        tops = chunks(width) if self._scored else 0
        return DecodeWorkspace(
            self._parts[: size * value_dim].view(batch, heads, shares, value_dim),
            self._levels[:size].view(batch, heads, shares),
            self._logits[: batch * heads * width].view(batch, heads, width),
            self._tops[: batch * heads * tops].view(batch, heads, tops),
            self._arrived[:batch],
        )

    def load(self, streams: Sequence[tuple[int, StrideStep] | None], batch: int) -> None:
        """Have the next step of some streams, (row, step) each, in the buffers; the rest of `batch` is padding.

        Without waiting for the device. The entries change only at the end of a stride, or with the batch.
        """
        rings = self._rings
        table = [[0] * _aligned(batch) for _ in range(5)]
        known = [(-1, -1)] * batch
        for index, each in enumerate(streams):
            if each is not None:
                row, step = each
                numbers = (row, step.columns, rings.settled(step.added), len(step.counted), step.added)
                for column, number in zip(table, numbers, strict=True):
                    column[index] = number
                known[index] = row, step.added
        target = self._numbers[: 5 * _aligned(batch)]
        staged = torch.tensor(table, dtype=torch.int32, pin_memory=target.is_cuda).view(-1)
        target.copy_(staged, non_blocking=True)
        if self._scored and known != self._entries_of:
            self._entries_of = known
            added = self.numbers(batch)[4]
            self.entries[:batch] = triton_impl.columns(rings, added, added + rings.stride, rings.entries)


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNED) * ALIGNED
