"""The methods of ``sglang-ext bench quality --suite dbsa``: which there are, and what each asks a draw's pool for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sglang_ext.config import GROUPINGS, ORDERS, PoolOptions
from sglang_ext.launch.bench._draws import ANALYZED
from sglang_ext.launch.demo_methods import Bench, MethodRow
from sglang_ext.policies.dbsa import PATTERNS
from sglang_ext.types import Options

RATIO = 0.3
"""Share of the pool that methods read which choose, unless their name has another."""
FILLED = 0.8
"""Share of the context that is filled with what is read of a pool that is longer than the context."""
AIMED = "dbsa-30"
"""The method with an aim."""


@dataclass(frozen=True)
class DrawnMethod:
    """A method of the study.

    Attributes:
        title: what tables call it.
        ask: has a draw answered.
        pool: options of its pool, beside those of the others'; methods with the same ones share it.
        beside: the method whose answers over the same draws its row compares with.
        fills: whether it reads as much of the pool as fills `FILLED` of the context, and not `ratio`.
        ratio: the share of the pool that it reads, unless what it asks for says another.
    """

    title: str
    ask: Callable[[Bench], MethodRow]
    pool: Options
    beside: str = "fixed"
    fills: bool = False
    ratio: float = RATIO

    def share(self, size: int, context: int) -> float:
        """What it reads of a pool of `size` tokens, unless what it asks for says another."""
        return min(1.0, FILLED * context / size) if self.fills else self.ratio


EXAMPLES: Options = {"block_size": 1, "sink_blocks": 20, "previous_blocks": 100}
"""A block is one demonstration: the authors' setting of DBSA by example."""
MAIN: Mapping[str, DrawnMethod] = {
    "zero-shot": DrawnMethod("zero-shot", Bench.zero_shot, {}),
    "fixed": DrawnMethod("Fixed ICL", Bench.fixed_icl, {}),
    "example": DrawnMethod("RetICL by example, 30%", Bench.ret_icl_by_example, {}),
    "block": DrawnMethod("RetICL by block, 30%", Bench.ret_icl_by_block, {}),
    "dbsa-10": DrawnMethod("DBSA 10%", partial(Bench.dbsa, ratio=0.1), {}),
    "dbsa-30": DrawnMethod("DBSA 30%", Bench.dbsa, {}),
    "dbsa-100": DrawnMethod("DBSA 100%", partial(Bench.dbsa, ratio=1.0), {}),
    "dbsa-example": DrawnMethod("DBSA by example, 30%", Bench.dbsa, EXAMPLES),
}
PLOTTED = ("fixed", "example", "dbsa-example", "dbsa-10", "dbsa-30", "dbsa-100")


CUT_OUT = partial(Bench.dbsa, granularity="example")


def _ablations() -> dict[str, DrawnMethod]:
    """DBSA 30% with one thing changed (DBSA, Tables 5, 6, 7, 8 and 12)."""
    defaults, found = PoolOptions(), dict[str, DrawnMethod]()
    pools: list[Options] = [{"pattern": each} for each in PATTERNS if each != defaults.pattern]
    pools += [{"grouping": each} for each in GROUPINGS if each != defaults.grouping]
    pools += [{"previous_blocks": each} for each in (1, 4, 8)]
    for pool in pools:
        ((name, value),) = pool.items()
        words = f"{name.replace('_', ' ')} {value}"
        found[words.replace(" ", "-")] = DrawnMethod(f"DBSA 30%, {words}", Bench.dbsa, pool, AIMED)
    for order in ORDERS:
        if order != "pool":
            words = order.replace("_", " ")
            found[f"order-{order}"] = DrawnMethod(
                f"DBSA 30%, blocks from {words}", partial(Bench.dbsa, order=order), {}, AIMED
            )
    found["block-score-text"] = DrawnMethod(
        "DBSA 30%, blocks scored by their whole texts", partial(Bench.dbsa, block_score="text"), {}, AIMED
    )
    found["granularity-example"] = DrawnMethod("DBSA 30%, examples cut out of blocks", CUT_OUT, {}, AIMED)
    return found


def _retrieved(retriever: str) -> dict[str, DrawnMethod]:
    """What chooses with BM25, with another retriever: each beside its own with BM25."""

    def dbsa(bench: Bench) -> MethodRow:
        return bench.dbsa(retriever=retriever)

    asks = {"dbsa-30": dbsa, "dbsa-example": dbsa, "example": lambda bench: bench.ret_icl_by_example(retriever)}
    return {
        f"{name}-{retriever}": DrawnMethod(f"{MAIN[name].title}, retriever {retriever}", ask, MAIN[name].pool, name)
        for name, ask in asks.items()
    }


def _block_sizes() -> dict[str, DrawnMethod]:
    """DBSA 30% over smaller blocks: with the other defaults, and with the sinks and the context of `EXAMPLES`."""
    found = dict[str, DrawnMethod]()
    sinks, previous = int(EXAMPLES["sink_blocks"]), int(EXAMPLES["previous_blocks"])
    for size in (1, 2, 5):
        found[f"blocks-of-{size}"] = DrawnMethod(f"DBSA 30%, blocks of {size}", Bench.dbsa, {"block_size": size}, AIMED)
    for size in (2, 5, 10):
        wider: Options = {"block_size": size, "sink_blocks": sinks // size, "previous_blocks": previous // size}
        words = f"blocks of {size} behind {sinks} sinks and {previous} examples"
        found[f"blocks-of-{size}-behind-{previous}"] = DrawnMethod(f"DBSA 30%, {words}", Bench.dbsa, wider, AIMED)
    return found


TENTH: Mapping[str, DrawnMethod] = {
    "example-10": DrawnMethod("RetICL by example, 10%", Bench.ret_icl_by_example, {}, "dbsa-10", ratio=0.1),
    "cut-10": DrawnMethod("DBSA 10%, examples cut out of blocks", CUT_OUT, {}, "dbsa-10", ratio=0.1),
    "block-10": DrawnMethod("RetICL by block, 10%", Bench.ret_icl_by_block, {}, "dbsa-10", ratio=0.1),
}
"""Beside DBSA 10%: examples and blocks, in a dense prompt and in the pool's encoding (DBSA, Table 6)."""
LABELS: Mapping[str, DrawnMethod] = {
    "likely": DrawnMethod("DBSA 30%, the most likely label", partial(Bench.dbsa, choose="likely"), {}, AIMED),
    "label-probs": DrawnMethod(
        "DBSA 30%, the most likely of all labels scored", partial(Bench.dbsa, label_probs=True), {}, AIMED
    ),
}
"""DBSA 30% with the most likely label instead of the greedy one."""
LOCAL: Options = {"positions": "local"}
"""Of pools that may be longer than the context, where Fixed ICL cannot run."""
BEYOND: Mapping[str, DrawnMethod] = {
    "zero-shot-filled": DrawnMethod("zero-shot, local positions", Bench.zero_shot, LOCAL, "example-filled", fills=True),
    "example-filled": DrawnMethod(
        "RetICL by example, as many as fit", Bench.ret_icl_by_example, LOCAL, "example-filled", fills=True
    ),
    "dbsa-filled": DrawnMethod("DBSA, as much as fits", Bench.dbsa, LOCAL, "example-filled", fills=True),
    "dbsa-example-filled": DrawnMethod(
        "DBSA by example, as many as fit", Bench.dbsa, {**EXAMPLES, **LOCAL}, "example-filled", fills=True
    ),
}
ABLATIONS, BLOCK_SIZES = _ablations(), _block_sizes()
_BEHIND_100 = BLOCK_SIZES["blocks-of-10-behind-100"].pool
CUT: Mapping[str, DrawnMethod] = {
    "cut-behind-100": DrawnMethod(
        "DBSA 30%, examples cut out of blocks behind 20 sinks and 100 examples",
        CUT_OUT,
        _BEHIND_100,
        AIMED,
    ),
}
"""Examples cut out of blocks of 10 with the context of `EXAMPLES`; `granularity-example` has the default's."""
WRITTEN: Mapping[str, DrawnMethod] = {
    "dbsa-30-written": DrawnMethod("DBSA 30%, seen where it was written", partial(Bench.dbsa, rebase=False), {}, AIMED),
    "granularity-example-written": DrawnMethod(
        "DBSA 30%, examples cut out of blocks and seen where they were written",
        partial(CUT_OUT, rebase=False),
        {},
        "granularity-example",
    ),
    "cut-behind-100-written": DrawnMethod(
        "DBSA 30%, examples cut out of blocks behind 20 sinks and 100 examples, seen where they were written",
        partial(CUT_OUT, rebase=False),
        _BEHIND_100,
        "cut-behind-100",
    ),
    "dbsa-example-written": DrawnMethod(
        "DBSA by example, 30%, seen where it was written", partial(Bench.dbsa, rebase=False), EXAMPLES, "dbsa-example"
    ),
}
"""What is selected keeps its positions (`rebase: false`), each beside the method that gives it new ones."""
RETRIEVED = {name: each for retriever in ANALYZED for name, each in _retrieved(retriever).items()}
METHODS: Mapping[str, DrawnMethod] = {
    **MAIN,
    **LABELS,
    **ABLATIONS,
    **BLOCK_SIZES,
    **CUT,
    **TENTH,
    **WRITTEN,
    **RETRIEVED,
    **BEYOND,
}
GROUPS: Mapping[str, Sequence[str]] = {
    "main": tuple(MAIN),
    "labels": (AIMED, *LABELS),
    "ablations": tuple(ABLATIONS),
    "blocks": (AIMED, "dbsa-example", *BLOCK_SIZES),
    "examples": ("fixed", "example", AIMED, "granularity-example", "dbsa-example", *CUT),
    "scores": ("fixed", AIMED, "block-score-text", "dbsa-example"),
    "tenth": ("dbsa-10", *TENTH),
    "retrievers": tuple(RETRIEVED),
    "beyond": tuple(BEYOND),
    "written": (AIMED, *WRITTEN, *(each.beside for each in WRITTEN.values() if each.beside != AIMED)),
}
