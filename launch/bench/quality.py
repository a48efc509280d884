"""``sglang-ext bench quality``: what sparse attention costs in right answers, in the real engine.

The same prompts for all methods, greedy answers, the reference model (or another, --model). Each method has an engine
of its own, but those of dbsa share a server:

- --suite dbsa: texts of four classification sets over pools of demonstrations that are drawn: zero-shot, Fixed ICL,
  RetICL by example and by block, DBSA over 10, 30 and 100% of the blocks, and over demonstrations as blocks; and with
  --methods ablations other patterns, groupings, orders, previous blocks and single examples, with --methods retrievers
  BM25 over stems and without stop words, with --methods blocks smaller blocks, with --methods labels the most likely
  label beside the greedy one, with --methods beyond pools that may be longer than the context (`positions: local`), of
  which as much is read as fills 0.8 of it. Means and intervals are over draws; the time of an answer stands beside each
  result.
- --suite double_p: banking77 with many demonstrations and passkeys, for dense attention, Double-P, and RetroInfer,
  Quest and Twilight with budgets that make them read as much as Double-P did on the same task: as many tokens kept
  (exact, or in an approximated cluster), and as many exact. What was read and the attention that it recovered stand
  beside each result. On a GPU Double-P's kernels answer too, in CUDA graphs, where nothing is measured.
- --suite cascade: passkeys in rows of one window and its doublings, and the perplexity of a stream of demonstrations,
  for dense attention, StreamingLLM and 2, 4 and 8 cascades of one window, with and without token selection.

- --suite book: the perplexity of texts, --books, that are read from their beginning to their end: for dense attention
  in pieces of the model's context, and for StreamingLLM, cascades, InfLLM's index and Ltri-LLM, which see as many
  tokens as each other. Spreads are over parts of 64K tokens.

- --suite ruler: generated tasks in the manner of RULER (single-key, multi-key, multi-value needles, variable tracking,
  common words, questions about labelled texts) for dense attention, the methods of double_p, and the streams of book.
  The score is the share of the expected answers that are found. Where dense attention fails, rows have no aim.

- --suite ltri: passkeys at depths that are drawn uniformly (--hidden says where: among filler sentences, one of 16 that
  have names, among texts of banking77, within one memory block, over two), for dense attention, StreamingLLM with as
  many visible tokens, InfLLM's index, random blocks, the blocks that hold the key, and Ltri-LLM with its similarities,
  heads, votes, persistence, lambda and last tokens. Shares have Wilson's intervals.

Results are written after each task; a run that is cut short is taken up again where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from sglang_ext.attention.choice import KERNELS, KERNELS_ENV
from sglang_ext.launch.bench import _quality_dbsa, _quality_ruler
from sglang_ext.launch.bench._quality_book import PART, book_methods
from sglang_ext.launch.bench._quality_engine import Method, cascade_methods, double_p_methods
from sglang_ext.launch.bench._quality_figures import curves, figures
from sglang_ext.launch.bench._quality_ltri import ltri_methods
from sglang_ext.launch.bench._quality_tasks import BLOCK, FILLERS, HIDDEN, block_of, filler_of
from sglang_ext.launch.bench._record import AND, Curve, Figure, command_lines, json_file, save, table
from sglang_ext.launch.bench.reference import MODEL
from sglang_ext.types import JsonObject, Options

RESULTS = Path(__file__).resolve().parent / "results"
SUITES = ("dbsa", "double_p", "cascade", "ltri", "book", "ruler")
# What a measurement depends on, beside its method.
SETTINGS = ("suite", "queries", "shots", "passkey", "trials", "window", "stride", "sinks", "stream", "context", "seed")
TASKS = ("shots", "passkey", "stream")  # which tasks there are; a file may have those of several runs
OF_SOME = ("part", "heads", "block", "filler")  # beside these, of some suites: books, ltri, ruler and cascade
HOSTED = ("ltri", "infllm")  # systems that keep on the host what leaves a window
POLL_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--data", default="", help="folder of the classification sets; all suites but book read it")
    parser.add_argument("--books", nargs="+", default=[], metavar="FILE", help="texts in UTF-8 that book reads")
    parser.add_argument("--model", default=str(MODEL), help="model folder (default: the embedded one)")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="some of the suite's methods (default: all; of dbsa: main; ablations and retrievers name others)",
    )
    parser.add_argument("--queries", type=int, default=300, help="of banking77 (default: 300)")
    parser.add_argument(
        "--shots", type=int, nargs="*", default=[0], metavar="N", help="demonstrations a class; 0: all that fit"
    )
    parser.add_argument(
        "--passkey",
        type=int,
        nargs="*",
        metavar="TOKENS",
        help="lengths of rows (default: 4096 8192 16384; ruler: 4096 8192; cascade: 1, 2, 4, 8 and 16 windows)",
    )
    parser.add_argument("--trials", type=int, default=5, help="passkeys at each tenth of depth (default: 5)")
    parser.add_argument(
        "--hidden", nargs="+", choices=HIDDEN, default=list(HIDDEN), help="where the keys of ltri are (default: all)"
    )
    parser.add_argument("--filler", choices=FILLERS, default=FILLERS[0], help="around passkeys, of cascade")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[100], help="of ltri and ruler, for each length or all (default: 100)"
    )
    parser.add_argument("--window", type=int, default=1024, help="of a stream (default: 1024)")
    parser.add_argument("--stride", type=int, default=512, help="of cascades; the chunk of Ltri-LLM (default: 512)")
    parser.add_argument(
        "--block", type=int, default=BLOCK, help=f"tokens of a memory block of ltri; aims are for {BLOCK}, the default"
    )
    parser.add_argument("--sinks", type=int, default=64, help="of a stream (default: 64)")
    parser.add_argument(
        "--stream",
        type=int,
        default=65_536,
        help="tokens that cascade, or book, reads for perplexity; 0: none (default: 65536)",
    )
    parser.add_argument("--part", type=int, default=PART, help=f"tokens of a part of a book (default: {PART})")
    parser.add_argument("--heads", help="file of sglang-ext heads, or all: which heads vote in Ltri-LLM")
    parser.add_argument("--context", type=int, default=0, help="longest dense row (default: the model's context)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time (default: 8)")
    parser.add_argument("--parallel", type=int, default=1, help="engines at a time (default: 1)")
    parser.add_argument(
        "--host-gb", type=float, metavar="GIB", help="host memory of each engine of ltri (default: as a server's)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of demonstrations, queries, keys and stream (default: 0)")
    parser.add_argument("--kernels", choices=KERNELS, default="torch", help=f"{KERNELS_ENV} (default: torch)")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="further arguments of SGLang's")
    parser.add_argument("--anew", action="store_true", help="measure again what the file of results has already")
    _quality_dbsa.add_arguments(parser)
    _quality_ruler.add_arguments(parser)
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")
    parser.add_argument("--out", type=json_file, help="results (default: launch/bench/results/quality_SUITE.json)")


def main(args: argparse.Namespace) -> int:
    """Measure what is missing, write the results, print the table.

    Raises:
        RuntimeError: some engine failed; what the others measured is written.
        ValueError: the suite lacks what it reads.
    """
    if not (args.books if args.suite == "book" else args.data):
        what = "--books, the texts to read" if args.suite == "book" else "--data, the folder of the classification sets"
        raise ValueError(f"--suite {args.suite} needs {what}: expected it beside the suite")
    if args.suite == "dbsa":
        return _quality_dbsa.main(args)
    # Whoever ends the run (a time limit, say) ends its engines too: as an exception, not at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    study = Study(args)
    study.run()
    print(table(study.figures()))
    if study.failed:
        raise RuntimeError(f"no results, or not all, of {', '.join(study.failed)}: what their engines said is above")
    print(f"written: {study.out}")
    return 0


def methods_of(settings: Options) -> dict[str, Method]:
    """The methods of a suite, by name."""
    if settings["suite"] == "double_p":
        return double_p_methods()
    if settings["suite"] in ("book", "ruler"):
        sizes = (settings[name] for name in ("window", "stride", "sinks", "context", "heads"))
        return (book_methods if settings["suite"] == "book" else _quality_ruler.ruler_methods)(*sizes)
    window, stride, sinks, context = (settings[name] for name in ("window", "stride", "sinks", "context"))
    if settings["suite"] == "cascade":
        return cascade_methods(window, stride, sinks, context)
    return ltri_methods(window, stride, sinks, context, settings.get("heads"), block_of(settings))


def _prompts(counts: Sequence[int], lengths: Sequence[int]) -> dict[str, int]:
    """Length -> how many prompts it has, of each place of the key.

    Raises:
        ValueError: there is not one number for all lengths, nor one for each; or one is below 1.
    """
    each = list(counts) * (len(lengths) if len(counts) == 1 else 1)
    if len(each) != len(lengths) or min(each, default=1) < 1:
        raise ValueError(
            f"--prompts {' '.join(map(str, counts))} of {len(lengths)} lengths: expected one number from 1 on, or"
            f" {len(lengths)} of them"
        )
    return {str(length): count for length, count in zip(lengths, each, strict=True)}


class Study:
    """A suite's settings, what is measured so far, and the file that keeps it.

    Raises:
        ValueError: an unknown method, or a file of results with other settings.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out or RESULTS / f"quality_{args.suite}.json"
        default = [4096, 8192, 16384]
        if args.suite == "cascade":
            default = [args.window * times for times in (1, 2, 4, 8, 16)]
        elif args.suite == "ruler":
            default = list(_quality_ruler.LENGTHS)
        lengths = default if args.passkey is None else args.passkey
        context = args.context or json.loads((Path(args.model) / "config.json").read_text())["max_position_embeddings"]
        self.settings: JsonObject = {
            **{name: getattr(args, name) for name in SETTINGS},
            "passkey": lengths,
            "context": context,
        }
        if args.suite == "cascade":
            self.settings |= {"filler": args.filler}
        elif args.filler != FILLERS[0]:
            raise ValueError(f"--filler {args.filler}: expected --suite cascade, which alone has it")
        if args.suite == "book":
            self.settings |= {"passkey": [], "books": args.books, "part": args.part, "heads": args.heads}
        if args.suite == "ltri":
            self.settings |= {"hidden": args.hidden, "prompts": _prompts(args.prompts, lengths), "heads": args.heads}
            self.settings |= {"block": args.block}
        if args.suite == "ruler":
            self.settings |= {"tasks": args.tasks, "prompts": _prompts(args.prompts, lengths), "heads": args.heads}
        self.methods = methods_of(self.settings)
        # Without a GPU kernels run in Triton's interpreter, for days: then only when they are asked for.
        default_ones = [name for name, each in self.methods.items() if not each.kernels or torch.cuda.is_available()]
        self.chosen = list(args.methods or default_ones)
        if unknown := set(self.chosen) - set(self.methods):
            raise ValueError(f"--methods {' '.join(sorted(unknown))}: expected some of {', '.join(self.methods)}")
        if args.kernels != "torch" and (measuring := [name for name in self.chosen if self.methods[name].reports]):
            raise ValueError(
                f"--kernels {args.kernels} --methods {' '.join(measuring)}: all that measure what they read are"
                " to do it alike; expected --kernels torch, where double_p-kernels answers with kernels beside them"
            )
        self.failed: list[str] = []
        self.measured: list[JsonObject] = []
        self.commands: list[str] = []
        self.recorded = dict(self.settings)
        if "books" in self.settings:  # folders are the user's own
            self.recorded |= {"books": [Path(path).stem for path in args.books]}
        if "heads" in self.settings:
            self.recorded |= {"heads": args.heads and Path(args.heads).name}
        if self.out.exists() and not args.anew:
            self.measured = self._known(json.loads(self.out.read_text()))

    def _known(self, record: JsonObject) -> list[JsonObject]:
        """The measurements of a file; with --passkey, --shots or --stream some more may be asked for."""
        known = record.get("settings", {})
        known = {**known, "filler": filler_of(known), "block": block_of(known)}
        kept = [
            *(name for name in SETTINGS if name not in TASKS),
            *(name for name in OF_SOME if name in self.recorded),
        ]
        if other := [name for name in kept if known.get(name) != self.recorded[name]]:
            raise ValueError(
                f"{self.out} has results of other settings: {', '.join(f'{n}={known.get(n)}' for n in other)}; expected"
                f" {', '.join(f'{n}={self.recorded[n]}' for n in other)}: measure --anew, or name another --out"
            )
        self.commands = record["command"].split(AND)
        asked = self.settings.get("prompts", {})
        for length, count in known.get("prompts", {}).items():
            if asked.get(length, count) != count:
                raise ValueError(
                    f"{self.out} has {count} prompts of {length} tokens; expected --prompts {count} and not"
                    f" {asked[length]}: measure --anew, or name another --out"
                )
        for name in (each for each in ("shots", "passkey", "hidden", "tasks", "books") if each in self.recorded):
            self.recorded[name] = list(dict.fromkeys([*known[name], *self.recorded[name]]))
        if asked:
            self.recorded["prompts"] = {**known["prompts"], **asked}
        self.recorded["stream"] = self.settings["stream"] or known["stream"]
        return list(record["measurements"])

    def run(self) -> None:
        """Measure what is missing: first what needs no budgets, then what takes Double-P's for its own."""
        free = [name for name in self.chosen if not self.methods[name].knobs]
        bound = [name for name in self.chosen if self.methods[name].knobs]
        self._measure(free, {})
        if bound:
            targets = {
                each["task"]: {figure: each["attention"][figure] for figure in ("exact", "kept")}
                for each in self.measured
                if each["method"] == "double_p"
            }
            if not targets:
                raise ValueError(
                    f"--methods {' '.join(bound)}: they read as much as Double-P does, which is not measured yet; add"
                    " double_p"
                )
            self._measure(bound, targets)

    def _measure(self, names: Sequence[str], targets: Mapping[str, Mapping[str, float]]) -> None:
        """Run an engine for each method, some at a time, and keep what they write as soon as they do."""
        waiting, running = list(names), dict[str, StudyEngine]()
        with tempfile.TemporaryDirectory(prefix="sglang-ext-quality-") as temporary, ended(running):
            while waiting or running:
                while waiting and len(running) < self.args.parallel:
                    name = waiting.pop(0)
                    running[name] = StudyEngine(Path(temporary), name, self._job(name, targets), self._kernels(name))
                time.sleep(POLL_SECONDS)
                for name, engine in list(running.items()):
                    status = engine.process.poll()
                    if found := engine.lines():
                        self.measured += found
                        self.save()
                        for each in found:
                            print(f"{name}: {summary(each)}", flush=True)
                    if status is not None:
                        del running[name]
                        if status:
                            self.failed.append(name)
                            print(f"{name}: its engine ended with status {status}:\n{engine.tail()}", file=sys.stderr)

    def _kernels(self, name: str) -> str:
        return self.methods[name].kernels or str(self.args.kernels)

    def _job(self, name: str, targets: Mapping[str, Mapping[str, float]]) -> JsonObject:
        args = self.args
        own = {"data": args.data, "model": args.model, "concurrency": args.concurrency, "engine": args.engine}
        method = asdict(self.methods[name])
        if args.host_gb is not None and method["backend"] in HOSTED:
            method["policy"] = {**method["policy"], "host_gb": args.host_gb}
        return {
            "name": name,
            "method": method,
            "settings": {**self.settings, **own},
            "targets": dict(targets),
            "done": [each["task"] for each in self.measured if each["method"] == name],
        }

    def figures(self) -> list[Figure]:
        """Rows of what is measured so far."""
        if self.args.suite == "ruler":
            return _quality_ruler.figures(self.settings, self.methods, self.measured)
        return figures(self.settings, self.methods, self.measured)

    def curves(self) -> list[Curve]:
        """What is plotted of them."""
        if self.args.suite == "ruler":
            return _quality_ruler.curves(self.methods, self.measured)
        return curves(self.settings, self.methods, self.measured)

    def save(self) -> None:
        """Write what is measured so far, with the commands of all runs that measured it."""
        save(
            self.out,
            self.figures(),
            commit=self.args.commit,
            command=command_lines(self.commands),
            settings=self.recorded,
            curves=self.curves(),
            measurements=self.measured,
        )


class StudyEngine:
    """A process that measures one method, the lines that it writes, and its log."""

    def __init__(self, folder: Path, name: str, job: JsonObject, kernels: str) -> None:
        self.out, self.log = folder / f"{name}.jsonl", folder / f"{name}.log"
        path = folder / f"{name}.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, "-m", "sglang_ext.launch.bench._quality_engine"]
        command += ["--job", str(path), "--out", str(self.out)]
        environment = {**os.environ, KERNELS_ENV: kernels}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._read = 0

    def lines(self) -> list[JsonObject]:
        """Measurements that were completed since the last call."""
        if not self.out.exists():
            return []
        with self.out.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def tail(self) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@contextmanager
def ended(running: Mapping[str, StudyEngine]) -> Iterator[None]:
    """End the engines that still run when the block ends, by whatever."""
    try:
        yield
    finally:
        for engine in running.values():
            engine.process.terminate()
        for engine in running.values():
            try:
                engine.process.wait(20)
            except subprocess.TimeoutExpired:
                engine.process.kill()
                engine.process.wait()


def summary(measurement: JsonObject) -> str:
    """One line."""
    words = [measurement["task"]]
    if "perplexity" in measurement:
        words.append(", ".join(f"{name} {value:.3f}" for name, value in measurement["perplexity"].items()))
    else:
        words.append(f"accuracy {measurement['accuracy']:.3f}")
        if "found" in measurement:
            words.append(f"answers found {measurement['found']:.3f}")
        if measurement["digits"] is not None:
            words.append(f"digits {measurement['digits']:.3f}")
        if measurement["attention"]:
            words += [f"{name} {measurement['attention'][name]:.3f}" for name in ("kept", "exact", "recovered")]
        if measurement["target"]:
            words.append(f"budgets {measurement['options']}")
    return f"{', '.join(words)} ({sum(measurement['seconds'].values()):.1f} s)"
