"""``sglang-ext bench report``: tables and plots from the results that benchmarks keep.

Reads the files that `_record.save` wrote into a folder and prints, for each, the machine, the commit and the command it
comes from, and its rows. ``--markdown README.md docs/RESULTS.md`` writes all documents that hold results, so that no
figure in them is typed by hand: the headlines (`_headlines`), the summaries on speed and on quality (`_summary`), and a
page for each file (`_pages`). ``--check`` says whether they are up to date.
``--plots`` draws each file's ratios beside their aims, and its curves.
Files of benchmarks with a layout of their own (``demo.json``, ``reference.json``) are left out, which stderr says.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.launch.bench._markdown import one_line, render
from sglang_ext.launch.bench._pages import SECTIONS, Document, documents
from sglang_ext.launch.bench._record import Curve, Figure, thousands
from sglang_ext.launch.bench._results_files import Results, read_folder
from sglang_ext.launch.bench._summary import PAGES
from sglang_ext.types import Options

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

RESULTS = Path(__file__).resolve().parent / "results"
AIM = re.compile(r"at (?:least|most) (\d+(?:\.\d+)?(?:e[+-]?\d+)?)x")  # as _record.at_least and at_most write it
OUTDATED = 1  # the exit status of --check

# Okabe and Ito's palette: blue, vermilion and grey differ in hue and lightness for every kind of colour vision.
COLOURS: dict[bool | None, tuple[str, str]] = {
    True: ("#0072B2", "aim met"),
    False: ("#D55E00", "aim not met"),
    None: ("#BBBBBB", "no aim"),
}
# Of curves: the rest of the palette, solid lines before dashed ones.
STYLES: list[Options] = [
    {"color": colour, "linestyle": line, "marker": marker}
    for line, marker in (("-", "o"), ("--", "s"))
    for colour in ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
]
# Inches, except for the points of letters.
FONT, LINE, GAP, WIDTH, LABEL_COLUMNS = 9, 0.165, 0.14, 5.0, 64
APART = 0.06
"""Height between the names of two lines, of the axes' height."""
# From this quotient of the largest to the smallest value on, a linear axis would hide the small ones: of bars, whose
# lengths are compared, and of lines, whose shapes are.
WIDE, SPREAD = 10.0, 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FOLDER", help="JSON files (default: launch/bench/results)"
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="replace the sections of documents, which are between such lines: "
        + "; ".join(f"{begin} and {end}" for begin, end in SECTIONS)
        + f"; with a section on speed or quality, also write a page for each results file into the folder {PAGES} "
        "beside the document",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"with --markdown: change nothing; exit {OUTDATED} when a document or a page would change",
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write a PNG for each results file into it")


def main(args: argparse.Namespace) -> int:
    _refuse_check(args)
    results, others = read_folder(args.results)
    for path, bench in others.items():
        print(f"left out: {path} (layout of bench {bench}, which has no figures)", file=sys.stderr)
    # Before anything is written, as it may refuse.
    found = [each for path in args.markdown or () for each in documents(path, results)]
    if args.check:
        return _check(args, found)
    if args.plots is not None:
        for path in plot(results, args.plots):
            print(f"written: {path}", file=sys.stderr)
    if args.markdown is None:
        print(render(results))
    _write(args, found)
    return 0


def _refuse_check(args: argparse.Namespace) -> None:
    if args.check and args.markdown is None:
        raise ValueError("--check was given without --markdown: name the files to check, --markdown FILE")
    if args.check and args.plots is not None:
        raise ValueError("--check changes nothing and --plots writes files: give one of them")


def _write(args: argparse.Namespace, found: Sequence[Document]) -> None:
    for each in _outdated(args, found):
        each.write()
        print(f"written: {each.path}")


def _outdated(args: argparse.Namespace, found: Sequence[Document]) -> list[Document]:
    """The documents that differ from their files; says so where there is none."""
    outdated = [each for each in found if not each.current]
    if found and not outdated:
        print(f"up to date: {' '.join(map(str, args.markdown))}")
    return outdated


def _check(args: argparse.Namespace, found: Sequence[Document]) -> int:
    outdated = _outdated(args, found)
    for each in outdated:
        print(f"{each.path} differs from the results in {args.results}", file=sys.stderr)
    if outdated:
        words = [] if args.results == RESULTS else ["--results", str(args.results)]
        words += ["--markdown", *map(str, args.markdown)]
        print(f"update: {shlex.join(['sglang-ext', 'bench', 'report', *words])}", file=sys.stderr)
    return OUTDATED if outdated else 0


# -- plots --------------------------------------------------------------------------------------------------------


def plot(results: Sequence[Results], folder: Path) -> list[Path]:
    """Write a PNG for each results file, named like it, and one for each of its curves, numbered; their paths.

    Args:
        results: of files.
        folder: made when missing.

    Raises:
        ValueError: matplotlib is not installed.
    """
    drawings = [(folder / f"{each.path.stem}.png", draw(each)) for each in results]
    drawings += [
        (folder / f"{each.path.stem}-{number}.png", draw_curve(each, curve))
        for each in results
        for number, curve in enumerate(each.curves, 1)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for path, drawing in drawings:
        drawing.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.15)
    return [path for path, _ in drawings]


def draw(results: Results) -> Drawing:
    """Horizontal bars of the rows' ratios, top to bottom in the file's order, the aims as marks on the bars' lines.

    Raises:
        ValueError: matplotlib is not installed.
    """
    drawing_class = _matplotlib()
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    labels = [_label(figure) for figure in results.figures]
    # The vertical axis is in inches, so that a row is as high as its label.
    heights = [max(2, label.count("\n") + 1) * LINE + GAP for label in labels]
    total = sum(heights) or LINE
    drawing = drawing_class(figsize=(WIDTH, total))
    axes = drawing.add_axes((0.0, 0.0, 1.0, 1.0))
    aims = [_aim(figure) for figure in results.figures]
    left, right = _limits(axes, [value for value in (*(f.ratio for f in results.figures), *aims) if value is not None])
    bottom = total
    for figure, label, height, aim in zip(results.figures, labels, heights, aims, strict=True):
        bottom -= height
        middle = bottom + height / 2
        if figure.ratio is not None:
            axes.barh(middle, figure.ratio - left, left=left, height=1.4 * LINE, color=COLOURS[figure.met][0])
        if aim is not None:
            axes.plot([aim], [middle], **_mark())
        beside: Options = {
            "va": "center",
            "fontsize": FONT,
            "parse_math": False,
            "transform": axes.get_yaxis_transform(),
        }
        axes.text(-0.02, middle, label, ha="right", **beside)
        axes.text(1.02, middle, _value(figure), ha="left", **beside)
    axes.set_xlim(left, right)
    axes.set_ylim(0, total)
    axes.set_yticks([])
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
    axes.tick_params(axis="x", labelsize=FONT)
    scale = ", log scale" if axes.get_xscale() == "log" else ""
    axes.set_xlabel(f"ratio{scale}; 1: equal to the baseline, or at the floor", fontsize=FONT)
    title = f"{results.device}, commit {results.short_commit}"
    below = f"{results.path.stem}, {results.date.isoformat()}"
    axes.set_title(f"{textwrap.fill(title, 70)}\n{textwrap.fill(below, 70)}", fontsize=FONT + 1, parse_math=False)
    used = {figure.met for figure in results.figures}
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=words) for met, (colour, words) in COLOURS.items() if met in used
    ]
    if any(aim is not None for aim in aims):
        handles.append(Line2D([], [], linestyle="none", label="aim", **_mark()))
    if handles:
        anchor = (0.5, -0.5 / total)  # half an inch below the axis: its numbers and its name are in between
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=anchor, ncols=4, frameon=False, fontsize=FONT)
    return drawing


def draw_curve(results: Results, curve: Curve) -> Drawing:
    """Lines of a results file in one pair of axes.

    Raises:
        ValueError: matplotlib is not installed.
    """
    drawing = _matplotlib()(figsize=(WIDTH, 0.7 * WIDTH))
    axes = drawing.add_axes((0.0, 0.0, 1.0, 1.0))
    covered = len(curve.series)
    for (name, points), style in zip(curve.series.items(), itertools.cycle(STYLES)):
        covered -= 1  # a line is wider than those that cover it
        axes.plot(
            *zip(*points, strict=True), label=name, linewidth=1.4 + 0.5 * covered, markersize=4 + 0.6 * covered, **style
        )
    if curve.doubling:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in curve.series.values() for x, _ in points})
        axes.set_xticks(ticks, [thousands(x) for x in ticks])
        axes.minorticks_off()
    heights = [y for points in curve.series.values() for _, y in points]
    if 0 < SPREAD * min(heights) < max(heights):  # or one line flattens all others
        axes.set_yscale("log")
    axes.tick_params(labelsize=FONT)
    axes.set_xlabel(curve.x, fontsize=FONT)
    axes.set_ylabel(curve.y, fontsize=FONT)
    below = f"{results.device}, commit {results.short_commit}"
    title = f"{textwrap.fill(curve.title, 70)}\n{textwrap.fill(below, 70)}"
    axes.set_title(title, fontsize=FONT + 1, parse_math=False)
    _name_lines(axes)
    return drawing


def _name_lines(axes: Axes) -> None:
    """Write each line's name to the right of the axes, as near to the height of its end as its neighbours allow."""
    axes.autoscale_view()  # else the heights below would be those of axes from 0 to 1
    height = lambda line: float(axes.transLimits.transform(axes.transScale.transform(line.get_xydata()[-1]))[1])  # noqa: E731
    lines = sorted(axes.get_lines(), key=height)
    heights = list[float]()
    for line in lines:
        heights.append(max(height(line), heights[-1] + APART) if heights else height(line))
    for number in reversed(range(len(lines))):  # what stands too high goes down, and what is below it, too
        above = heights[number + 1] - APART if number + 1 < len(lines) else 1.0
        heights[number] = min(heights[number], above)
    for line, at in zip(lines, heights, strict=True):
        name, color = str(line.get_label()), line.get_color()
        axes.scatter([1.03], [at], s=16, color=color, marker=line.get_marker(), transform=axes.transAxes, clip_on=False)
        axes.text(1.06, at, name, color=color, va="center", fontsize=FONT, parse_math=False, transform=axes.transAxes)


def _matplotlib() -> type[Drawing]:
    """The class of drawings. Not pyplot: it keeps drawings and may look for a display.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as Drawing
    except ImportError as error:
        message = (
            "got --plots without matplotlib, expected it: install the bench extra, pip install 'sglang-ext[bench]'"
        )
        raise ValueError(message) from error
    return Drawing


def _mark() -> Options:
    return {"marker": "D", "markersize": 6, "color": "black", "markeredgecolor": "white"}


def _limits(axes: Axes, values: Sequence[float]) -> tuple[float, float]:
    """The ends of the horizontal axis; sets a logarithmic one where the values need it."""
    smallest, largest = min([1.0, *values]), max([1.0, *values])
    if largest / smallest < WIDE:
        return 0.0, 1.08 * largest
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if largest / smallest < 1e3 else (1,)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    return smallest / 2, 1.25 * largest


def _label(figure: Figure) -> str:
    """What a row is and what it is compared with: several rows may have one name and different baselines."""
    if figure.baseline_timing is not None:
        against = f"against {figure.baseline}"
    else:
        against = "" if figure.floor is None else f"floor: {figure.floor_of}"
    parts = [textwrap.fill(one_line(text), LABEL_COLUMNS) for text in (figure.name, against)]
    return "\n".join(part for part in parts if part)


def _value(figure: Figure) -> str:
    ratio = "no ratio" if figure.ratio is None else f"{figure.ratio:.3g}x"
    return f"{ratio} (aim: {one_line(figure.aim)})" if figure.aim else ratio


def _aim(figure: Figure) -> float | None:
    """Where the mark goes. An aim in other words has no place on the axis; its words stand beside the bar."""
    found = AIM.fullmatch(figure.aim)
    return None if found is None else float(found[1])
