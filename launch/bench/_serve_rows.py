"""Rows and curves of ``sglang-ext bench serve`` from what its loads measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from sglang_ext.launch.bench._record import Curve, Figure, Timing, at_most
from sglang_ext.launch.bench._serve_mixes import MIXES
from sglang_ext.types import JsonObject

OURS, STOCK = "ours", "stock"
ENCODING_AIM = 2.0
"""How many times its median alone the 99th percentile of a token may take while a pool is encoded."""


def compare(raw: JsonObject, args: argparse.Namespace) -> list[Figure]:
    """Rows of all mixes that ours answered."""
    found: list[Figure] = []
    for mix, loads in raw.items():
        if OURS not in loads:
            continue
        [ours] = loads[OURS].values()
        if mix in MIXES:
            found += _mix_rows(mix, ours, loads.get(STOCK, {}), args)
        else:
            found += _encoding_rows(ours, loads.get(STOCK, {}), args)
    return found


def most_good(loads: JsonObject) -> Timing:
    """The largest goodput of all open loops, with that of its parts: answers a second."""
    load = max([*loads["open"], *loads["own"]], key=lambda each: float(each["good"]))
    parts = Timing.of(load["good_parts"])
    return Timing(load["good"], parts.low, parts.high, parts.samples)


def best(stocks: JsonObject) -> tuple[str, JsonObject]:
    """(name, loads) of the attention backend of stock SGLang with the largest goodput."""
    backend = max(stocks, key=lambda each: most_good(stocks[each]).median)
    return f"stock SGLang on {backend}", stocks[backend]


def _mix_rows(mix: str, ours: JsonObject, stocks: JsonObject, args: argparse.Namespace) -> Iterator[Figure]:
    kind = MIXES[mix]
    name, theirs = best(stocks) if stocks else ("", {})
    limits = f"{1e3 * args.first_limit:.0f} ms to the first token, {1e3 * args.token_limit:.0f} ms a token"
    yield _more(
        f"{kind.words}: goodput ({limits})",
        most_good(ours),
        name,
        most_good(theirs) if theirs else None,
        kind.aim,
        notes=_costs(ours["open"]),
    )
    for number, load in enumerate(ours["closed"]):
        other = Timing.of([theirs["closed"][number]["completed"]]) if theirs else None
        words = f"{kind.words}, {load['concurrency']} at a time: answers"
        yield _more(words, Timing.of([load["completed"]]), name, other, None, notes=_costs([load]))
    for load in ours["open"]:
        beside: JsonObject = next((each for each in theirs.get("open", []) if each["rate"] == load["rate"]), {})
        for key, what in (("first", "to the first token"), ("token", "from a token to the next")):
            others = beside.get(key) or {}
            words = f"{kind.words}, {load['rate']:.3g} a second arrive: {what}, 99th percentile"
            if load[key]:
                yield _faster(words, load[key]["p99"], name, others.get("p99"), _costs([load]))


def _encoding_rows(ours: JsonObject, stocks: JsonObject, args: argparse.Namespace) -> Iterator[Figure]:
    beside, alone = ours["beside"]["token"], ours["alone"]["token"]
    others = {backend: each["beside"]["token"]["p99"] for backend, each in stocks.items()}
    yield at_most(
        f"a token while a pool of {args.encoded} tokens is encoded and replaced, 99th percentile",
        Timing.of([beside["p99"]]),
        alone["p50"],
        "the median without an encoding",
        ENCODING_AIM,
        notes={"p50_beside": beside["p50"], "p99_alone": alone["p99"], "p99_beside_a_prompt_of_stock": others},
    )


def _costs(loads: Sequence[JsonObject]) -> JsonObject:
    """What loads cost, for the notes of a row."""
    names = ("processor_ms_a_request", "gpu_busy", "most_running", "failed", "unfinished")
    return {name: [each.get(name) for each in loads] for name in names}


def _more(
    name: str, ours: Timing, baseline: str, theirs: Timing | None, aim: float | None, notes: JsonObject
) -> Figure:
    """A row of something of which more is better, in numbers a second."""
    ratio = ours.median / theirs.median if theirs and theirs.median else None
    # Parts of a load vary with what arrives in them: the ratio itself is judged.
    met = None if aim is None or ratio is None else ratio >= aim
    text = "" if aim is None else f"at least {aim:.3g}x"
    return Figure(name, ours, baseline if theirs else "", theirs, ratio, text, met, notes=notes, unit="a second")


def _faster(name: str, ours: float, baseline: str, theirs: float | None, notes: JsonObject) -> Figure:
    """A row of a time."""
    timing = None if theirs is None else Timing.of([theirs])
    return Figure(
        name, Timing.of([ours]), baseline if timing else "", timing, theirs / ours if theirs else None, notes=notes
    )


def curves(raw: JsonObject) -> list[Curve]:
    """Goodput, and the time to the first token, by what arrives; a line for each server."""
    found = []
    for mix, loads in raw.items():
        if mix not in MIXES:
            continue
        lines = {
            f"{role} on {backend}": each["open"]
            for role in (OURS, STOCK)
            for backend, each in loads.get(role, {}).items()
        }
        for title, value in (
            ("good answers a second", lambda each: each["good"]),
            ("s to the first token, 99th percentile", lambda each: each["first"].get("p99")),
        ):
            series = {
                name: [(each["rate"], value(each)) for each in opened if value(each) is not None]
                for name, opened in lines.items()
            }
            found.append(Curve(MIXES[mix].words, "requests a second that arrive", title, series))
    return found
