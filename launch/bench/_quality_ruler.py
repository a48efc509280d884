"""The study `--suite ruler`: its methods, what is aimed at, and its rows and curves.

It stands for Tables 2 and 3 of Double-P's paper and Table 3 of Ltri-LLM's, over RULER's tasks as `_ruler` makes them.
Quest, RetroInfer and Twilight read as much as Double-P did on the same task; StreamingLLM, cascades, InfLLM's index and
Ltri-LLM see as many tokens as each other. What dense attention cannot answer says nothing about the others: then the
row says so, and has no aim.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence

from sglang_ext.launch.bench._quality_book import book_methods
from sglang_ext.launch.bench._quality_engine import Method, double_p_methods
from sglang_ext.launch.bench._quality_figures import (
    Z,
    above_streaming_llm,
    differences,
    mean_and_error,
    near_dense,
    selects,
    wilson,
)
from sglang_ext.launch.bench._record import Curve, Figure, Timing
from sglang_ext.launch.bench._ruler import KINDS
from sglang_ext.types import JsonObject, Options

DENSE = "dense"
LEAST = 0.25
"""The share of the expected answers that dense attention is to find, so that a row counts."""
BEST = ("ltri-max", "ltri-ruler")
"""The Ltri-LLM that aims hold for."""
PLOTTED = ("dense", "double_p", "double_p-kernels", "streaming_llm", "cascade-4", "ltri-max")
LENGTHS = (4096, 8192)
"""Of rows, where the command does not say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that `--suite ruler` has for itself."""
    known = list(KINDS)
    parser.add_argument("--tasks", nargs="+", choices=known, default=known, help="of ruler (default: all)")


def ruler_methods(window: int, stride: int, sinks: int, context: int, heads: str | None) -> dict[str, Method]:
    """All methods of `--suite double_p`, and those of `--suite book` but its dense attention, which reads in pieces.

    Beside them Ltri-LLM with the spans and index vectors that its paper takes for RULER.
    """
    found = {**double_p_methods()}
    for name, each in book_methods(window, stride, sinks, context, heads).items():
        found.setdefault(name, each)
    if "ltri-max" in found:
        policy = {**found["ltri-max"].policy, "spans": 6, "vectors": 24, "queries": 24, "phi": 0.01}
        found["ltri-ruler"] = Method("Ltri-LLM, max, 6 spans of 24 vectors", "ltri", policy)
    return found


def fails(dense: JsonObject) -> str:
    """Why a task says nothing about a model, in words: what dense attention finds of it; empty where it does."""
    low, _ = wilson(sum(dense["scores"]), len(dense["scores"]))
    if dense["found"] < LEAST:
        return f"dense fails: below {LEAST:.2f}"
    return f"dense fails: not clearly above chance, {dense['chance']:.2f}" if low <= dense["chance"] else ""


def figures(settings: Options, methods: Mapping[str, Method], measured: Sequence[JsonObject]) -> list[Figure]:
    """A row for each method and task beside dense attention, tasks in the order in which they were measured."""
    rows = []
    for task in dict.fromkeys(each["task"] for each in measured):
        found = {each["method"]: each for each in measured if each["task"] == task}
        rows += [_row(settings, name, methods, found) for name in methods if name in found]
    return rows


def _row(settings: Options, name: str, methods: Mapping[str, Method], found: Mapping[str, JsonObject]) -> Figure:
    """The share of expected answers that are found; the table's spread is Wilson's interval of 80%.

    Wilson's intervals are over prompts, of which one that has a part of its answers right counts as a part: they are
    too wide then, and not too narrow, for no share from 0 to 1 spreads more than one that is 0 or 1.
    """
    mine, dense = found[name], found.get(DENSE)
    scores = mine["scores"]
    low, high = wilson(sum(scores), len(scores))
    title = (
        f"{mine['task']}, {methods[name].title}: answers found; 95% {low:.2f} to {high:.2f} of {len(scores)} prompts"
    )
    notes: JsonObject = {
        "prompts": len(scores),
        "interval": [low, high],
        "all_found": sum(mine["exact"]),
        "chance": mine["chance"],
        "options": mine["options"],
    }
    if mine["attention"]:
        read = mine["attention"]
        title += f"; kept {read['kept']:.3f}, exact {read['exact']:.3f}, recovered {read['recovered']:.3f}"
        notes |= {"attention": read, "target": mine["target"]}
    why = fails(dense) if dense else ""
    said = f"; {why}" if why else ""
    if dense is None or name == DENSE:
        return Figure(title + said, _share(scores), unit="share", notes=notes)
    difference, error = mean_and_error(differences(mine, dense))
    notes |= {"difference": difference, "difference_error": error}
    title += f"; {100 * difference:+.1f} points, standard error {100 * error:.1f}{said}"
    words, met = ("", None) if why else _aim(settings, name, methods[name], found, difference, error)
    ratio = mine["found"] / dense["found"] if mine["found"] and dense["found"] else None
    before = _share(dense["scores"])
    return Figure(title, _share(scores), methods[DENSE].title, before, ratio, words, met, unit="share", notes=notes)


def _share(scores: Sequence[float]) -> Timing:
    low, high = wilson(sum(scores), len(scores), Z)
    return Timing(statistics.fmean(scores), low, high, len(scores))


def _aim(
    settings: Options, name: str, method: Method, found: Mapping[str, JsonObject], difference: float, error: float
) -> tuple[str, bool | None]:
    """What is aimed at, in words, and whether it is met, where dense attention can answer.

    Args:
        difference: of the method's share from dense attention's.
        error: the standard error of that.
    """
    if name in ("double_p", "double_p-kernels"):
        return near_dense(difference, error, found[name]["attention"])
    other = found.get("streaming_llm")
    if other and (selects(method) or name in BEST) and found[name]["tokens"] > settings["window"]:
        return above_streaming_llm(differences(found[name], other))
    return "", None


def curves(methods: Mapping[str, Method], measured: Sequence[JsonObject]) -> list[Curve]:
    """Answers found against the length of the row, a plot for each task."""
    drawn: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for each in sorted(measured, key=lambda each: int(each["tokens"])):
        if each["method"] in PLOTTED:
            lines = drawn.setdefault(each["task"].rpartition(", ")[0], {})
            lines.setdefault(each["method"], []).append((float(each["tokens"]), float(each["found"])))
    return [
        Curve(
            title[0].upper() + title[1:],
            "tokens",
            "share of answers found",
            {methods[name].title: lines[name] for name in PLOTTED if name in lines},
            True,
        )
        for title, lines in drawn.items()
    ]
