"""What decoding rows read, as the host knows it, and the room that a batch of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

COPY = 1024
"""Slots that one program copies."""

TILE = 64
"""Tokens of a tile of work; tokens of one tile are read with one rotation of the query."""


@dataclass(frozen=True, eq=False)
class PlannedRow:
    """What one decoding row reads; valid while nothing but its length changes.

    Attributes:
        tiles, sized: [n] int32 tiles of centroids, and of their sizes and starts (`ClusterRows`).
        rotations: [n] int32, the rotation of each tile: an index into `deltas`.
        deltas: positions by which keys are seen away from where they were written; the first is 0.
        spans: (first entry of the slot table, tokens, index into `deltas`) of the exact tokens, but for the last span.
        tail: (entry of the slot table, column) where the last span begins: the request's own newest tokens, which are
            not rotated.
        p: (p1, p2); with `SetRule.by_count` the numbers of clusters that are kept, and exact.
        tokens: clustered tokens.
    """

    tiles: npt.NDArray[np.int32]
    sized: npt.NDArray[np.int32]
    rotations: npt.NDArray[np.int32]
    deltas: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]
    tail: tuple[int, int]
    p: tuple[float, float]
    tokens: int

    @cached_property
    def layout(self) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int], ...], int]:
        """(copies (source, place, tokens), (first place, rotation) of each rotation's tokens, place of the tail)."""
        copies: list[tuple[int, int, int]] = []
        rotations: list[tuple[int, int]] = []
        place = 0
        # The tail is last, and not rotated.
        for rotation in sorted({rotation for *_, rotation in self.spans} | {0}, reverse=True):
            place = -(-place // TILE) * TILE
            rotations.append((place, rotation))
            for source, tokens, which in self.spans:
                if which == rotation:
                    copies.append((source, place, tokens))
                    place += tokens
        return tuple(copies), tuple(rotations), place

    def dense(self, seq_len: int) -> int:
        """Exact tokens at a sequence length, the filling of tiles counted."""
        return self.layout[2] + seq_len - self.tail[1]


@dataclass(frozen=True)
class RowCapacity:
    """The largest batch that `RowBuffers` take.

    Attributes:
        rows: rows, padding of CUDA graphs included.
        tiles: cluster tiles of a row.
        tokens: clustered tokens of a row.
        dense: exact tokens of a row outside its clusters' lists, the filling of tiles counted.
        rotations: rotations of a row's query.
        copies: spans of exact tokens of the batch, long ones cut.
    """

    rows: int
    tiles: int
    tokens: int
    dense: int
    rotations: int
    copies: int

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1:
            raise ValueError(f"capacity {vars(self)}: expected at least 1 of each")

    @classmethod
    def of(cls, rows: Sequence[PlannedRow], seq_lens: Sequence[int], headroom: float = 1.0) -> RowCapacity:
        """What a batch needs, times `headroom`."""
        copies = sum(
            -(-tokens // COPY)
            for row, seq_len in zip(rows, seq_lens, strict=True)
            for tokens in (*(n for _, n, _ in row.spans), seq_len - row.tail[1])
        )
        needs = {
            "rows": len(rows),
            "tiles": max((len(row.tiles) for row in rows), default=0),
            "tokens": max((row.tokens for row in rows), default=0),
            "dense": max((row.dense(n) for row, n in zip(rows, seq_lens, strict=True)), default=0),
            "rotations": max((len(row.deltas) for row in rows), default=0),
            "copies": copies,
        }
        return cls(**{name: max(1, int(n * headroom)) for name, n in needs.items()})

    def holds(self, other: RowCapacity) -> bool:
        """Whether a batch that needs `other` fits."""
        return all(getattr(self, name) >= n for name, n in vars(other).items())

    def rounded(self) -> RowCapacity:
        """Room for tokens in whole tiles: Triton compiles rows of other lengths anew."""
        whole = {name: -(-getattr(self, name) // TILE) * TILE for name in ("tokens", "dense")}
        return replace(self, **whole)

    def joined(self, other: RowCapacity) -> RowCapacity:
        """Room for either."""
        return RowCapacity(**{name: max(getattr(self, name), n) for name, n in vars(other).items()})
