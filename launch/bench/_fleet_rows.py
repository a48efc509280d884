"""Rows of ``sglang-ext bench fleet`` from what its loads measured, and the table that it prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_ext.launch.bench._record import Figure, Timing
from sglang_ext.launch.bench._router import KEYED
from sglang_ext.types import JsonObject

AIM = 0.9
"""Of the blocks that one server finds which holds its share of the pools alone, what routing by pool should find."""


def figures(loads: Sequence[JsonObject], gpus: int) -> list[Figure]:
    """Rows of each load, beside the load on one server alone with its share of the pools and of the clients.

    Args:
        loads: with `alone` and `pools_alone`.
        gpus: of the machine. Where there are fewer than servers, rows of times say so: one server alone has more of the
            machine than each of several.
    """
    return [row for load in loads for row in _of(load, gpus)]


def _of(load: JsonObject, gpus: int) -> Iterator[Figure]:
    alone, share = load["alone"], load["pools_alone"]
    servers = f"{load['servers']} server{'s' if load['servers'] > 1 else ''}"
    words = f"{load['pools']} pools ({load['popularity']}) on {servers}, {load['policy']}"
    beside = f"one server alone, {share} pools"
    shared = f", servers on shared {'GPUs' if gpus else 'processors'}" if gpus < load["servers"] > 1 else ""
    ratio = load["found"] / alone["found"] if alone["found"] else None
    aimed = load["policy"] in KEYED
    yield Figure(
        f"{words}: share of selected blocks that were there",
        Timing.of([load["found"]]),
        beside,
        Timing.of([alone["found"]]),
        ratio,
        f"at least {AIM:.3g}x" if aimed else "",
        ratio >= AIM if aimed and ratio is not None else None,
        notes={name: load[name] for name in ("homes", "block_hits", "missed_blocks", "reencoded_blocks", "requests")},
        unit="share",
    )
    for name in ("p50", "p99"):
        yield Figure(
            f"{words}: to the first token, {name}{shared}",
            Timing.of([load["first"][name]]),
            beside,
            Timing.of([alone["first"][name]]),
            alone["first"][name] / load["first"][name],
        )
    answers = load["completed"] / load["servers"]
    yield Figure(
        f"{words}: answers of a server{shared}",
        Timing.of([answers]),
        beside,
        Timing.of([alone["completed"]]),
        answers / alone["completed"] if alone["completed"] else None,
        unit="a second",
    )


def shown(loads: Sequence[JsonObject]) -> str:
    """The loads as a Markdown table."""
    lines = [
        "| pools | asked about | servers | policy | pools at home | blocks found | one server, its share of the pools |"
        " first token, p50 and p99, ms | answers a second |",
        "|--:|---|--:|---|---|--:|--:|--:|--:|",
    ]
    for load in loads:
        alone, first = load["alone"], load["first"]
        cells = [load["pools"], load["popularity"], load["servers"], f"`{load['policy']}`"]
        cells += [" and ".join(map(str, load["homes"])), f"{load['found']:.3f}"]
        cells += [f"{alone['found']:.3f} ({load['pools_alone']} pools)"]
        cells += [f"{1e3 * first['p50']:.0f}, {1e3 * first['p99']:.0f}", f"{load['completed']:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
