"""At which positions a question sees the tokens that it selects (DBSA, section 2.2), and stands itself."""

from __future__ import annotations

from sglang_ext.cache.rows import Row
from sglang_ext.config import RequestOptions
from sglang_ext.names import TokenizerManager
from sglang_ext.serving.layout import Layout
from sglang_ext.serving.pool import Version
from sglang_ext.serving.pools import PoolService
from sglang_ext.serving.select import BlockSelection

ANSWER = 6
"""Tokens of the context that SGLang leaves to the answer to a prompt."""


def check_rebase(service: PoolService, version: Version, options: RequestOptions) -> None:
    """Whether a pool's blocks may be seen where they were written, if the request wants that.

    Raises:
        ValueError: they may not; says why, and what to change.
    """
    if options.rebase:
        return
    args, without = service.manager.server_args, "leave rebase out"
    if not service.as_written:
        raise ValueError(
            f"rebase false with --attention-backend {args.attention_backend}, which reads blocks at new positions"
            f" alone: {without}, or serve the pool with --attention-backend dbsa"
        )
    if version.definition.options.pattern == "self":
        raise ValueError(
            f"rebase false over pool {version.name!r} with pattern 'self': its blocks are shared with other pools, and"
            f" stand where they were first written; {without}, or put the pool with another pattern"
        )


def row_of(selection: BlockSelection, layout: Layout, options: RequestOptions) -> Row:
    """What the row of a question begins with."""
    if options.rebase:
        return Row(selection.pieces)
    ends = (layout.positions[piece.key] + piece.end for piece in selection.pieces)
    return Row(selection.pieces, follows=max(ends, default=0))


def check_fits(manager: TokenizerManager, row: Row, own: int) -> None:
    """Whether a question of so many tokens behind a row stays within the model's context.

    Raises:
        ValueError: it does not; has the numbers.
    """
    context = manager.context_len
    if row.shift > 0 and row.reach + own >= context - ANSWER:
        raise ValueError(
            f"the question has {own} tokens and with rebase false follows position {row.follows}, the highest of what"
            f" is selected; with {ANSWER} for the answer they must stay below the model's context of {context} tokens:"
            " shorten the question, or leave rebase out"
        )
    if row.prefix_tokens + own >= context:
        raise ValueError(
            f"the question has {own} tokens and the selected blocks {row.prefix_tokens}; together they must stay below"
            f" the model's context of {context} tokens: shorten the question or lower the ratio"
        )
