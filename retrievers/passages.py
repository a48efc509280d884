"""Cuts a long text into passages that fit an encoder, so that nothing of it is silently truncated."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def passages(text: str, count: Callable[[str], int], limit: int) -> list[str]:
    """`text` as consecutive passages of at most `limit` tokens each, cut at line ends where possible.

    Lines longer than the limit are cut at white space, and words longer than it in halves. White space at
    cuts is dropped; nothing else is.

    Args:
        text: any text; one without a visible character gives [text].
        count: number of tokens of a string. Passages are counted whole, so it need not be additive.
        limit: tokens, at least 1.
    Raises:
        ValueError: `limit` below 1, or too small for a single character.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}; expected at least one token a passage: raise the encoder's max_seq_length")
    if not text.strip() or count(text) <= limit:
        return [text]
    packed: list[str] = []
    for joiner, piece in _pieces(text, count, limit):
        if packed and count(packed[-1] + joiner + piece) <= limit:
            packed[-1] += joiner + piece
        else:
            packed.append(piece)
    return packed


def _pieces(text: str, count: Callable[[str], int], limit: int) -> Iterator[tuple[str, str]]:
    """(what stood before it, piece) for lines, or words of a long line, or halves of a long word."""
    for line in text.splitlines():
        if not line.strip():
            continue
        if count(line) <= limit:
            yield "\n", line
            continue
        joiner = "\n"
        for word in line.split():
            for part in _halves(word, count, limit):
                yield joiner, part
                joiner = ""
            joiner = " "


def _halves(word: str, count: Callable[[str], int], limit: int) -> Iterator[str]:
    if count(word) <= limit:
        yield word
        return
    if len(word) == 1:
        raise ValueError(
            f"{word!r} alone is {count(word)} tokens, more than the limit of {limit} a passage: "
            "raise the encoder's max_seq_length"
        )
    middle = len(word) // 2
    yield from _halves(word[:middle], count, limit)
    yield from _halves(word[middle:], count, limit)
