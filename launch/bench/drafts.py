"""``sglang-ext bench drafts``: how many tokens of dense attention sparse attention foresees, in the real engine.

It is a study of lossless speculation. Double-P drafts some tokens, one pass of dense attention verifies all of them,
and the answer is the one of dense attention. The model is the same, so nothing is trained and no second cache is kept.

For each text, dense attention continues its first tokens greedily. Double-P then drafts behind every token of the
continuation, over keys and values that dense attention wrote, and the drafts are compared with the continuation. A
*round* is a draft and its verification: it gives the accepted tokens and one more. For each prompt, the mean number of
accepted tokens of a round is taken, and a row has the median over prompts. Rounds follow each other as they would in a
server: the next one begins behind the token that the last one ended with.

The gain is computed from measured steps: the file `--steps`, results of ``sglang-ext bench double_p``, has the time of
a dense step and of one of Double-P. A round is taken to cost its drafts and one dense step, because a step spends most
of its time on reading keys and values, however many tokens of a request it verifies. So the gain is an upper bound.
The file has steps of one setting only. For every setting, rows say how long a step of the draft may take at most, as a
share of a dense one, for a gain of `--gain`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.attention.choice import KERNELS, KERNELS_ENV
from sglang_ext.launch.answers import completed
from sglang_ext.launch.bench._quality_engine import Method, engine_of
from sglang_ext.launch.bench._quality_reports import REPORT, attention
from sglang_ext.launch.bench._quality_tasks import books, of_model, stream
from sglang_ext.launch.bench._record import Figure, Timing, json_file, save, table
from sglang_ext.launch.bench._reference_reader import Writer
from sglang_ext.launch.bench._results_files import figure_of, read_text
from sglang_ext.launch.bench.reference import MODEL
from sglang_ext.types import JsonObject, Options

if TYPE_CHECKING:
    from sglang_ext.names import Engine

STEPS = Path(__file__).resolve().parent / "results" / "double_p_engine_16_layers.json"
STEP_ROW = "time per output token, {batch} requests of 65536 tokens"
MEASURED = (0.95, 0.7)
"""The setting whose step `bench double_p` measures."""
BATCHES = (1, 8)
DRAFTED = (2, 4, 8)
GAIN = 1.6
"""Times the speed of dense decoding, from which on it would be built."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--books", nargs="+", default=[], metavar="FILE", help="texts in UTF-8 to continue")
    parser.add_argument("--data", default="", help="folder of the classification sets: demonstrations to continue")
    parser.add_argument("--model", default=str(MODEL), help="model folder (default: the embedded one)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[2048, 7680],
        metavar="TOKENS",
        help="lengths of prompts (default: 2048 7680)",
    )
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each text and length (default: 4)")
    parser.add_argument("--answer", type=int, default=24, help="tokens of each continuation (default: 24)")
    parser.add_argument(
        "--settings",
        nargs="+",
        default=["0.95,0.7", "0.8,0.4", "0.6,0.2"],
        metavar="P1,P2",
        help="of the drafts (default: 0.95,0.7 0.8,0.4 0.6,0.2)",
    )
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of demonstrations (default: 0)")
    parser.add_argument("--kernels", choices=KERNELS, default="torch", help=f"{KERNELS_ENV} (default: torch)")
    parser.add_argument("--steps", type=Path, default=STEPS, help="results that have the times of steps")
    parser.add_argument("--gain", type=float, default=GAIN, help=f"gain that drafts should have (default: {GAIN})")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="further arguments of SGLang's")
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")
    parser.add_argument("--out", type=json_file, help="file for the results (default: none is written)")


@dataclass(frozen=True)
class Drafts:
    """What one setting foresaw of a text.

    Attributes:
        setting: (p1, p2).
        text: name of the text, with the tokens of its prompts.
        accepted: of each prompt, for each token of its continuation: how many first tokens of the draft behind it are
            those of the continuation.
        attention: `attention` of the drafts.
    """

    setting: tuple[float, float]
    text: str
    accepted: tuple[tuple[int, ...], ...]
    attention: JsonObject


def common(drafted: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens of a draft are right."""
    pairs = enumerate(zip(drafted, right, strict=False))
    return next((at for at, (own, other) in pairs if own != other), min(len(drafted), len(right)))


def rounds(accepted: Sequence[int], drafted: int) -> list[int]:
    """Accepted tokens of each round, where each begins behind the last one's tokens.

    Args:
        accepted: `Drafts.accepted` of one prompt.
        drafted: tokens of a draft.
    """
    found, at = list[int](), 0
    while at < len(accepted):
        found.append(min(accepted[at], drafted))
        at += found[-1] + 1
    return found


def gain(accepted: float, drafted: int, step: float) -> float:
    """Times the speed of dense decoding.

    Args:
        accepted: tokens of a round's draft, on average.
        drafted: tokens of a draft.
        step: of the draft, as a share of a dense step.
    """
    return (accepted + 1) / (drafted * step + 1)


def longest_step(accepted: float, drafted: int, wanted: float) -> float:
    """The share of a dense step that a step of the draft may take, so that `gain` is `wanted`; below 0: none may."""
    return ((accepted + 1) / wanted - 1) / drafted


def setting(text: str) -> tuple[float, float]:
    """(p1, p2) of an argument.

    Raises:
        ValueError: it is none.
    """
    try:
        p1, p2 = map(float, text.split(","))
    except ValueError:
        p1 = p2 = -1.0
    if not 0 <= p2 <= p1 <= 1 or p1 == 0:
        raise ValueError(f"--settings {text}: expected P1,P2 with 0 <= P2 <= P1 <= 1 and P1 above 0, such as 0.8,0.4")
    return p1, p2


# ---- in an engine ----------------------------------------------------------------------------------------------------


class Drafter:
    """An engine with Double-P, whose requests choose to be dense or sparse.

    Args:
        answer: tokens of a continuation.
    """

    def __init__(self, engine: Engine, answer: int) -> None:
        self.engine, self.answer = engine, answer

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int, options: Options) -> list[JsonObject]:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": dict(options)}
        answers: list[JsonObject] = self.engine.generate(
            input_ids=[list(prompt) for prompt in prompts], sampling_params=[params] * len(prompts)
        )
        return completed(answers)

    def continued(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What dense attention writes behind each prompt, and what the longest draft behind its last token foresees."""
        for prompt in prompts:  # a sparse step leaves clusters of the prompt in the cache, which dense ones do not make
            self._generate([prompt], 2, {})
        answers = self._generate(prompts, self.answer + max(DRAFTED) + 1, {"dense": True})
        return [each["output_ids"] for each in answers]

    def drafts(
        self, text: str, prompts: Sequence[Sequence[int]], written: Sequence[Sequence[int]], chosen: tuple[float, float]
    ) -> Drafts:
        """Draft behind every token of each continuation.

        That token comes from the pass of the prompt, which is dense, as it comes from a verification in a server. The
        cache holds what dense attention wrote of a whole continuation, and drafts that agree with it are not kept
        beside it: so every draft begins over keys and values of dense attention.

        Raises:
            RuntimeError: no step of a draft was sparse.
        """
        options = {"p1": chosen[0], "p2": chosen[1], REPORT: True}
        accepted, reports = [], []
        for prompt, tokens in zip(prompts, written, strict=True):
            begun = [[*prompt, *tokens[:at]] for at in range(self.answer)]
            answers = self._generate(begun, max(DRAFTED) + 1, options)
            drafted = [each["output_ids"][1:] for each in answers]
            accepted.append(tuple(common(each, tokens[at:]) for at, each in enumerate(drafted, 1)))
            reports += [each["meta_info"][REPORT] for each in answers]
        found = attention(reports)
        if not found.get("steps"):
            raise RuntimeError(f"{text}: every step of the drafts read everything; expected longer prompts, --lengths")
        return Drafts(chosen, text, tuple(accepted), found)


def prompts_of(tokens: Sequence[int], length: int, count: int) -> list[list[int]]:
    """Runs of a text, apart and without overlap, each behind the text's BOS."""
    bos, rest = tokens[0], tokens[1:]
    return [[bos, *rest[at * (length - 1) : (at + 1) * (length - 1)]] for at in range(count)]


def texts(writer: Writer, args: argparse.Namespace) -> dict[str, list[int]]:
    """Tokens of each text by its name, as many as all prompts of the longest length need.

    Raises:
        ValueError: no text is named, or one is too short.
    """
    if not args.books and not args.data:
        raise ValueError("got neither --books nor --data: expected texts to continue, or the classification sets")
    count = max(args.lengths) * args.prompts
    settings = {"books": args.books, "model": args.model, "stream": count, "part": 0}
    read_in = {name.rsplit(", ", 1)[0]: each.tokens for name, each in books(writer, settings).items()}
    if args.data:
        read_in[f"{of_model(settings)}banking77"] = stream(writer, args.data, count, args.seed).tokens
    return read_in


# ---- rows -----------------------------------------------------------------------------------------------------------


def step_shares(path: Path) -> dict[int, float]:
    """Requests at a time -> the time of a step of Double-P, as a share of a dense one's, over 64K tokens each.

    Raises:
        ValueError: the file has not one such row for each number of requests.
    """
    try:
        figures = [figure_of(row, f"row {at}") for at, row in enumerate(json.loads(read_text(path))["figures"], 1)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--steps {path}: {error}; expected a results file of sglang-ext bench double_p") from error
    shares = dict[int, float]()
    for batch in BATCHES:
        rows = [each.ratio for each in figures if each.name.startswith(STEP_ROW.format(batch=batch)) and each.ratio]
        if len(rows) != 1:
            raise ValueError(
                f"--steps {path}: got {len(rows)} rows {STEP_ROW.format(batch=batch)!r}, expected one; name results of"
                " sglang-ext bench double_p --only engine --levels middle --engine-batch 1 8"
            )
        shares[batch] = 1 / rows[0]
    return shares


def figures(measured: Sequence[Drafts], shares: Mapping[int, float], wanted: float) -> list[Figure]:
    """Rows of accepted tokens, and for each setting the best gain at each number of requests.

    Args:
        measured: of each text and setting.
        shares: `step_shares`.
        wanted: gain.
    """
    rows = list[Figure]()
    for each in measured:
        best = dict[int, tuple[float, int, float]]()
        for drafted in DRAFTED:
            means = [statistics.fmean(rounds(prompt, drafted)) for prompt in each.accepted]
            mean = statistics.fmean(means)
            longest = longest_step(mean, drafted, wanted)
            gains = {batch: gain(mean, drafted, share) for batch, share in shares.items()}
            notes = {"gains": gains, "longest_step": longest, "attention": each.attention}
            name = f"{_title(each)}, drafts of {drafted}: accepted tokens; {wanted:g}x {_needs(longest)}"
            rows.append(Figure(name, Timing.of(means), unit="tokens", notes=notes))
            for batch, value in gains.items():
                best[batch] = max(best.get(batch, (0.0, 0, 0.0)), (value, drafted, mean))
        if each.setting == MEASURED:
            rows += [_gain(each, batch, *found, wanted) for batch, found in best.items()]
    return rows


def _title(each: Drafts) -> str:
    read_of = each.attention
    words = f"exact {read_of['exact']:.3f}, kept {read_of['kept']:.3f}, recovered {read_of['recovered']:.3f}"
    return f"{each.text}, Double-P {each.setting} ({words})"


def _needs(longest: float) -> str:
    """What a gain needs, from `longest_step`."""
    return f"needs a step of at most {longest:.2f} of a dense one" if longest > 0 else "is out of reach of any step"


def _gain(each: Drafts, batch: int, value: float, drafted: int, mean: float, wanted: float) -> Figure:
    name = (
        f"{each.text}, Double-P {each.setting}, {batch} at a time, steps of 64K tokens: at most so many times the speed"
        f" of dense decoding, with drafts of {drafted}"
    )
    aim = f"at least {wanted:.3g}x" if batch == max(BATCHES) else ""
    met = value >= wanted if aim else None
    timing = Timing(mean, mean, mean, len(each.accepted))
    return Figure(name, timing, "", None, value, aim, met, unit="tokens")


def main(args: argparse.Namespace) -> int:
    """Draft, print the table, and write it where `--out` says.

    Raises:
        ValueError: a number below 1, a bad setting, no text, one that is too short, or results without steps.
    """
    for name in ("prompts", "answer", "concurrency"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: expected at least 1")
    chosen, shares = [setting(each) for each in args.settings], step_shares(args.steps)
    read_in = texts(Writer(args.model), args)
    os.environ[KERNELS_ENV] = args.kernels
    longest = max(args.lengths) + args.answer + max(DRAFTED) + 1
    method = Method("Double-P", "double_p", {"min_tokens": 0})
    settings = {name: getattr(args, name) for name in ("model", "concurrency", "seed", "engine")} | {"context": longest}
    engine = engine_of(settings, method, longest)
    measured = list[Drafts]()
    try:
        drafter = Drafter(engine, args.answer)
        for name, tokens in read_in.items():
            for length in args.lengths:
                prompts = prompts_of(tokens, length, args.prompts)
                written = drafter.continued(prompts)
                for each in chosen:
                    measured.append(drafter.drafts(f"{name}, {length} tokens", prompts, written, each))
                    print(table(figures(measured[-1:], shares, args.gain)), flush=True)
    finally:
        engine.shutdown()
    rows = figures(measured, shares, args.gain)
    print(table(rows))
    if args.out:
        kept = ("lengths", "prompts", "answer", "settings", "gain", "kernels", "seed")
        of_run = {name: getattr(args, name) for name in kept} | {"step_shares": shares, "steps": args.steps.name}
        save(args.out, rows, commit=args.commit, settings=of_run)
        print(f"written: {args.out}")
    return 0
