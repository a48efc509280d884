"""Why an answer over a pool is as it is: which blocks were selected, how they scored, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_ext.config import RequestOptions, check_name, check_text, unknown_names
from sglang_ext.serving.layout import Layout
from sglang_ext.serving.pool import COMPLETION, Version
from sglang_ext.serving.pools import PoolService
from sglang_ext.serving.requests import check_characters
from sglang_ext.serving.select import BlockSelection, selected
from sglang_ext.types import Json, JsonObject

SELECTS = ("ratio", "blocks", "block_ids", "order", "retriever", "granularity", "block_score")
"""Options of a request that say what it selects."""


def used(version: Version, selection: BlockSelection, readable: bool) -> JsonObject:
    """What every answer says of its selection.

    Args:
        readable: whether who asked may read the pool: ids of demonstrations are texts, too.
    """
    found: JsonObject = {
        "pool": version.name,
        "version": version.number,
        "blocks": list(selection.blocks),
        "stitched_tokens": selection.tokens,
    }
    if selection.demonstrations is not None and readable:
        found["demonstrations"] = list(selection.demonstrations)
    return found


def explained(version: Version, layout: Layout, selection: BlockSelection) -> list[JsonObject]:
    """An entry for each selected block, or single demonstration, in view order.

    Returns:
        `block` (its number), `sink` (whether every request selects it), `score` (None where the request named the
        blocks), `tokens`, and `demonstrations`, each with `id`, `input` and `output`; deleted ones are left out.
    """
    items = version.definition.demonstrations
    scores = selection.scores or (None,) * len(selection.demonstrations or selection.blocks)
    return [
        {
            "block": number,
            "sink": number < version.sinks,
            "score": score,
            "tokens": tokens,
            "demonstrations": [{"id": id, "input": items[id].input, "output": items[id].output} for id in ids],
        }
        for (number, ids, tokens), score in zip(_parts(version, layout, selection), scores, strict=True)
    ]


def _parts(version: Version, layout: Layout, selection: BlockSelection) -> Iterator[tuple[int, list[str], int]]:
    """(block, ids of the demonstrations, tokens that are read of it) of each selected block or demonstration."""
    if selection.demonstrations is None:
        deleted = version.definition.deleted
        for number in selection.blocks:
            block = layout.blocks[number]
            pairs = list(zip(block.demonstrations, block.spans, strict=True))
            gone = sum(end - start for id, (start, end) in pairs if id in deleted)
            yield number, [id for id, _ in pairs if id not in deleted], len(block.token_ids) - gone
        return
    spans = {
        id: (number, end - start)
        for number in selection.blocks
        for id, (start, end) in zip(layout.blocks[number].demonstrations, layout.blocks[number].spans, strict=True)
    }
    for id in selection.demonstrations:
        number, tokens = spans[id]
        yield number, [id], tokens


async def would_select(service: PoolService, name: str, question: Json) -> JsonObject:
    """What a question selects of a pool, with scores and demonstrations; the model is not asked.

    Args:
        question: an object with `text`, which is retrieved with (not needed beside `block_ids`), and options in
            `SELECTS`.

    Raises:
        ValueError: it is something else, or see `select_pieces`; `PoolError` where the pool cannot be served.
    """
    if not isinstance(question, dict):
        raise ValueError(f"the body is a {type(question).__name__}; expected an object with text and options")
    options = {name: value for name, value in question.items() if name != "text"}
    problem = unknown_names(options, SELECTS, "a selection")
    if problem:
        raise problem
    text, parsed = question.get("text"), RequestOptions.parse({"pool": name, **options})
    if text is not None and not isinstance(text, str):
        raise ValueError(f"text is a {type(text).__name__}; expected a string, the question")
    check_text(text or "", "text")
    check_characters(len(text or ""), service.manager.context_len)
    version = await service.needed(check_name(name))
    layout = version.layouts[COMPLETION]
    await service.prepare_retriever(version, parsed)
    selection = await selected(service.workers, version, layout, parsed, text)
    return {**used(version, selection, True), "selection": explained(version, layout, selection)}
