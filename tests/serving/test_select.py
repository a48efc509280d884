"""Selections of a request: what runs a model, or reads a long text, does so beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.config import PoolOptions, RequestOptions
from sglang_ext.retrievers import registry
from sglang_ext.serving.layout import Block, Layout, parse_demonstrations
from sglang_ext.serving.pool import MAX_RETRIEVERS, Definition, Version
from sglang_ext.serving.select import select_pieces, selected
from sglang_ext.serving.texts import LONG

INPUTS = ("red card", "green tea", "red wine", "blue sky", "green card", "white wine", "card card", "red sky")


@pytest.fixture
def pool() -> tuple[Version, Layout]:
    """Four blocks of two demonstrations, one token each; a demonstration of the second one is deleted."""
    items = {item.id: item for item in parse_demonstrations([{"input": text, "output": "x"} for text in INPUTS])}
    ids = list(items)
    groups = tuple((ids[at], ids[at + 1]) for at in range(0, len(ids), 2))
    definition = Definition(PoolOptions(block_size=2), items, groups, frozenset({ids[2]}))
    blocks = tuple(Block(f"block{n}", (1, 1), group, ((0, 1), (1, 2)), 2 * n) for n, group in enumerate(groups))
    return Version("pool", 1, definition), Layout((), blocks)


def test_a_block_is_as_relevant_as_its_best_live_demonstration(pool: tuple[Version, Layout]) -> None:
    version, layout = pool
    texts = [version.definition.example_text(id) for block in layout.blocks for id in block.demonstrations]
    texts[2] = ""  # it was deleted
    single = registry.get("bm25").build(texts).score("wine card").tolist()
    found = select_pieces(version, layout, RequestOptions("pool", ratio=1.0, order="pool"), "wine card")
    best = [max(single[0:2]), single[3], max(single[4:6]), max(single[6:8])]
    assert found.scores == pytest.approx(best) and len(set(best)) > 2
    alone = select_pieces(version, layout, RequestOptions("pool", ratio=1.0, granularity="example"), "wine card")
    assert len(alone.demonstrations or ()) == len(INPUTS) - 1
    texts = [version.definition.block_text(block.demonstrations) for block in layout.blocks]
    whole = registry.get("bm25").build(texts).score("wine card").tolist()
    found = select_pieces(version, layout, RequestOptions("pool", ratio=1.0, block_score="text"), "wine card")
    assert found.scores == pytest.approx(whole) and whole != pytest.approx(best)


@pytest.mark.parametrize(
    ("retriever", "text", "apart"),
    [("bm25", "red", False), ("bm25", "red " * LONG, True), ("dense", "red", True), ("dense:MODEL", "red", True)],
)
def test_what_takes_long_is_done_beside_the_event_loop(
    pool: tuple[Version, Layout], retriever: str, text: str, apart: bool
) -> None:
    calls: list[Any] = []

    async def beside(work: Callable[..., Any], *args: Any) -> Any:
        calls.append(work)
        return work(*args)

    version, layout = pool
    version._retrievers[(retriever, False)] = registry.get("bm25").build(list(INPUTS))
    options = RequestOptions("pool", ratio=0.5, retriever=retriever)
    workers: Any = SimpleNamespace(beside=beside)
    found = asyncio.run(selected(workers, version, layout, options, text))
    assert calls == ([select_pieces] if apart else []) and len(found.blocks) == 2


def test_many_retrievers_do_not_drive_the_default_one_out(pool: tuple[Version, Layout]) -> None:
    version, _ = pool
    kept = version.retriever(RequestOptions("pool"))
    for seed in range(3 * MAX_RETRIEVERS):
        version.retriever(RequestOptions("pool", retriever=f"random:{seed}"))
    assert version.retriever(RequestOptions("pool")) is kept and len(version._retrievers) == MAX_RETRIEVERS + 1
    assert version.has_retriever(RequestOptions("pool", retriever=f"random:{3 * MAX_RETRIEVERS - 1}"))
    assert not version.has_retriever(RequestOptions("pool", retriever="random:0"))


@pytest.mark.parametrize("retriever", ["random", "random:7", "all"])
def test_what_reads_no_text_scores_blocks(pool: tuple[Version, Layout], retriever: str) -> None:
    """The best of many random numbers is larger than that of few: short blocks would be chosen less often."""
    version, _ = pool
    assert version.retriever(RequestOptions("pool", retriever=retriever)).num_texts == 4
    assert version.retriever(RequestOptions("pool", retriever=retriever, granularity="example")).num_texts == 8
