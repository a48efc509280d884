"""What answers must be where keys and values are kept in float8 e4m3, by ``transformers`` in float32.

As ``oracle``, with one rounding, which is explicit: whatever a layer puts into its cache is rounded to float8
and widened again, keys behind their rotation to the position at which their block is encoded. What is kept of a
block are these rounded keys. Where a piece is seen elsewhere, they are rotated by the difference of the positions in
float32, and not rounded again. The rotation of the difference has no magnitude of its own, so models whose rotary
embedding has one (YaRN) are none of this module's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache

from tests.oracle.oracle import (
    EncodedBlocks,
    Piece,
    _check_pieces,
    _forward,
    attended_blocks,
    rotate,
    whole_blocks,
)

Rounding = Callable[[torch.Tensor], torch.Tensor]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The float8 e4m3 next to each number, in the type of ``x``."""
    return x.to(torch.float8_e4m3fn).to(x.dtype)


class RoundingCache(DynamicCache):
    """Rounds what layers put into it, before they attend to it; ``rounding`` is an argument for the self-checks."""

    def __init__(self, config, rounding: Rounding = rounded) -> None:
        super().__init__(config=config)
        self.rounding = rounding

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return super().update(self.rounding(key_states), self.rounding(value_states), layer_idx, *args, **kwargs)


def _past(
    model: torch.nn.Module,
    encoded: EncodedBlocks,
    pieces: Sequence[Piece],
    positions: torch.Tensor,
    rounding: Rounding = rounded,
) -> RoundingCache:
    """A cache that holds ``pieces`` in order, moved to ``positions`` (int64, one a token) and not rounded again."""
    cache = RoundingCache(model.config, lambda x: x)
    if pieces:
        moved = positions - torch.cat([encoded.positions[b][s:e] for b, s, e in pieces])
        for layer in range(len(model.model.layers)):
            keys = torch.cat([encoded.keys[b][layer][:, s:e] for b, s, e in pieces], dim=1)
            values = torch.cat([encoded.values[b][layer][:, s:e] for b, s, e in pieces], dim=1)
            cache.update(rotate(model, keys, moved)[None], values[None], layer)
    cache.rounding = rounding
    return cache


def encode(
    model: torch.nn.Module,
    blocks: Sequence[Sequence[int]],
    pattern: str = "sink+previous+self",
    sink_blocks: int = 1,
    previous_blocks: int = 2,
    positions: str = "sequential",
    rounding: Rounding = rounded,
) -> EncodedBlocks:
    """Encode a pool block by block; arguments as of ``oracle.encode``.

    Returns:
        the kept states: keys are **rotated** to ``positions`` here, and rounded like the values.
    """
    offsets = [0]
    for b in blocks:
        offsets.append(offsets[-1] + len(b))
    done = EncodedBlocks([list(b) for b in blocks], [], [], [])
    for i, block in enumerate(blocks):
        seen = attended_blocks(i, pattern, sink_blocks, previous_blocks)
        before = sum(len(blocks[b]) for b in seen)
        if positions == "local":
            past_positions, first = torch.arange(before), before
        else:
            past_positions = torch.cat([torch.arange(offsets[b], offsets[b + 1]) for b in seen] or [torch.arange(0)])
            first = offsets[i]
        own_positions = torch.arange(first, first + len(block))
        past = _past(model, done, whole_blocks(blocks, seen), past_positions, rounding)
        allowed = torch.ones(len(block), before + len(block), dtype=torch.bool).tril(before)
        _forward(model, block, own_positions, allowed, past)
        done.keys.append([layer.keys[0, :, before:].clone() for layer in past.layers])
        done.values.append([layer.values[0, :, before:].clone() for layer in past.layers])
        done.positions.append(own_positions)
    return done


def written_keys(_model: torch.nn.Module, encoded: EncodedBlocks, block: int) -> list[torch.Tensor]:
    """A block's keys as they were written: what is kept of it."""
    return encoded.keys[block]


def log_probs(
    model: torch.nn.Module,
    encoded: EncodedBlocks,
    pieces: Sequence[Piece],
    own_tokens: Sequence[int],
    *,
    own_offset: int = 0,
    rebase: bool = True,
    rounding: Rounding = rounded,
) -> torch.Tensor:
    """Log-probabilities of every next token of a request, [own tokens, vocabulary]; arguments as of
    ``oracle.log_probs``, ``encoded`` as of ``encode``.
    """
    _check_pieces(encoded, pieces)
    before, n = sum(e - s for _, s, e in pieces), len(own_tokens)
    positions = torch.arange(before)
    if not rebase:
        positions = torch.cat([encoded.positions[b][s:e] for b, s, e in pieces])
    past = _past(model, encoded, pieces, positions, rounding)
    allowed = torch.ones(n, before + n, dtype=torch.bool).tril(before)
    first = before if rebase else int(positions.max()) + 1
    own_positions = torch.arange(first, first + n) + own_offset
    return torch.log_softmax(_forward(model, own_tokens, own_positions, allowed, past), dim=-1)
