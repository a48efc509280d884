"""``sglang-ext bench quality --suite dbsa``: right answers over real demonstrations, as in DBSA's Table 3 and Figure 1.

A *draw* is some classes of a set, a pool of their training texts that fills so many tokens, and test texts of these
classes. Every method answers the same questions over the same draw, constrained to the draw's labels, by the code of
`sglang-ext demo`; one server answers all. Means and intervals are over draws: answers of one draw depend on one pool.

Results are written after each method of a draw; a run that is cut short is taken up again where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.attention.choice import KERNELS_ENV
from sglang_ext.launch.bench._dbsa_methods import AIMED, BEYOND, GROUPS, METHODS, PLOTTED
from sglang_ext.launch.bench._draws import draw
from sglang_ext.launch.bench._quality_figures import WIDE_Z, mean_and_error, share
from sglang_ext.launch.bench._record import AND, Curve, Figure, Timing, command_lines, save, table
from sglang_ext.launch.bench.reference import MODEL
from sglang_ext.launch.demo_methods import Bench, MethodRow
from sglang_ext.launch.demo_server import Server, served
from sglang_ext.types import JsonObject, Options

if TYPE_CHECKING:
    from sglang_ext.names import Tokenizer

FEWER = 0.02
"""The share of DBSA's right answers may lie so much below that of the best other method."""
IN_CONTEXT = ("fixed", "example", "block", "dbsa-10", "dbsa-100", "dbsa-example")
"""Beside `AIMED`, all methods of its table that show demonstrations."""
SETTINGS = ("labels", "queries", "block_size", "concurrency", "seed", "kernels", "engine")
"""What a measurement depends on, beside its set, size, draw and method, and the model."""
SETS = ("banking77", "clinc150", "nlu", "trec_fine")
EMBEDDED = "the embedded one"
REQUESTS = (1, 10, 100, 1000, 10_000, 100_000)
"""Requests whose time is added up with the pool's setup."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that `--suite dbsa` has for itself."""
    parser.add_argument("--sets", nargs="+", default=list(SETS), metavar="NAME", help="folders of --data, dbsa")
    parser.add_argument(
        "--pool-tokens", type=int, nargs="+", default=[2000, 4000, 7000], metavar="N", help="of pools, dbsa"
    )
    parser.add_argument("--labels", type=int, default=16, help="classes of a draw, 0: all of a set, dbsa (default: 16)")
    parser.add_argument("--draws", type=int, default=10, help="of each set and size, dbsa (default: 10)")
    parser.add_argument("--block-size", type=int, default=10, help="demonstrations a block, dbsa (default: 10)")


class DrawStudy:
    """What is measured so far, and the file that keeps it.

    Raises:
        ValueError: an unknown method, or a file with results of other settings.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out or Path(__file__).resolve().parent / "results" / "quality_dbsa.json"
        asked = args.methods or ["main"]
        self.chosen = [name for each in asked for name in GROUPS.get(each, [each])]
        if unknown := set(self.chosen) - set(METHODS):
            known = ", ".join([*GROUPS, *METHODS])
            raise ValueError(f"--methods {' '.join(sorted(unknown))}: expected some of {known}")
        self.settings: JsonObject = {name: getattr(args, name) for name in SETTINGS}
        self.settings["model"] = EMBEDDED if Path(args.model) == MODEL else Path(args.model).name
        config = json.loads((Path(args.model) / "config.json").read_text())
        self.context: int = config["max_position_embeddings"]
        self.measured: list[JsonObject] = []
        self.commands: list[str] = []
        if self.out.exists() and not args.anew:
            record = json.loads(self.out.read_text())
            known = record.get("settings", {})
            if other := [name for name, value in self.settings.items() if known.get(name) != value]:
                raise ValueError(
                    f"{self.out} has results of other settings: {', '.join(f'{n}={known.get(n)}' for n in other)};"
                    f" expected {', '.join(f'{n}={self.settings[n]}' for n in other)}: measure --anew, or name another"
                    " --out"
                )
            self.measured, self.commands = record["measurements"], record["command"].split(AND)

    def run(self) -> None:
        """Measure what is missing."""
        from transformers import AutoTokenizer

        args, tokenizer = self.args, AutoTokenizer.from_pretrained(self.args.model)
        draws = [(each, self._missing(*each)) for each in product(args.sets, args.pool_tokens, range(args.draws))]
        if not any(methods for _, methods in draws):
            return
        # Room for the pool three times (by blocks, by examples, the dense prompt) and for every request's dense prompt.
        largest = max(args.pool_tokens)
        kv_tokens = max(32768, 3 * largest + args.concurrency * min(largest, self.context) + 8192)
        extra = [text for name, value in args.engine.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        os.environ[KERNELS_ENV] = args.kernels
        with served(args.model, kv_tokens, extra) as server:
            for (name, size, number), methods in draws:
                for method, row in self._rows(server, name, size, number, methods, tokenizer):
                    self.measured.append(_measurement(name, size, number, method, row))
                    self.save()
                    of_draw = f"{name}, {size} tokens, draw {number}"
                    print(f"{of_draw}, {METHODS[method].title}: {row.accuracy:.3f}", flush=True)

    def _missing(self, name: str, size: int, number: int) -> list[str]:
        """The methods of a draw that are not measured: those with a pool of their own last, equal shares together."""
        done = {(each["set"], each["size"], each["draw"], each["method"]) for each in self.measured}
        wanted = [method for method in self.chosen if (name, size, number, method) not in done]
        return sorted(wanted, key=lambda each: (bool(METHODS[each].pool), METHODS[each].ratio))

    def _rows(
        self, server: Server, name: str, size: int, number: int, methods: Sequence[str], tokenizer: Tokenizer
    ) -> Iterator[tuple[str, MethodRow]]:
        """Methods of a draw, one after the other."""
        if not methods:
            return
        args, bench, made = self.args, None, None
        task = draw(name, size, number, args, tokenizer)
        for method in methods:
            pool, ratio = METHODS[method].pool, METHODS[method].share(size, self.context)
            if bench is None or (pool, ratio) != made:
                made = pool, ratio
                options = {"block_size": args.block_size, **pool}
                bench = Bench(server, task, tokenizer, ratio, concurrency=args.concurrency, **options)
            yield method, METHODS[method].ask(bench)

    def rows(self) -> list[Figure]:
        """Rows of what is measured so far."""
        return figures(self.measured, self.settings)

    def save(self) -> None:
        """Write what is measured so far, with the commands of all runs that measured it."""
        save(
            self.out,
            self.rows(),
            curves(self.measured, self.settings),
            commit=self.args.commit,
            command=command_lines(self.commands),
            settings=self.settings,
            measurements=self.measured,
        )


def _measurement(name: str, size: int, number: int, method: str, row: MethodRow) -> JsonObject:
    return {
        "set": name,
        "size": size,
        "draw": number,
        "method": method,
        "accuracy": row.accuracy,
        "correct": row.correct,
        "queries": row.queries,
        "failures": len(row.failures),
        "seconds": row.seconds / row.queries,
        "setup": row.setup_seconds,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "passes": row.passes,
    }


def _drawn(measured: Sequence[JsonObject], name: str, size: int) -> dict[str, dict[int, JsonObject]]:
    """Method -> number of the draw -> measurement, of a set and a size, in the order of `METHODS`."""
    found: dict[str, dict[int, JsonObject]] = {}
    for method in METHODS:
        of_method = {each["draw"]: each for each in measured
                     if (each["set"], each["size"], each["method"]) == (name, size, method)}  # fmt: skip
        if of_method:
            found[method] = of_method
    return found


def _share(draws: Mapping[int, JsonObject]) -> Timing:
    """The mean share of right answers over draws."""
    return share([each["accuracy"] for each in draws.values()])


def _named(name: str, settings: Options) -> str:
    """A set's name, behind the model's where that is not the embedded one."""
    return name if settings["model"] == EMBEDDED else f"{settings['model']}, {name}"


def figures(measured: Sequence[JsonObject], settings: Options) -> list[Figure]:
    """A row for each set, size and method, beside another's over the same draws (`DrawnMethod.beside`)."""
    rows = []
    for name, size in dict.fromkeys((each["set"], each["size"]) for each in measured):
        found = _drawn(measured, name, size)
        for method, draws in found.items():
            seconds = sum(each["seconds"] for each in draws.values()) / len(draws)
            asked = sum(each["queries"] for each in draws.values())
            title = f"{_named(name, settings)}, pools of {size} tokens, {METHODS[method].title}: answers right"
            title += f"; {1e3 * seconds:.1f} ms a request, {settings['concurrency']} at a time"
            notes: JsonObject = {"draws": len(draws), "questions": asked, "seconds": seconds}
            passes = [each["passes"] for each in draws.values() if each.get("passes") is not None]
            if passes:
                notes["passes"] = sum(passes) / len(passes)
                title += f", {notes['passes']:.1f} passes to find a label"
            aim, met = _aim(found) if method == AIMED else ("", None)
            baseline = METHODS[method].beside
            beside = found.get(baseline, {})
            both = [at for at in draws if at in beside]
            if method == baseline or not both:
                rows.append(Figure(title, _share(draws), aim=aim, met=met, unit="share", notes=notes))
                continue
            mean, error = mean_and_error([draws[at]["accuracy"] - beside[at]["accuracy"] for at in both])
            notes |= {"difference": mean, "difference_error": error}
            title += f"; {100 * mean:+.1f} points, standard error {100 * error:.1f}"
            theirs, ours = (_share({at: each[at] for at in both}) for each in (beside, draws))
            ratio = ours.median / theirs.median if ours.median and theirs.median else None
            words = METHODS[baseline].title
            rows.append(Figure(title, ours, words, theirs, ratio, aim, met, unit="share", notes=notes))
    return rows


def _aim(found: Mapping[str, Mapping[int, JsonObject]]) -> tuple[str, bool | None]:
    """Whether DBSA's answers are no more than `FEWER` below the best other method with demonstrations, draw by draw."""
    ours, least = found[AIMED], dict[str, tuple[float, float]]()
    for method in IN_CONTEXT:
        both = [at for at in ours if at in found.get(method, {})]
        if len(both) > 1:  # else there is no interval
            differences = [ours[at]["accuracy"] - found[method][at]["accuracy"] for at in both]
            least[method] = mean_and_error(differences)
    if not least:
        return "", None
    best = min(least, key=lambda method: least[method][0])
    mean, error = least[best]
    return f"95% interval at most 2 points below {METHODS[best].title}", mean - WIDE_Z * error >= -FEWER


def curves(measured: Sequence[JsonObject], settings: Options) -> list[Curve]:
    """Right answers against the time of one, and against the time of many with their pool's setup, of each set."""
    drawn = []
    for name in dict.fromkeys(each["set"] for each in measured):
        sizes = sorted({each["size"] for each in measured if each["set"] == name})
        plotted = PLOTTED if any(each["method"] in PLOTTED for each in measured) else tuple(BEYOND)
        right: dict[str, list[tuple[float, float]]] = {}
        cost: dict[str, list[tuple[float, float]]] = {}
        for size in sizes:
            for method, draws in _drawn(measured, name, size).items():
                if method not in plotted:
                    continue
                mean = lambda key, draws=draws: sum(each[key] for each in draws.values()) / len(draws)  # noqa: E731
                right.setdefault(METHODS[method].title, []).append((1e3 * mean("seconds"), mean("accuracy")))
                if size == sizes[-1]:
                    total = [(float(n), mean("setup") + n * mean("seconds")) for n in REQUESTS]
                    cost[METHODS[method].title] = total
        time, title = f"ms a request, {settings['concurrency']} at a time", _named(name, settings)
        drawn.append(Curve(f"{title}: answers right by their time, for each size of a pool", time, "share", right))
        drawn.append(Curve(f"{title}: requests with their pool, {sizes[-1]} tokens", "requests", "seconds", cost, True))
    return drawn


def main(args: argparse.Namespace) -> int:
    """Measure what is missing, write the results, print the table.

    Raises:
        ValueError: what `DrawStudy` and `draw` refuse.
        ServerError: the server failed; what was measured is written.
    """
    # Whoever ends the run (a time limit, say) ends its server too: as an exception, not at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    study = DrawStudy(args)
    study.run()
    print(table(study.rows()))
    print(f"written: {study.out}")
    return 0
