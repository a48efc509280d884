"""What a cascading cache keeps of each token, and where: closed forms of the number of tokens seen.

A *lane* is one (layer, request, key-value head). It keeps `sinks + window + stride` entries, laid out as

| entries | hold |
|---|---|
| `[0, sinks)` | the first tokens of the sequence, for ever |
| `sinks + i * size + r` | index r of the ring of sub-cache i (0 = newest) |
| `sinks + window + n % stride` | token n while its stride is open |

After the window has filled, step u (the u-th token behind the sinks) is accepted by sub-cache i exactly when 2^i
divides u, whatever the scores are. So how full a ring is, and which of its indices is the oldest, follow from the
number of tokens seen; scores decide only *which* token sits at an index. All lanes of a request share one map from view
columns to entries, and nothing has to be read back from the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rings:
    """The sizes of a cascade and the closed forms that follow from them.

    Attributes:
        sinks: first tokens that are never evicted, at least 0.
        size: tokens a sub-cache, at least 1.
        cascades: number of sub-caches, at least 1.
        stride: most tokens that wait to be added, at least 1.

    Raises:
        ValueError: one of them is out of its range.
    """

    sinks: int
    size: int
    cascades: int
    stride: int

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.size < 1 or self.cascades < 1 or self.stride < 1:
            raise ValueError(f"{self}: expected sinks of at least 0 and size, cascades and stride of at least 1")

    @property
    def window(self) -> int:
        """Tokens that all sub-caches hold together, without the sinks."""
        return self.size * self.cascades

    @property
    def entries(self) -> int:
        """Entries a lane, which is also the number of cells it ever uses: sinks + window + stride."""
        return self.sinks + self.window + self.stride

    def kept(self, seen: int) -> int:
        """Tokens in sinks and sub-caches after `seen` tokens were added."""
        return min(seen, self.sinks + self.window)

    def settled(self, added: int) -> int:
        """First view columns whose scores decide nothing any more, after `added` tokens were added.

        Sinks are never compared. Once the window is full, the last sub-cache drops what it evicts whatever its score,
        and compares what comes with its newest entry alone, so the scores of all its others are never read again.
        """
        return min(added, self.sinks) if added < self.sinks + self.window else self.sinks + self.size - 1

    def counts(self, seen: int) -> list[int]:
        """Tokens in each sub-cache, newest sub-cache first, after `seen` tokens were added."""
        behind = max(seen - self.sinks, 0)
        return [min(max(behind - i * self.size, 0), self.size) for i in range(self.cascades)]

    def heads(self, seen: int) -> list[int]:
        """Ring index of each sub-cache's oldest token after `seen` tokens were added; 0 for one that is not full."""
        behind = max(seen - self.sinks, 0)
        if behind < self.window:
            return [behind % self.size if behind >= (i + 1) * self.size else 0 for i in range(self.cascades)]
        return [(-(-behind >> i) + (-self.window >> i)) % self.size for i in range(self.cascades)]

    def columns(self, added: torch.Tensor, seen: torch.Tensor, columns: int) -> torch.Tensor:
        """The entry that each view column shows: sinks, cached tokens from oldest to newest, then the open stride.

        Args:
            added: [batch] integer, tokens that were added to the cache (a multiple of the stride, in an engine).
            seen: [batch] integer, tokens of the sequence so far; the last `seen - added` are in the open stride.
            columns: how many columns, usually `entries`.

        Returns:
            [batch, columns] int32 on added's device; -1 in columns from `kept(added) + seen - added` on. A token's
            view position is its column. No value is read back to the host.
        """
        added, seen = added.long().unsqueeze(1), seen.long().unsqueeze(1)
        column = torch.arange(columns, device=added.device).unsqueeze(0)
        behind = (added - self.sinks).clamp(min=0)
        v = column - self.sinks
        # While the window fills nothing is lost: cached token v is the v-th behind the sinks, at index v of its ring.
        filling = behind < self.window
        level = torch.where(filling, (behind - 1 - v), self.window - 1 - v).div(self.size, rounding_mode="floor")
        step = 1 << level.clamp(0, self.cascades - 1)
        ceil = lambda x: (x + step - 1).div(step, rounding_mode="floor")  # noqa: E731
        head = ceil(behind) - ceil(torch.full_like(behind, self.window))
        index = torch.where(filling, v, head + v) % self.size
        entry = torch.where(column < self.sinks, column, self.sinks + level * self.size + index)
        kept = added.clamp(max=self.sinks + self.window)
        pending = self.sinks + self.window + (added + column - kept) % self.stride
        entry = torch.where(column < kept, entry, pending)
        return torch.where(column < kept + seen - added, entry, -1).to(torch.int32)


@dataclass(frozen=True)
class CascadeState:
    """The entries of every lane. A *cell* is a place for one token's key and value of one lane.

    Cells are numbered 0 .. entries - 1 in each lane; an engine maps the number c to the KV slot in column c of the
    request's row. Token n is written to cell n as long as nothing was dropped, and to the cell of the token that was
    dropped at step n - stride afterwards: so a request never needs more than sinks + window + stride slots, and the
    cells of an open stride are known before it begins.

    Attributes:
        token: [layers, rows, heads, entries] int32, number of the token in its sequence; -1 in an empty entry.
        cell: the same shape, int32, the token's cell; -1 in an empty entry.
        score: the same shape, float32, moving average of the attention the token received (section 3.2).

    The part of the open stride names, at index n % stride, the token that waits there or will, with its cell.
    """

    token: torch.Tensor
    cell: torch.Tensor
    score: torch.Tensor

    @classmethod
    def empty(cls, layers: int, rows: int, heads: int, rings: Rings, device: torch.device | str) -> CascadeState:
        """A state with every row reset. 12 bytes an entry."""
        shape = (layers, rows, heads, rings.entries)
        token, cell = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        state = cls(token, cell, torch.empty(shape, dtype=torch.float32, device=device))
        state.reset(torch.arange(rows, device=device), rings)
        return state

    def reset(self, rows: torch.Tensor, rings: Rings) -> None:
        """Forget what the requests in `rows` ([n] integer) kept, before a new request takes the row."""
        rows = rows.long()
        open_stride = torch.arange(rings.stride, dtype=torch.int32, device=self.cell.device)
        fresh = torch.cat([open_stride.new_full((rings.sinks + rings.window,), -1), open_stride])
        self.token[:, rows] = fresh
        self.cell[:, rows] = fresh
        self.score[:, rows] = 0.0

    def check(self, rows: torch.Tensor, seen: torch.Tensor, count: torch.Tensor, rings: Rings) -> None:
        """Raise ValueError where shapes, dtypes or devices do not fit; values on the device are not looked at."""
        shape, device = self.cell.shape, self.cell.device
        if len(shape) != 4 or shape[-1] != rings.entries:
            raise ValueError(
                f"state of shape {tuple(shape)}: expected [layers, rows, heads, {rings.entries}] for {rings}; "
                "make it with CascadeState.empty"
            )
        for name, tensor, dtype in (
            ("token", self.token, torch.int32),
            ("cell", self.cell, torch.int32),
            ("score", self.score, torch.float32),
        ):
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
                raise ValueError(
                    f"state.{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: expected contiguous "
                    f"{dtype} {tuple(shape)} on {device}"
                )
        for name, tensor in (("rows", rows), ("seen", seen), ("count", count)):
            if tensor.dim() != 1 or tensor.shape != rows.shape or tensor.is_floating_point():
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected integers, [batch], as long as rows "
                    f"({tuple(rows.shape)})"
                )
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}: expected {device}, where the state is")
