"""Rows and curves of the quality studies, from their measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from sglang_ext.launch.bench._quality_engine import Method
from sglang_ext.launch.bench._record import Curve, Figure, Timing
from sglang_ext.types import JsonObject, Options

Z = 1.2816  # 80% of a normal distribution lie within so many standard deviations
POINT = 0.01
BASELINE = {"double_p": "dense", "cascade": "streaming_llm", "ltri": "infllm"}


def share(scores: Sequence[float]) -> Timing:
    """A mean of scores from 0 to 1, and the ends of its central 80%."""
    mean, error = mean_and_error(scores)
    return Timing(mean, max(0.0, mean - Z * error), min(1.0, mean + Z * error), len(scores))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; of one value the error is 0."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), spread / math.sqrt(len(values))


def selects(method: Method) -> bool:
    """Whether it is a cascade with token selection: what is to beat StreamingLLM."""
    return bool(method.policy.get("selection"))


def figures(settings: Options, methods: Mapping[str, Method], measured: Sequence[JsonObject]) -> list[Figure]:
    """A row for each method and task beside the suite's baseline, tasks in the order in which they were measured."""
    rows: list[Figure] = []
    baseline = BASELINE[settings["suite"]]
    for task in dict.fromkeys(each["task"] for each in measured):
        found = {each["method"]: each for each in measured if each["task"] == task}
        for name in (name for name in methods if name in found and (name != baseline or len(found) == 1)):
            theirs = found.get(baseline) if name != baseline else None
            make = _perplexities if "perplexity" in found[name] else _answers
            rows += make(settings, name, methods, found[name], theirs)
    return rows


def _answers(
    settings: Options,
    name: str,
    methods: Mapping[str, Method],
    mine: JsonObject,
    theirs: JsonObject | None,
) -> list[Figure]:
    """Shares of answers, or of a passkey's digits, that are right."""
    notes: JsonObject = {"prompts": len(mine["scores"]), "all_right": mine["accuracy"], "options": mine["options"]}
    words = "digits right" if mine["digits"] is not None else "answers right"
    title = f"{mine['task']}, {methods[name].title}: {words}"
    if mine["attention"]:
        read = mine["attention"]
        title += f"; kept {read['kept']:.3f}, exact {read['exact']:.3f}, recovered {read['recovered']:.3f}"
        notes |= {"attention": read, "target": mine["target"]}
    ours = share(mine["scores"])
    if theirs is None:
        return [Figure(title, ours, unit="share", notes=notes)]
    difference, error = mean_and_error([a - b for a, b in zip(mine["scores"], theirs["scores"], strict=True)])
    notes |= {"difference": difference, "difference_error": error}
    if error:  # of the same prompts: smaller than what the two shares' own spreads let expect
        title += f"; {100 * difference:+.1f} points, standard error {100 * error:.1f}"
    aim, met = "", None
    if name in ("double_p", "double_p-kernels"):
        aim, met = "at most 1 point below dense", difference >= -POINT
    elif selects(methods[name]) and mine["tokens"] > settings["window"]:
        aim, met = "above StreamingLLM", difference > 0
    before = share(theirs["scores"])
    ratio = ours.median / before.median if before.median and ours.median else None
    baseline = methods[BASELINE[settings["suite"]]].title
    return [Figure(title, ours, baseline, before, ratio, aim, met, unit="share", notes=notes)]


def _perplexities(
    settings: Options,
    name: str,
    methods: Mapping[str, Method],
    mine: JsonObject,
    theirs: JsonObject | None,
) -> list[Figure]:
    """Perplexity of all tokens and of the labels; spreads are over the parts of the stream."""
    rows = []
    for kind, value in mine["perplexity"].items():
        title = f"{mine['task']}, {methods[name].title}: perplexity of {'all tokens' if kind == 'all' else kind}"
        ours = _spread(value, mine["bins"][kind])
        if theirs is None:
            rows.append(Figure(title, ours, unit="perplexity"))
            continue
        before = _spread(theirs["perplexity"][kind], theirs["bins"][kind])
        aim, met = "", None
        if selects(methods[name]):
            aim, met = "below StreamingLLM", value < before.median
        baseline = methods[BASELINE[settings["suite"]]].title
        ratio = before.median / value
        rows.append(Figure(title, ours, baseline, before, ratio, aim, met, unit="perplexity"))
    return rows


def _spread(value: float, bins: Sequence[float]) -> Timing:
    of_bins = Timing.of(bins)
    return Timing(value, of_bins.low, of_bins.high, of_bins.samples)


def curves(settings: Options, methods: Mapping[str, Method], measured: Sequence[JsonObject]) -> list[Curve]:
    """What is plotted: right answers and what was read against the length of the row, perplexity along a stream."""

    def lines(figure: Callable[[JsonObject], float | None], begins: str) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for name in methods:
            points = [
                (float(each["tokens"]), float(value))
                for each in measured
                if each["method"] == name and each["task"].startswith(begins)
                if (value := figure(each)) is not None
            ]
            if points:
                found[methods[name].title] = sorted(points)
        return found

    drawn = [
        Curve("Passkey", "tokens", "share of digits right", lines(lambda each: each.get("digits"), "passkey"), True),
        Curve(
            "banking77, 77 classes", "tokens", "accuracy", lines(lambda each: each.get("accuracy"), "banking77"), True
        ),
    ]
    for task in ("passkey", "banking77"):
        read = lines(lambda each: (each.get("attention") or {}).get("kept"), task)
        drawn.append(Curve(f"{task}: tokens kept", "tokens", "share", read, True))
    for kind in ("labels", "all"):
        series: dict[str, list[tuple[float, float]]] = {}
        for each in measured:
            if "bins" in each:
                bins = each["bins"][kind]
                ends = [float(each["bin"] * (at + 1)) for at in range(len(bins))]
                series[methods[each["method"]].title] = list(zip(ends, bins, strict=True))
        words = "perplexity of labels" if kind == "labels" else "perplexity of all tokens"
        drawn.append(Curve("Stream of demonstrations", "tokens read", words, series))
    return [curve for curve in drawn if curve.series]
