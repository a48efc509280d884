"""The attention view: the one idea that carries DBSA, Double-P, cascades and Ltri-LLM.

A *view* is, for a set of query rows, an ordered list of disjoint *segments*; a segment is KV slots plus a rule
that gives the position at which each of its tokens is seen. Keys stay where they were written, rotated at the position
they were written at (`slot_pos[slot]`); seeing one elsewhere is a rotation by the difference.

Four position rules are enough for the four systems:

| rule | position of token t of the segment | used by |
|---|---|---|
| `Consecutive(start)` | start + t | DBSA blocks, a request's own tokens |
| `Written()` | `slot_pos[slot]`: no rotation at all | plain prefixes, Double-P's middle tokens |
| `Ranks(ranks)` | ranks[t], or ranks[head, t]: any integer, e.g. a ring index | cascades |
| `SharedDistance(distance)` | query position - distance, for every token | Ltri-LLM's retrieved blocks |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class Consecutive:
    """Token t is seen at position `start + t`."""

    start: int


@dataclass(frozen=True)
class Written:
    """Every token is seen at the position it was written at."""


@dataclass(frozen=True)
class Ranks:
    """Token t is seen at `ranks[t]` ([n] or [kv_heads, n], integer, on the slots' device)."""

    ranks: torch.Tensor


@dataclass(frozen=True)
class SharedDistance:
    """Every token is seen `distance` positions before the query, whichever query it is."""

    distance: int


Positions: TypeAlias = Consecutive | Written | Ranks | SharedDistance


@dataclass(frozen=True)
class Segment:
    """A run of KV slots seen by every query row of a view.

    Attributes:
        slots: [n] integer slots shared by all key-value heads, or [kv_heads, n] cells when each head keeps its own
            tokens; -1 pads a head that keeps fewer.
        positions: the rule that gives each token's position.
        causal: a query row at position p sees only tokens at positions <= p. Without it, it sees all.
    """

    slots: torch.Tensor
    positions: Positions
    causal: bool = False


@dataclass(frozen=True)
class View:
    """What a set of query rows sees.

    Attributes:
        segments: disjoint segments in view order. A token named twice would count twice in the softmax.
    """

    segments: tuple[Segment, ...]


def runs(slots: torch.Tensor, slot_pos: torch.Tensor, start: int = 0) -> list[tuple[int, int, int]]:
    """Cut a row of slots, seen consecutively from `start`, where the rotation changes.

    Args:
        slots: [n] integer KV slots; token t is seen at position `start + t`.
        slot_pos: [num_slots] int32, the position each slot was written at.

    Returns:
        (first token, end token, delta) for each maximal run; delta = seen position - written position. Within a run
        one rotation of the query serves every key (DESIGN: zero copies).
    """
    if slots.numel() == 0:
        return []
    seen = torch.arange(start, start + slots.numel(), device=slots.device)
    delta = seen - slot_pos[slots.long()]
    cuts = (torch.nonzero(delta[1:] != delta[:-1]).flatten() + 1).tolist()
    bounds = [0, *cuts, slots.numel()]
    values = delta[torch.tensor(bounds[:-1], device=delta.device)].tolist()
    return [(a, b, d) for a, b, d in zip(bounds[:-1], bounds[1:], values, strict=True)]
