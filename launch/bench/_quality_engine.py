"""One method of a quality study in one engine: a process of its own, run by `launch.bench.quality`.

It writes a JSON line for each task when it is done. Two engines do not fit into one process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.launch.answers import completed
from sglang_ext.launch.bench._quality_reports import REPORT, attention, recall
from sglang_ext.launch.bench._quality_tasks import (
    PARTS,
    QualityTask,
    StreamTask,
    blocks_of,
    books,
    by_bins,
    classification,
    key_tasks,
    stream,
)
from sglang_ext.launch.bench._reference_reader import Writer
from sglang_ext.launch.bench._ruler_tasks import ruler_tasks
from sglang_ext.policies.ltri_options import Ltri
from sglang_ext.types import JsonObject, Options

if TYPE_CHECKING:
    from sglang_ext.names import Engine


STREAMS = ("cascade", "streaming_llm", "ltri", "infllm")
CALIBRATE, TOLERANCE, ROUNDS = 16, 0.02, 6
GPU_ROWS = 48  # prompts that stay in the KV pool of a GPU, so that setting budgets computes them once
ANSWERED = 1  # tokens of an answer to what is only read; they take room in the context
RESERVED = 8  # SGLang keeps a few tokens of the context to itself: it is told that there are more, and none is used


@dataclass(frozen=True)
class Method:
    """A way to read a long row.

    Attributes:
        title: what tables call it.
        backend: `--attention-backend`.
        policy: options of the server.
        options: options of every request.
        knobs: option -> the figure of Double-P's report (`exact` or `kept`) that it is set to meet, in this order.
        reads: tokens in which dense attention reads a stream at once; 0: a stream goes in whole.
        kernels: its own choice of kernels (`SGLANG_EXT_KERNELS`); empty: the study's.
    """

    title: str
    backend: str
    policy: Options = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    knobs: Mapping[str, str] = field(default_factory=dict)
    reads: int = 0
    kernels: str = ""

    @property
    def slots(self) -> int:
        """KV slots of a stream."""
        return sum(self.policy.get(name, 0) for name in ("sinks", "window", "stride", "block", "chunk"))

    @property
    def endless(self) -> bool:
        """Whether it reads rows beyond the model's context."""
        return self.backend in STREAMS and not self.policy.get("far")

    @property
    def reports(self) -> bool:
        """Whether its steps are measured against dense attention, which keeps them out of CUDA graphs."""
        sparse = self.backend in ("double_p", "retroinfer", "quest", "twilight") and not self.options.get("dense")
        return sparse and not self.kernels

    @property
    def finds(self) -> bool:
        """Whether its layers find blocks of a row, and an answer says which."""
        return self.backend in ("ltri", "infllm") and self.policy.get("index") != "given"


def double_p_methods() -> dict[str, Method]:
    """Dense attention, Double-P, and the baselines that are set to read as much."""
    whole, stages = {"min_tokens": 0}, {"p1": 0.95, "p2": 0.7}
    return {
        "dense": Method("dense", "double_p", whole, {"dense": True}),
        "double_p": Method("Double-P (0.95, 0.7)", "double_p", whole, stages),
        "double_p-kernels": Method("Double-P (0.95, 0.7), in kernels", "double_p", whole, stages, kernels="triton"),
        "double_p-tail": Method(
            "Double-P (0.95, 0.7), the tail by centroids", "double_p", {**whole, "tail": "centroid"}, stages
        ),
        "double_p-wide": Method("Double-P (0.99, 0.8)", "double_p", whole, {"p1": 0.99, "p2": 0.8}),
        "double_p-exact": Method("Double-P (0.95, 0.95)", "double_p", whole, {"p1": 0.95, "p2": 0.95}),
        "retroinfer": Method("RetroInfer", "retroinfer", whole, knobs={"exact": "exact", "approx": "kept"}),
        "quest": Method("Quest, as many kept", "quest", whole, knobs={"budget": "kept"}),
        "quest-exact": Method("Quest, as many exact", "quest", whole, knobs={"budget": "exact"}),
        "twilight": Method("Twilight, as many kept", "twilight", whole, {"p": 0.95}, {"budget": "kept", "p": "kept"}),
        "twilight-exact": Method(
            "Twilight, as many exact", "twilight", whole, {"p": 0.95}, {"budget": "exact", "p": "exact"}
        ),
    }


def cascade_methods(window: int, stride: int, sinks: int, context: int) -> dict[str, Method]:
    """Dense attention, StreamingLLM and cascades of one window, with and without token selection or all queries.

    There are 12 cascades where the window is a multiple of 12, as the paper's 1,008 tokens are (Figure 12); and 4 whose
    heads decide together, or share a score by its maximum (Appendix B).
    """
    sizes = {"window": window, "stride": stride, "sinks": sinks}
    found = {
        "dense": Method("dense", "dbsa", reads=context - ANSWERED),
        "dense-window": Method("dense in chunks of the window", "dbsa", reads=sinks + window),
        "streaming_llm": Method("StreamingLLM", "streaming_llm", sizes),
    }
    for cascades in [each for each in (2, 4, 8, 12) if window % each == 0]:
        for selection in (True, False):
            title = f"{cascades} cascades" + ("" if selection else ", no selection")
            name = f"cascade-{cascades}" + ("" if selection else "-unselected")
            found[name] = Method(title, "cascade", {**sizes, "cascades": cascades, "selection": selection})
    for every in (2, 4, 8):
        policy = {**sizes, "cascades": 4, "selection": True, "score_every": every}
        found[f"cascade-4-every-{every}"] = Method(f"4 cascades, one query in {every} counted", "cascade", policy)
    four = {**sizes, "cascades": 4, "selection": True}
    found["cascade-4-together"] = Method("4 cascades, heads together", "cascade", {**four, "heads": "homogeneous"})
    found["cascade-4-max"] = Method("4 cascades, a group's maximum", "cascade", {**four, "head_reduction": "max"})
    return found


# ---- budgets --------------------------------------------------------------------------------------------------------


def match(
    measured: Callable[[float], float], target: float, most: float = 1.0, tolerance: float = TOLERANCE
) -> tuple[float, float]:
    """(option, figure) for which a figure that grows with an option comes nearest to a target.

    Args:
        measured: the figure at a value of the option, about in proportion to it.
        target: what the figure is to be, above 0.
        most: the option's largest value.
        tolerance: relative error with which it is good enough.

    Raises:
        ValueError: there is nothing to meet.
    """
    if target <= 0 or most <= 0:
        raise ValueError(f"target {target}, at most {most}: expected both above 0")
    value, tried = min(target, most), list[tuple[float, float]]()
    for _ in range(ROUNDS):
        got = measured(value)
        tried.append((value, got))
        if abs(got / target - 1) <= tolerance or (value >= most and got < target):
            break
        below = [pair for pair in tried if pair[1] < target]
        above = [pair for pair in tried if pair[1] >= target]
        if below and above:  # between the nearest of each, on a straight line
            (a, low), (b, high) = max(below), min(above)
            value = a + (b - a) * (target - low) / (high - low)
        else:
            value = min(most, value * target / got) if got > 0 else min(most, 2 * value)
    # Of equals the last: where the option stops to matter, its largest value.
    return min(reversed(tried), key=lambda pair: abs(pair[1] - target))


def nearer_one(p: float, way: float) -> float:
    """A share between `p` (way 0) and all but a millionth of what it lacks (way 1), in equal factors of that."""
    return 1 - (1 - p) * 1e-6**way


# ---- asking ---------------------------------------------------------------------------------------------------------


class Asker:
    """One engine and one method."""

    def __init__(self, engine: Engine, method: Method) -> None:
        self.engine, self.method = engine, method

    def ask(self, task: QualityTask, options: Options, only: Sequence[int] | None = None) -> list[JsonObject]:
        """Greedy answers to a task's prompts, or to those at `only`.

        Raises:
            FailedAnswers: some answer failed; its empty text must not count as a wrong one.
        """
        chosen = range(len(task.prompts)) if only is None else only
        report = self.method.reports or (self.method.finds and task.places)
        own = {**self.method.options, **options, **({REPORT: True} if report else {})}
        params: JsonObject = {"temperature": 0, "max_new_tokens": task.new_tokens}
        params |= {"ebnf": task.grammar} if task.grammar else {"ignore_eos": not task.ends}
        params |= {"stop": [task.stop]} if task.stop else {}
        each = [{**params, "custom_params": {**own, **self._given(task, at)} or None} for at in chosen]
        answers: list[JsonObject] = self.engine.generate(
            input_ids=[task.prompts[at] for at in chosen], sampling_params=each
        )
        return completed(answers)

    def _given(self, task: QualityTask, at: int) -> Options:
        """The blocks with a prompt's evidence, for a method that is told them."""
        if not task.places or self.method.policy.get("index") != "given":
            return {}
        return {"blocks": blocks_of(task.places[at], self.method.policy["sinks"], self.method.policy["block"])}

    def budgets(self, task: QualityTask, target: Mapping[str, float]) -> dict[str, float]:
        """Options with which the method reads as much as `target` says, on a few prompts."""
        count = min(CALIBRATE, len(task.prompts))
        few = [at * len(task.prompts) // count for at in range(count)]
        found: dict[str, float] = {}

        def reads(
            knob: str, figure: str, also: Mapping[str, float] | None = None, of: Callable[[float], float] = float
        ) -> Callable[[float], float]:
            def share(value: float) -> float:
                answers = self.ask(task, {**found, **(also or {}), knob: of(value)}, few)
                read: float = attention([answer["meta_info"][REPORT] for answer in answers])[figure]
                return read

            return share

        got = 0.0
        for knob, figure in self.method.knobs.items():
            wanted = target[figure]
            if knob == "p":  # when all tokens are candidates, those that hold p of the mass may still be too few
                if got < (1 - TOLERANCE) * wanted:
                    nearer = partial(nearer_one, self.method.options["p"])
                    value, got = match(reads(knob, figure, of=nearer), wanted)
                    found[knob] = nearer(value)
            elif knob == "approx":  # on top of the exact clusters, which may be enough
                share = reads(knob, figure)
                found[knob], got = (0.0, wanted) if share(0.0) >= wanted else match(share, wanted, 1 - found["exact"])
            else:
                also = {"approx": 0.0} if "approx" in self.method.knobs else None
                found[knob], got = match(reads(knob, figure, also), wanted)
        return found

    def answers(self, task: QualityTask, target: Mapping[str, float] | None) -> JsonObject:
        """A measurement: how many answers are right, and what was read for them."""
        begin = time.perf_counter()
        if task.shared:  # once, so that not all of the first batch compute it
            once = {"max_new_tokens": 1}
            completed(self.engine.generate(input_ids=task.prompts[0][: task.shared], sampling_params=once))
        options = self.budgets(task, target) if target and self.method.knobs else {}
        calibrated = time.perf_counter()
        answers = self.ask(task, options)
        said = [task.said(answer["text"]) for answer in answers]
        exact, scores = task.marks(said)
        return {
            "task": task.name,
            "tokens": task.length,
            "options": {**self.method.options, **options},
            "accuracy": sum(exact) / len(exact),
            "digits": sum(scores) / len(scores) if "passkey" in task.name else None,
            "target": dict(target) if target and self.method.knobs else None,
            "attention": attention([a["meta_info"][REPORT] for a in answers]) if self.method.reports else None,
            "recall": self._recall(task, answers),
            "scores": [round(score, 3) for score in scores],
            "exact": exact,
            "cells": task.cells,
            "places": task.places,
            "wrong": [
                pair for pair, right in zip(zip(said, task.wanted, strict=True), exact, strict=True) if not right
            ][:8],
            **({} if task.chance is None else {"found": sum(scores) / len(scores), "chance": task.chance}),
            "seconds": {"setup": calibrated - begin, "answers": time.perf_counter() - calibrated},
        }

    def _recall(self, task: QualityTask, answers: Sequence[JsonObject]) -> JsonObject | None:
        """`recall` of a task's evidence; None for a method that finds no blocks, and where evidence is not known."""
        if not self.method.finds or not task.places:
            return None
        sizes = Ltri(**self.method.policy)
        evidence = [blocks_of(place, sizes.sinks, sizes.block) for place in task.places]
        stored = [sizes.evicted(sizes.chunks(0, len(row), len(row))[-1][0]) for row in task.prompts]
        return recall([answer["meta_info"][REPORT] for answer in answers], evidence, stored)

    def perplexity(self, name: str, text: StreamTask) -> JsonObject:
        """A measurement: perplexity of a stream's tokens but the first."""
        begin = time.perf_counter()
        chunks = text.chunks(self.method.reads) if self.method.reads else [text.tokens]
        answers = self.engine.generate(
            input_ids=chunks,
            sampling_params=[{"temperature": 0, "max_new_tokens": ANSWERED}] * len(chunks),
            return_logprob=True,
            logprob_start_len=0,
        )
        values = [
            value for answer in completed(answers) for value, *_ in answer["meta_info"]["input_token_logprobs"][1:]
        ]
        labels = text.labels[1:]
        if len(values) != len(labels):
            raise RuntimeError(f"the engine gave {len(values)} log-probabilities of {len(labels)} tokens")
        size = text.part or -(-len(values) // PARTS)
        kinds = {"all": [True] * len(values), **({"labels": labels} if any(labels) else {})}
        return {
            "task": name,
            "tokens": len(text.tokens),
            "perplexity": {kind: by_bins(values, chosen, len(values))[0] for kind, chosen in kinds.items()},
            "bin": size,
            "bins": {kind: by_bins(values, chosen, size) for kind, chosen in kinds.items()},
            "seconds": {"answers": time.perf_counter() - begin},
        }


def tasks(writer: Writer, settings: Options, method: Method) -> dict[str, QualityTask | StreamTask]:
    """The tasks of a suite by name, but those whose prompts the method cannot read."""
    found: dict[str, QualityTask | StreamTask] = {}
    data, seed, context = settings["data"], settings["seed"], settings["context"]
    sparse_decoding, endless = settings["suite"] == "double_p", method.endless
    if settings["suite"] == "book":
        return {**books(writer, settings)}
    if settings["stream"] and settings["suite"] == "cascade":
        found[f"stream, {settings['stream']} tokens"] = stream(writer, data, settings["stream"], seed)
    make = ruler_tasks if settings["suite"] == "ruler" else key_tasks
    for length in settings["passkey"]:
        if endless or (length <= context and method.reads in (0, context - ANSWERED)):
            found |= {task.name: task for task in make(writer, settings, length)}
    if sparse_decoding:
        for shots in settings["shots"]:
            task = classification(writer, data, shots, settings["queries"], seed, context)
            found[task.name] = task
    return found


def engine_of(settings: Options, method: Method, longest: int) -> Engine:
    """An engine whose pool holds as many requests at a time as the settings say, or more."""
    import torch

    from sglang_ext import Engine

    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    streams = method.backend in STREAMS
    row = method.slots if streams else longest
    on_gpu = torch.cuda.is_available()
    rows = settings["concurrency"] if streams else max(settings["concurrency"] + 1, GPU_ROWS if on_gpu else 0)
    arguments: JsonObject = {
        "model_path": settings["model"],
        "attention_backend": method.backend,
        "policy": dict(method.policy) or None,
        "max_running_requests": settings["concurrency"],
        "max_total_tokens": rows * (row + 64),
        "random_seed": settings["seed"],
        "log_level": "error",
        **({} if streams else {"context_length": settings["context"] + RESERVED}),
        # Of a GPU's memory: several engines share it, and the pool is small beside it.
        **({"mem_fraction_static": 0.5} if on_gpu else {"dtype": "float32"}),
    }
    return Engine(**{**arguments, **settings["engine"]})


def run(job: JsonObject, out: Path) -> None:
    """Measure one method on the tasks of a job, each written when it is done."""
    settings, method = job["settings"], Method(**job["method"])
    writer = Writer(settings["model"])
    todo = {name: task for name, task in tasks(writer, settings, method).items() if name not in job["done"]}
    if not todo:
        return
    longest = max(
        settings["context"], *(t.length + t.new_tokens for t in todo.values() if isinstance(t, QualityTask)), 0
    )
    engine = engine_of(settings, method, min(longest, settings["context"]))
    try:
        asker = Asker(engine, method)
        with out.open("a") as lines:
            for name, task in todo.items():
                if isinstance(task, QualityTask):
                    found = asker.answers(task, job["targets"].get(name))
                else:
                    found = asker.perplexity(name, task)
                lines.write(json.dumps({"method": job["name"], **found}) + "\n")
                lines.flush()
    finally:
        engine.shutdown()


def main() -> int:
    """Run the job of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run(json.loads(args.job.read_text()), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
