"""From a question to the pieces of blocks it attends to (DBSA, section 2.2)."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass

from sglang_ext.cache.rows import Piece
from sglang_ext.config import DEFAULT_RATIO, RequestOptions
from sglang_ext.retrievers.base import Scores
from sglang_ext.retrievers.registry import is_slow
from sglang_ext.retrievers.selection import block_scores, budget, example_budget, select, select_examples
from sglang_ext.serving.layout import Block, Layout
from sglang_ext.serving.pool import Version
from sglang_ext.serving.texts import LONG
from sglang_ext.serving.workers import Workers


@dataclass(frozen=True)
class BlockSelection:
    """What a request attends to.

    Attributes:
        pieces: in view order.
        blocks: numbers of the blocks they come from, in view order, each once.
        demonstrations: ids in view order, for a selection of single demonstrations.
        scores: the retriever's, of each of `demonstrations`, or of each of `blocks` where those are None; higher is
            better. None where `block_ids` named the blocks.
    """

    pieces: tuple[Piece, ...]
    blocks: tuple[int, ...]
    demonstrations: tuple[str, ...] | None = None
    scores: tuple[float, ...] | None = None

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


async def selected(
    workers: Workers, version: Version, layout: Layout, options: RequestOptions, query: str | None
) -> BlockSelection:
    """`select_pieces`, beside the event loop where it takes long: for a long text, or a retriever that runs a model."""
    if len(query or "") > LONG or is_slow(options.retriever):
        return await workers.beside(select_pieces, version, layout, options, query)
    return select_pieces(version, layout, options, query)


def select_pieces(version: Version, layout: Layout, options: RequestOptions, query: str | None) -> BlockSelection:
    """The pieces of `layout` that a request with these options attends to.

    Raises:
        ValueError: a wrong budget, unknown or repeated block ids, or no text to retrieve with.
    """
    if options.granularity == "example":
        return _examples(version, layout, options, query)
    blocks, scores = _blocks(version, layout, options, query)
    deleted = version.definition.deleted
    if not deleted:
        return BlockSelection(tuple(layout.whole[number] for number in blocks), tuple(blocks), scores=scores)
    pieces: list[Piece] = []
    for number in blocks:
        pieces.extend(_live(layout.blocks[number], deleted))
    return BlockSelection(tuple(pieces), tuple(blocks), scores=scores)


def _blocks(
    version: Version, layout: Layout, options: RequestOptions, query: str | None
) -> tuple[list[int], tuple[float, ...] | None]:
    """(numbers of the selected blocks in view order, the score of each; None where the request named the blocks)."""
    total = len(layout.blocks)
    if options.block_ids is not None:
        ids = list(options.block_ids)
        wrong = [block for block in ids if not 0 <= block < total]
        if wrong or not ids:
            raise ValueError(f"block_ids {reprlib.repr(ids)}: expected ids of the pool's blocks, 0 to {total - 1}")
        if len(set(ids)) != len(ids):
            raise ValueError(f"block_ids {reprlib.repr(ids)}: a block is named twice; its tokens would count twice")
        return ids, None
    m = budget(_ratio(options), options.blocks, total=total, sinks=version.sinks)
    scores = version.retriever(options).score(_text(query, options))
    if not options.scores_blocks:
        scores = block_scores(_of_live(scores, version), layout.starts)
    blocks = select(scores, m, version.sinks, options.order)
    return blocks, tuple(float(scores[number]) for number in blocks)


def _examples(version: Version, layout: Layout, options: RequestOptions, query: str | None) -> BlockSelection:
    if options.block_ids is not None:
        raise ValueError("block_ids with granularity 'example': name blocks, or let a retriever choose examples")
    deleted = version.definition.deleted
    sizes = layout.sizes
    m = example_budget(_ratio(options), options.blocks, block_sizes=sizes, sinks=version.sinks)
    scores = _of_live(version.retriever(options).score(_text(query, options)), version)
    chosen = [
        (number, at)
        for number, at in select_examples(scores, sizes, m, version.sinks, options.order)
        if layout.blocks[number].demonstrations[at] not in deleted
    ]

    pieces: list[Piece] = []
    first = layout.blocks[0]
    if layout.header:
        pieces.append(Piece(first.key, 0, len(layout.header)))
    for number, at in chosen:
        block = layout.blocks[number]
        start, end = block.spans[at]
        if pieces and pieces[-1].key == block.key and pieces[-1].end == start:
            pieces[-1] = Piece(block.key, pieces[-1].start, end)
        else:
            pieces.append(Piece(block.key, start, end))
    blocks = tuple(dict.fromkeys(number for number, _ in chosen))
    return BlockSelection(
        tuple(pieces),
        blocks,
        tuple(layout.blocks[number].demonstrations[at] for number, at in chosen),
        tuple(float(scores[layout.starts[number] + at]) for number, at in chosen),
    )


def _of_live(scores: Scores, version: Version) -> Scores:
    """Scores of demonstrations; those of deleted ones lie below all others."""
    if not version.definition.deleted:
        return scores
    scores = scores.copy()
    scores[version.definition.gone] = scores.min() - 1.0
    return scores


def _live(block: Block, deleted: frozenset[str]) -> list[Piece]:
    """The block less its deleted demonstrations."""
    if deleted.isdisjoint(block.demonstrations):
        return [Piece(block.key, 0, len(block.token_ids))]
    pieces, start = [], 0
    for id, (low, high) in zip(block.demonstrations, block.spans, strict=True):
        if id in deleted:
            if start < low:
                pieces.append(Piece(block.key, start, low))
            start = high
    if start < len(block.token_ids):
        pieces.append(Piece(block.key, start, len(block.token_ids)))
    return pieces


def _ratio(options: RequestOptions) -> float | None:
    """The ratio asked for; without any budget, the paper's, or everything for the retriever `all`."""
    if options.ratio is not None or options.blocks is not None:
        return options.ratio
    return 1.0 if options.retriever == "all" else DEFAULT_RATIO


def _text(query: str | None, options: RequestOptions) -> str:
    if query:
        return query
    if options.retriever in ("all",):
        return "all"
    raise ValueError(
        f"retriever {options.retriever!r} needs text: send the question as text, or with input_ids put it in"
        ' custom_params["query"], or name the blocks in "block_ids"'
    )
