"""Cutting an encoding into requests: which blocks are written together, and what each of them sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sglang_ext.cache.rows import NewBlock, Piece, Row
from sglang_ext.policies.dbsa import BlockSparse
from sglang_ext.serving.layout import Layout


@dataclass(frozen=True)
class EncodingRun:
    """One encoding request: the tokens of its new blocks, and what the scheduler needs to know of them."""

    row: Row
    token_ids: tuple[int, ...]

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)


def plan_runs(
    layout: Layout,
    pattern: BlockSparse,
    blocks: Sequence[int],
    owner: str,
    run_tokens: Callable[[], int],
    row_limit: int,
) -> Iterator[EncodingRun]:
    """Requests that encode `blocks` (ascending; what they attend to is resident or among them).

    A run holds as many blocks as fit in `run_tokens()` new tokens, asked before each, and at least one: other requests
    are scheduled between runs.

    Raises:
        ValueError: a block and what it attends to exceed `row_limit` tokens, the longest row the model takes.
    """
    lengths = layout.lengths
    start = 0
    while start < len(blocks):
        end, new_tokens, most = start + 1, lengths[blocks[start]], run_tokens()
        while end < len(blocks) and new_tokens + lengths[blocks[end]] <= most:
            grown = blocks[start : end + 1]
            if _row_tokens(lengths, pattern, grown) > row_limit:
                break
            new_tokens += lengths[blocks[end]]
            end += 1
        chosen = list(blocks[start:end])
        total = _row_tokens(lengths, pattern, chosen)
        if total > row_limit:
            raise ValueError(
                f"block {chosen[0]} and the blocks it attends to take {total} tokens, the model's context allows"
                f" {row_limit}: use smaller blocks, fewer previous blocks or another pattern"
            )
        yield _run(layout, pattern, chosen, owner)
        start = end


def _context(pattern: BlockSparse, blocks: Sequence[int]) -> list[int]:
    """Blocks outside `blocks` that they attend to, in pool order."""
    inside = set(blocks)
    return sorted({other for block in blocks for other in pattern.attended(block) if other not in inside})


def _row_tokens(lengths: Sequence[int], pattern: BlockSparse, blocks: Sequence[int]) -> int:
    return sum(lengths[block] for block in (*_context(pattern, blocks), *blocks))


def _run(layout: Layout, pattern: BlockSparse, blocks: Sequence[int], owner: str) -> EncodingRun:
    context = _context(pattern, blocks)
    order = {block: index for index, block in enumerate((*context, *blocks))}
    prefix = tuple(Piece(layout.blocks[block].key, 0, layout.lengths[block]) for block in context)
    new = []
    for block in blocks:
        starts = pattern.starts(block, layout.lengths)
        seen = tuple((order[other], position) for other, position in starts.items() if other != block)
        new.append(NewBlock(layout.blocks[block].key, layout.lengths[block], starts[block], seen))
    token_ids = tuple(token for block in blocks for token in layout.blocks[block].token_ids)
    return EncodingRun(Row(prefix, tuple(new), owner), token_ids)
