"""Rows and curves of the quality studies, from their measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from sglang_ext.launch.bench import _quality_book
from sglang_ext.launch.bench._quality_engine import Method
from sglang_ext.launch.bench._quality_ltri import PLOTS, RECALLED, RETRIEVED, aim, kind_of
from sglang_ext.launch.bench._quality_tasks import BLOCK, DIGITS, HIDDEN, block_of
from sglang_ext.launch.bench._record import Curve, Figure, Timing
from sglang_ext.types import JsonObject, Options

Z = 1.2816  # 80% of a normal distribution lie within so many standard deviations
WIDE_Z = 1.96  # and 95% within so many
POINT = 0.01
MOST_KEPT = 0.5
"""A row that reads so much of the tokens says little about reading fewer."""
SHOWN: dict[str, tuple[str, ...]] = {
    "": (
        "dense", "streaming_llm", "cascade-2", "cascade-4", "cascade-8", "cascade-4-unselected",
        "double_p", "double_p-kernels", "retroinfer", "quest", "twilight",
    ),
    "selection": ("dense-window", "cascade-2", "cascade-2-unselected", "cascade-8", "cascade-8-unselected"),
    "how many": ("streaming_llm", "cascade-2", "cascade-4", "cascade-8", "cascade-12"),
    "how heads decide": ("streaming_llm", "cascade-4", "cascade-4-together", "cascade-4-max"),
    "what is scored": ("streaming_llm", "cascade-4", "cascade-4-every-2", "cascade-4-every-4", "cascade-4-every-8"),
    "as many exact": ("double_p", "retroinfer", "quest-exact", "twilight-exact"),
    "settings of Double-P": (
        "dense", "double_p", "double_p-kernels", "double_p-tail", "double_p-wide", "double_p-exact",
    ),
}  # fmt: skip
"""`plots` of the suites cascade and double_p, neither of which has more than six of a plot's methods."""
BASELINE = {"double_p": "dense", "cascade": "streaming_llm", "ltri": "infllm", "book": "streaming_llm"}


def share(scores: Sequence[float]) -> Timing:
    """A mean of scores from 0 to 1, and the ends of its central 80%."""
    mean, error = mean_and_error(scores)
    return Timing(mean, max(0.0, mean - Z * error), min(1.0, mean + Z * error), len(scores))


def differences(mine: JsonObject, theirs: JsonObject, of: str = "scores") -> list[float]:
    """Of two methods' scores for the same prompts, or of what `of` names."""
    return [a - b for a, b in zip(mine[of], theirs[of], strict=True)]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; of one value the error is 0."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), spread / math.sqrt(len(values))


def near_dense(difference: float, error: float, attention: JsonObject | None) -> tuple[str, bool | None]:
    """(the aim of a sparse method beside dense attention, whether it is met); no aim where it reads most tokens.

    Args:
        difference: of its share of right answers from dense attention's, over the same prompts.
        error: the standard error of that.
        attention: what it read (`kept`), where that is known.
    """
    if attention and attention["kept"] >= MOST_KEPT:
        return "", None
    return "95% interval at most 1 point below dense", difference - WIDE_Z * error >= -POINT


def above_streaming_llm(differences: Sequence[float]) -> tuple[str, bool | None]:
    """(the aim of what is to beat StreamingLLM, whether it is met): with the whole 95% interval of the mean.

    Args:
        differences: of the method's scores from StreamingLLM's, for the same prompts; of one there is no interval, and
            no aim.
    """
    if len(differences) < 2:
        return "", None
    difference, error = mean_and_error(differences)
    return "95% interval above StreamingLLM", difference - WIDE_Z * error > 0


def _below_streaming_llm(mine: Sequence[float], theirs: Sequence[float]) -> tuple[str, bool | None]:
    """The same of perplexities, whose logarithms are compared part by part of a stream."""
    logarithms = [math.log(other / ours) for ours, other in zip(mine, theirs, strict=True)]
    aim, met = above_streaming_llm(logarithms)
    return "95% interval below StreamingLLM" if aim else "", met


def wilson(right: float, count: int, z: float = WIDE_Z) -> tuple[float, float]:
    """The ends of Wilson's interval (1927) for the share of `count` answers of which `right` are right.

    Args:
        right: an answer that is right in part counts as a part.
        z: standard deviations of a normal distribution; by default 95% lie within them.

    Raises:
        ValueError: there are no answers, or more right ones than answers.
    """
    if not 0 <= right <= count or not count:
        raise ValueError(f"{right} of {count} answers right: expected some answers, and no more right ones")
    part = right / count
    middle, spread = part + z * z / (2 * count), z * math.sqrt(part * (1 - part) / count + z * z / (4 * count**2))
    low, high = ((middle + sign * spread) / (1 + z * z / count) for sign in (-1, 1))
    return low if right else 0.0, high if right < count else 1.0  # rounding would leave what is exact


def selects(method: Method) -> bool:
    """Whether it is a cascade with token selection: what is to beat StreamingLLM."""
    return bool(method.policy.get("selection"))


def figures(settings: Options, methods: Mapping[str, Method], measured: Sequence[JsonObject]) -> list[Figure]:
    """A row for each method and task beside the suite's baseline, tasks in the order in which they were measured."""
    rows: list[Figure] = []
    baseline = BASELINE[settings["suite"]]
    for task in dict.fromkeys(each["task"] for each in measured):
        found = {each["method"]: each for each in measured if each["task"] == task}
        if settings["suite"] == "ltri":
            rows += [_keys(settings, name, methods, found) for name in methods if name in found]
            continue
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
    difference, error = mean_and_error(differences(mine, theirs))
    notes |= {"difference": difference, "difference_error": error}
    if error:  # of the same prompts: smaller than what the two shares' own spreads let expect
        title += f"; {100 * difference:+.1f} points, standard error {100 * error:.1f}"
    aim, met = "", None
    if name in ("double_p", "double_p-kernels"):
        aim, met = near_dense(difference, error, mine["attention"])
    elif selects(methods[name]) and mine["tokens"] > settings["window"]:
        aim, met = above_streaming_llm(differences(mine, theirs))
    before = share(theirs["scores"])
    ratio = ours.median / before.median if before.median and ours.median else None
    baseline = methods[BASELINE[settings["suite"]]].title
    return [Figure(title, ours, baseline, before, ratio, aim, met, unit="share", notes=notes)]


def _keys(settings: Options, name: str, methods: Mapping[str, Method], found: Mapping[str, JsonObject]) -> Figure:
    """The share of keys that are right, beside the suite's baseline; the table's spread is Wilson's interval of 80%."""
    mine, baseline = found[name], BASELINE[settings["suite"]]
    intervals = {method: wilson(sum(each["exact"]), len(each["exact"])) for method, each in found.items()}
    exact, (low, high) = mine["exact"], intervals[name]
    title = (
        f"{mine['task']}, {methods[name].title}: keys right; {sum(exact)} of {len(exact)}, 95% {low:.2f} to {high:.2f}"
    )
    behind = [right for right, place in zip(exact, mine["places"], strict=True) if _behind(settings, mine, place)]
    notes: JsonObject = {
        "prompts": len(exact),
        "right": sum(exact),
        "interval": [low, high],
        "behind_window": {"prompts": len(behind), "right": sum(behind)},
        "by_depth": _by_depth(mine),
        **({"recall": mine["recall"]} if mine.get("recall") else {}),
    }
    words, met = aim(name, found, intervals) if block_of(settings) == BLOCK else ("", None)
    if name == baseline or baseline not in found:
        return Figure(title, _of_wilson(exact), aim=words, met=met, unit="share", notes=notes)
    theirs = found[baseline]
    difference, error = mean_and_error(differences(mine, theirs, "exact"))
    notes |= {"difference": difference, "difference_error": error}
    ratio = mine["accuracy"] / theirs["accuracy"] if mine["accuracy"] and theirs["accuracy"] else None
    before = _of_wilson(theirs["exact"])
    return Figure(
        title, _of_wilson(exact), methods[baseline].title, before, ratio, words, met, unit="share", notes=notes
    )


def _of_wilson(exact: Sequence[int]) -> Timing:
    low, high = wilson(sum(exact), len(exact), Z)
    return Timing(sum(exact) / len(exact), low, high, len(exact))


def _behind(settings: Options, measured: JsonObject, place: Sequence[int]) -> bool:
    """Whether no method sees the evidence where its prompt ends, without retrieving it."""
    # StreamingLLM's window, which lies before the last stride.
    seen = settings["window"] + block_of(settings) * RETRIEVED
    stride = measured["tokens"] // settings["stride"] * settings["stride"]
    return bool(settings["sinks"] <= place[0] and place[1] <= stride - seen)


def _by_depth(measured: JsonObject) -> list[list[float]]:
    """(depth, share of keys right) of each tenth in which there are keys."""
    tenths: dict[int, list[int]] = {}
    for tenth, right in zip(measured["cells"], measured["exact"], strict=True):
        tenths.setdefault(tenth, []).append(right)
    return [[(tenth + 0.5) / 10, statistics.fmean(tenths[tenth])] for tenth in sorted(tenths)]


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
        if selects(methods[name]) and settings["suite"] == "book":
            aim, met = _quality_book.aim(mine, theirs)
        elif selects(methods[name]):
            aim, met = _below_streaming_llm(mine["bins"][kind], theirs["bins"][kind])
        baseline = methods[BASELINE[settings["suite"]]].title
        ratio = before.median / value
        rows.append(Figure(title, ours, baseline, before, ratio, aim, met, unit="perplexity"))
    return rows


def _spread(value: float, bins: Sequence[float]) -> Timing:
    of_bins = Timing.of(bins)
    return Timing(value, of_bins.low, of_bins.high, of_bins.samples)


def curves(settings: Options, methods: Mapping[str, Method], measured: Sequence[JsonObject]) -> list[Curve]:
    """What is plotted: right answers and what was read against the length of the row, perplexity along a stream."""
    if settings["suite"] == "ltri":
        return _key_curves(methods, measured)
    if settings["suite"] == "book":
        return _quality_book.curves(methods, measured)

    passkey = "Passkey among words" if settings.get("filler") == "words" else "Passkey"
    found = [
        *_by_length(methods, measured, passkey, "share of digits right", "passkey", lambda each: each.get("digits")),
        *_by_length(
            methods, measured, "banking77, 77 classes", "accuracy", "banking77", lambda each: each.get("accuracy")
        ),
    ]
    for task in ("passkey", "banking77"):
        read = partial(_by_length, methods, measured, f"{task}: tokens kept", "share", task)
        found += read(lambda each: (each.get("attention") or {}).get("kept"))
    for kind in ("labels", "all"):
        series: dict[str, list[tuple[float, float]]] = {}
        for each in measured:
            if "bins" in each:
                bins = each["bins"][kind]
                ends = [float(each["bin"] * (at + 1)) for at in range(len(bins))]
                series[each["method"]] = list(zip(ends, bins, strict=True))
        words = "perplexity of labels" if kind == "labels" else "perplexity of all tokens"
        found += _plots(methods, Curve("Stream of demonstrations", "tokens read", words, series), SHOWN)
    return found


def _by_length(
    methods: Mapping[str, Method],
    measured: Sequence[JsonObject],
    title: str,
    y: str,
    begins: str,
    figure: Callable[[JsonObject], float | None],
) -> list[Curve]:
    """A figure of the tasks whose names begin so, against the length of their rows."""
    series: dict[str, list[tuple[float, float]]] = {}
    for each in sorted(measured, key=lambda each: int(each["tokens"])):
        value = figure(each) if each["task"].startswith(begins) else None
        if value is not None:
            length = each["tokens"] + (DIGITS if begins == "passkey" else 0)  # as the task is called
            series.setdefault(each["method"], []).append((float(length), float(value)))
    return _plots(methods, Curve(title, "tokens", y, series, True), SHOWN)


def _plots(methods: Mapping[str, Method], curve: Curve, plots: Mapping[str, Sequence[str]]) -> list[Curve]:
    """A curve whose lines are called by their methods, in plots of few lines.

    Args:
        plots: what a plot is about -> its methods. What another plot shows, too, is no plot of its own.
    """
    found = {
        about: {name: curve.series[name] for name in names if name in curve.series} for about, names in plots.items()
    }
    shown = {
        about: lines for about, lines in found.items() if not any(set(lines) < set(more) for more in found.values())
    }
    drawn: list[Curve] = []
    for about, lines in shown.items():
        series = {methods[name].title: points for name, points in lines.items()}
        if series and all(set(series) != set(other.series) for other in drawn):
            drawn.append(replace(curve, title=f"{curve.title}: {about}" if about else curve.title, series=series))
    return drawn


def _key_curves(methods: Mapping[str, Method], measured: Sequence[JsonObject]) -> list[Curve]:
    """Keys right against the length of the row, of a few methods at a time; and against depth, in the longest rows."""
    drawn = []
    for kind, hidden in HIDDEN.items():
        of_kind = [each for each in measured if kind_of(each["task"]) == kind]
        lines: dict[str, list[tuple[float, float]]] = {}
        for each in sorted(of_kind, key=lambda each: int(each["tokens"])):
            point = (float(each["tokens"] + DIGITS), float(each["accuracy"]))
            lines.setdefault(each["method"], []).append(point)
        title = hidden.title[0].upper() + hidden.title[1:]
        drawn += _plots(methods, Curve(title, "tokens", "share of keys right", lines, True), PLOTS)
        longest = max((each["tokens"] for each in of_kind), default=0)
        deep = {each["method"]: _by_depth(each) for each in of_kind if each["tokens"] == longest}
        series = {methods[name].title: [(x, y) for x, y in deep[name]] for name in PLOTS[""] if name in deep}
        if series:
            title = f"{hidden.title} in rows of {longest + DIGITS} tokens"
            drawn.append(Curve(title[0].upper() + title[1:], "depth of the key", "share of keys right", series))
        found = {each["method"]: each.get("recall") for each in of_kind if each["tokens"] == longest}
        series = {
            methods[name].title: [(float(layer), share) for layer, share in enumerate(layers["layers"])]
            for name in methods
            if name in RECALLED and (layers := found.get(name)) and layers["layers"]
        }
        if series:
            title = f"{hidden.title} in rows of {longest + DIGITS} tokens: evidence that layers get back"
            drawn.append(Curve(title[0].upper() + title[1:], "layer", "share of its blocks", series))
    return drawn
