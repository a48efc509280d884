"""DBSA: dynamic block-sparse attention for many-shot in-context learning (Xiao et al., 2025, sections 2.1 and 2.2).

Demonstrations are encoded once, in blocks. Block i attends to the first `sinks` blocks, the `previous` blocks just
before it and, causally, itself. A request then attends to the blocks it selected, placed one after the other from
position 0, and to its own tokens after them. Everything here is arithmetic on block numbers and token counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

PATTERNS = ("sink+previous+self", "sink+self", "self", "full")
POSITIONS = ("sequential", "local")


@dataclass(frozen=True)
class BlockSparse:
    """Which earlier blocks a block attends to while it is encoded.

    Attributes:
        pattern: one of PATTERNS; the paper's is `sink+previous+self`, the others are its ablations.
        sinks: how many first blocks every block attends to (the paper: 1).
        previous: how many blocks just before it a block attends to (the paper: 2, Table 12).
        positions: `sequential` ids over the whole pool (the paper), or `local`: the attended blocks and the block
            itself contiguous from 0, which pools longer than the model's context need.
    """

    pattern: str = "sink+previous+self"
    sinks: int = 1
    previous: int = 2
    positions: str = "sequential"

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ValueError(f"attention pattern {self.pattern!r}: expected one of {', '.join(PATTERNS)}")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions {self.positions!r}: expected one of {', '.join(POSITIONS)}")
        if self.sinks < 1 or self.previous < 0:
            raise ValueError(
                f"sink_blocks={self.sinks}, previous_blocks={self.previous}: expected at least 1 and at least 0"
            )

    def attended(self, block: int) -> tuple[int, ...]:
        """The earlier blocks that `block` attends to, in pool order, each once (section 2.1)."""
        if self.pattern == "self":
            return ()
        if self.pattern == "full":
            return tuple(range(block))
        sinks = range(min(self.sinks, block))
        if self.pattern == "sink+self":
            return tuple(sinks)
        previous = range(max(len(sinks), block - self.previous), block)
        return (*sinks, *previous)

    def reach(self, block: int, blocks: int) -> list[int]:
        """The blocks whose states depend on `block`, directly or through others, itself included, in pool order."""
        reached = {block}
        for later in range(block + 1, blocks):
            if reached.intersection(self.attended(later)):
                reached.add(later)
        return sorted(reached)

    def starts(self, block: int, lengths: Sequence[int]) -> dict[int, int]:
        """Position of the first token of every block in the view of `block`, itself included.

        Args:
            block: the block being encoded.
            lengths: tokens of each block of the pool, up to and including `block`.

        Returns:
            block number -> position, in view order.
        """
        seen = (*self.attended(block), block)
        if self.positions == "sequential":
            offsets = [0, *accumulate(lengths[:block])]
            return {other: offsets[other] for other in seen}
        starts, position = {}, 0
        for other in seen:
            starts[other] = position
            position += lengths[other]
        return starts


def block_identity(
    model: str, pattern: BlockSparse, start: int, token_ids: Sequence[int], attended: Sequence[str]
) -> str:
    """The name of a block's states: equal names mean equal keys and values.

    States depend, through the layers, on every block they attended to, so a name is a hash over a chain. `start` is
    left out for the pattern `self`, whose states do not depend on where the block stood (the rotation is undone by
    rebasing), so that equal blocks are shared between pools wherever they stand.

    Args:
        model: name of the weights, LoRA and KV dtype that wrote the states.
        start: position of the block's first token when it was encoded.
        token_ids: the block's own tokens.
        attended: names of the blocks it attended to, in view order.
    """
    head = [model, pattern.pattern, pattern.positions, -1 if pattern.pattern == "self" else start, list(attended)]
    digest = hashlib.blake2b(json.dumps(head).encode(), digest_size=16)
    digest.update(np.asarray(token_ids, dtype="<u4").tobytes())
    return digest.hexdigest()


def block_identities(
    model: str, pattern: BlockSparse, blocks: Sequence[Sequence[int]], known: Sequence[str] = ()
) -> list[str]:
    """`block_identity` of every block of a pool, in order; `known` are the names of the first ones."""
    lengths = [len(block) for block in blocks]
    names = list(known)
    for number, tokens in enumerate(blocks[len(known) :], len(known)):
        attended = pattern.attended(number)
        start = pattern.starts(number, lengths)[number]
        names.append(block_identity(model, pattern, start, tokens, [names[other] for other in attended]))
    return names
