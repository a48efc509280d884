"""What a benchmark keeps: rows that can be reproduced, as a table and as JSON.

Every row holds its baseline, measured in the same run, and the physical floor where there is one. A file of rows holds
the machine, the versions, the commit and the command.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sglang_ext.launch.bench._code import code_hash
from sglang_ext.types import Json, JsonObject

FEW = 5
"""Samples from which a spread is shown."""

UNITS = {"ms": 1e3, "MiB": 2.0**-20, "%": 100.0, "share": 1.0, "perplexity": 1.0, "a second": 1.0, "tokens": 1.0}
"""Unit of a row -> factor from seconds, from bytes, from shares."""

BARE = ("share", "perplexity")
"""Units that the row's name says already."""

PACKAGES = ("sglang", "flashinfer-python", "torch", "triton", "transformers")


@dataclass(frozen=True)
class Timing:
    """Times of one thing, measured several times.

    Attributes:
        median, low, high: seconds; low and high are the 10th and 90th percentile.
        samples: how many.
    """

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Timing:
        values = sorted(seconds)
        if not values:
            raise ValueError("no samples: a timing needs at least one")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), tenths[0], tenths[-1], len(values))


@dataclass(frozen=True)
class Figure:
    """One row.

    Attributes:
        name: what was measured.
        timing: ours; times, unless `unit` says otherwise.
        baseline: what it is compared with, or the empty string.
        baseline_timing: that, from the same run.
        ratio: how many times the baseline's time ours fits in (or the other way round, as `aim` reads).
        aim: what was aimed at, in words.
        met: whether the ratio meets it, from its 10th to its 90th percentile; None where nothing was aimed at.
        floor: seconds that bandwidth or arithmetic allow at best, or None.
        floor_of: what the floor is made of.
        notes: what else belongs to the row (lengths, concurrency, kept fractions).
        unit: how the table shows it, one of `UNITS`. Sizes (in bytes), shares and others stand where times do.
    """

    name: str
    timing: Timing
    baseline: str = ""
    baseline_timing: Timing | None = None
    ratio: float | None = None
    aim: str = ""
    met: bool | None = None
    floor: float | None = None
    floor_of: str = ""
    notes: JsonObject = field(default_factory=dict)
    unit: str = "ms"


@dataclass(frozen=True)
class Curve:
    """Lines that are plotted together.

    Attributes:
        title, x, y: what stands above and beside the axes.
        series: name -> points (x, y), in the order in which they are joined.
        doubling: whether the horizontal axis is logarithmic.
    """

    title: str
    x: str
    y: str
    series: dict[str, list[tuple[float, float]]]
    doubling: bool = False


def thousands(number: float) -> str:
    """Multiples of 1,024 as 4K, and of as many of these as 1M."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if number >= size and number % size == 0:
            return f"{number / size:g}{unit}"
    return f"{number:g}"


def at_least(name: str, ours: Timing, baseline: str, theirs: Timing, aim: float | None, **more: Json) -> Figure:
    """A row whose ratio is how many times faster than the baseline ours is."""
    ratio = Timing(theirs.median / ours.median, theirs.low / ours.high, theirs.high / ours.low, ours.samples)
    return _faster(name, ours, baseline, theirs, ratio, aim, **more)


def in_turns(
    name: str, ours: Sequence[float], baseline: str, theirs: Sequence[float], aim: float | None, **more: Json
) -> Figure:
    """`at_least` of times measured in turns: the ratio is the median of the pairs' ratios.

    Args:
        ours, theirs: seconds, [pairs]; ours[i] was measured beside theirs[i].

    The notes get the pairs' ratios (`paired`) and their 10th and 90th percentile (`spread`).

    Raises:
        ValueError: there are more of one than of the other.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{name}: got {len(ours)} times of ours and {len(theirs)} of {baseline}; expected pairs")
    paired = [other / own for own, other in zip(ours, theirs, strict=True)]
    ratio = Timing.of(paired)
    more["notes"] = {**more.get("notes", {}), "paired": paired, "spread": [ratio.low, ratio.high]}
    return _faster(name, Timing.of(ours), baseline, Timing.of(theirs), ratio, aim, **more)


def _faster(
    name: str, ours: Timing, baseline: str, theirs: Timing, ratio: Timing, aim: float | None, **more: Json
) -> Figure:
    text, met = ("", None) if aim is None else (f"at least {aim:.3g}x", ratio.low >= aim)
    return Figure(name, ours, baseline, theirs, ratio.median, text, met, **more)


def at_most(name: str, ours: Timing, floor: float, floor_of: str, aim: float | None, **more: Json) -> Figure:
    """A row whose ratio is how many times the floor ours takes."""
    ratio = ours.median / floor
    text, met = ("", None) if aim is None else (f"at most {aim:.3g}x", ours.high / floor <= aim)
    return Figure(name, ours, floor_of, None, ratio, text, met, floor=floor, floor_of=floor_of, **more)


def stock_engines(measured: JsonObject) -> list[JsonObject]:
    """What each engine of stock SGLang measured, with its `backend`; of one alone, or of several by their backends."""
    return [measured] if "backend" in measured else list(measured.values())


def fastest(times: Mapping[str, Sequence[float]]) -> tuple[str, Timing, JsonObject]:
    """The fastest of some engines of stock SGLang.

    Args:
        times: backend -> seconds.

    Returns:
        (its name, its seconds, median seconds of the others for the notes of a row).
    """
    found = {backend: Timing.of(seconds) for backend, seconds in times.items()}
    best = min(found, key=lambda backend: found[backend].median)
    others = {backend: timing.median for backend, timing in found.items() if backend != best}
    return f"stock SGLang on {best}", found[best], {"seconds of others": others} if others else {}


def stock_backends(parser: argparse.ArgumentParser) -> None:
    """The argument ``--stock-backend`` of a benchmark."""
    parser.add_argument(
        "--stock-backend",
        nargs="+",
        default=["fa3", "flashinfer"],
        metavar="NAME",
        help="attention backends of stock SGLang; each is measured, and a row has the fastest (default: fa3, which"
        " SGLang chooses on Hopper GPUs, and flashinfer)",
    )


SHAPE = "llama-3.1-8b"
"""The model that the aims of engines are of."""


def tensor_parallel(parser: argparse.ArgumentParser) -> None:
    """The argument ``--tp`` of a benchmark."""
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="GPUs of every engine, SGLang's --tp-size (default: 1)"
    )


def arguments_of_ranks(args: argparse.Namespace) -> JsonObject:
    """What `--engine` says, and `--tp`: more arguments of the engines."""
    given: JsonObject = args.engine
    return {"tp_size": args.tp, **given} if args.tp > 1 else given


def of_engines(figures: Sequence[Figure], args: argparse.Namespace) -> list[Figure]:
    """Rows of engines, whose names say what differs from the model and the GPU that the aims are of: they have none."""
    layers = vars(args).get("layers")
    words = [args.shape] if args.shape not in (SHAPE, "tiny") else []
    words += [f"{layers} layers"] if layers else []
    words += [f"on {args.tp} GPUs"] if args.tp > 1 else []
    if not words:
        return list(figures)

    def named(each: Figure) -> Figure:
        notes = {**each.notes, "shape": args.shape, "layers": layers, "tp": args.tp}
        return replace(each, name=", ".join([each.name, *words]), aim="", met=None, notes=notes)

    return [named(each) for each in figures]


def machine() -> JsonObject:
    """The GPU (or processor), its driver, and the versions of what does the work."""
    import torch

    found: JsonObject = {"python": platform.python_version(), "system": platform.platform()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "sms": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    else:
        found |= {"gpu": None, "processor": platform.processor() or platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str:
    """The checkout's commit, with ``-dirty`` where tracked files differ from it; "unknown" outside of one."""

    def git(*words: str) -> str:
        here = Path(__file__).resolve().parent
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def json_file(text: str) -> Path:
    """The argument ``--out`` of a benchmark: refused before hours are measured that could not be written.

    Raises:
        argparse.ArgumentTypeError: it is a folder, or in something that is none.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: expected a JSON file; name one in it")
    results_folder(str(path.parent))
    return path


def results_folder(text: str) -> Path:
    """The same of a benchmark that writes several files.

    Raises:
        argparse.ArgumentTypeError: it is a file, or in one.
    """
    path = Path(text)
    for each in (path, *path.parents):
        if each.exists() and not each.is_dir():
            raise argparse.ArgumentTypeError(f"{each} is a file: expected a folder, or the name of a new one")
    return path


PATHS = {"--data": "DATA", "--model": "FOLDER", "--heads": "HEADS", "--books": "BOOK"}
"""Arguments that are paths of the user's own, and what stands for each in records."""


def command_line(words: Sequence[str]) -> str:
    """The command, without where its results went and what they were called, and with no folder by its path.

    None of that changes a figure.
    """
    kept: list[str] = []
    option = ""  # that the words behind it belong to
    for word in words:
        name = word.split("=", 1)[0]
        if word.startswith("--"):
            option = "" if "=" in word else name
            if name in PATHS and "=" in word:
                word = f"{name}={PATHS[name]}"
            if name not in ("--out", "--commit"):
                kept.append(word)
        elif option not in ("--out", "--commit"):
            kept.append(PATHS.get(option, word))
    return "sglang-ext " + shlex.join(kept)


AND = " && "
"""What stands between the commands of several runs."""


def command_lines(before: Sequence[str]) -> str:
    """The commands of earlier runs that measured a part of a file, and that of this one, each once."""
    return AND.join(dict.fromkeys([*before, command_line(sys.argv[1:])]))


def save(path: Path, figures: Sequence[Figure], curves: Sequence[Curve] = (), **more: Json) -> None:
    """Write rows, curves, the machine, and the commit, the hash of the code and the command that made them."""
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": more.pop("commit", None) or commit(),
        "command": more.pop("command", None) or command_line(sys.argv[1:]),
        "code": code_hash(),
        "machine": machine(),
        **more,
        "figures": [asdict(figure) for figure in figures],
        **({"curves": [asdict(curve) for curve in curves]} if curves else {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def table(figures: Sequence[Figure]) -> str:
    """The rows as a Markdown table; times in milliseconds, other things in their units."""
    times = ", ms" if all(figure.unit == "ms" for figure in figures) else ""
    lines = [f"| what | ours{times} (p10 to p90) | baseline{times} | ratio | aim | met |"]
    lines.append("|---|---|---|---|---|---|")
    for figure in figures:
        factor, unit = UNITS[figure.unit], "" if times or figure.unit in BARE else f" {figure.unit}"
        spread = f"{figure.timing.low * factor:.4g}-{figure.timing.high * factor:.4g}"
        if figure.timing.samples < FEW:  # no percentiles of so few
            spread = f"{figure.timing.samples} run{'s' if figure.timing.samples > 1 else ''}"
        ours = f"{figure.timing.median * factor:.4g}{unit} ({spread})"
        if figure.baseline_timing is not None:
            theirs = f"{figure.baseline}: {figure.baseline_timing.median * factor:.4g}{unit}"
        elif figure.floor is not None:
            theirs = f"floor, {figure.floor_of}: {figure.floor * factor:.4g}{unit}"
        else:
            theirs = ""
        ratio = "" if figure.ratio is None else f"{figure.ratio:.4g}x"
        if len(figure.notes.get("paired", ())) >= FEW:
            low, high = figure.notes["spread"]
            ratio += f" ({low:.3g}-{high:.3g})"
        met = {True: "yes", False: "no", None: ""}[figure.met]
        lines.append(f"| {figure.name} | {ours} | {theirs} | {ratio} | {figure.aim} | {met} |")
    return "\n".join(lines)
