"""The kernels' half of ``sglang-ext bench double_p``: attention of one decode layer, Llama-3.1-8B's shape.

Keys are planted in clusters; how, is said at `Planted`. They are clustered by the k-means that serves requests. Nothing
is timed before its output was compared with the references in the same run; kept fractions and the recovered mass
stand beside every time. Dense attention is FlashInfer's paged decode over pages of one token, as SGLang runs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sglang_ext.kernels.cluster_attention.types import HeadShape
from sglang_ext.launch.bench._double_p_rows import LEVELS, SHAPES, Planted, cluster_on, layers
from sglang_ext.launch.bench._double_p_step import ClusterBenchStep, DenseStep
from sglang_ext.launch.bench._gpu import copy_bandwidth, time_turns
from sglang_ext.launch.bench._record import Figure, Timing, at_least, at_most, thousands
from sglang_ext.policies.double_p import DoubleP
from sglang_ext.types import JsonObject


@dataclass(frozen=True)
class Case:
    """One measured configuration.

    Attributes:
        batch, length, level: which.
        ours, dense: seconds a layer.
        dense_name: which dense attention.
        floor: seconds that the bytes take at copy bandwidth; None without a GPU.
        shares: from `ClusterBenchStep.shares`.
        notes: errors, what else was measured.
        reading: seconds of attention and merge alone; None without a GPU. What the step takes longer, scores and
            selection add.
    """

    batch: int
    length: int
    level: str
    ours: Timing
    dense: Timing
    dense_name: str
    floor: float | None
    shares: dict[str, float]
    notes: JsonObject
    reading: Timing | None

    @property
    def name(self) -> str:
        return f"{self.level} planted keys, batch {self.batch}, {thousands(self.length)}"


def dense_aim(batch: int, length: int, shares: dict[str, float]) -> float | None:
    """How many times faster than dense a case is to be; None: nothing was aimed at."""
    exact, approx = round(shares["exact"], 2), round(shares["approx"], 2)
    if batch == 8 and length in (65536, 131072) and exact <= 0.08 and approx <= 0.35:
        return 5.3
    if batch == 1 and length == 131072 and exact <= 0.09 and approx <= 0.36:
        return 2.5
    return None


def figures_of(case: Case) -> list[Figure]:
    """The rows of a case."""
    notes = {**case.shares, **case.notes}
    aim = dense_aim(case.batch, case.length, case.shares)
    kept = f"{case.shares['exact']:.2f} exact, {case.shares['approx']:.2f} by centroid"
    name = f"decode attention, one layer, {case.name} ({kept}, recovered {case.shares['recovered']:.3f})"
    figures = [at_least(name, case.ours, case.dense_name, case.dense, aim, notes=notes)]
    if case.floor is not None:
        figures.append(at_most(f"{case.name}: the step", case.ours, case.floor, "centroids and kept set", 1.45))
    if case.reading is not None:
        whole, rest = case.ours.median, case.reading.median
        notes = {"attention_and_merge_alone_ms": rest * 1e3}
        spent = Timing.of([max(0.0, whole - rest)])
        words = f"{case.name}: scores and selection, what they add"
        figures.append(at_most(words, spent, whole, "the step", 0.35, notes=notes))
    return figures


def cases(
    shape: HeadShape, lengths: Sequence[int], batches: Sequence[int], config: DoubleP, device: torch.device
) -> list[Case]:
    """Every level at every length and batch."""
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else None
    found: list[Case] = []
    for step in _steps(shape, lengths, batches, config, device):
        planted, batch = step.planted, step.batch
        dense_name, dense = DenseStep(step).time()  # as long on every level
        wide = apart = None
        if device.type == "cuda":
            wide = ClusterBenchStep(planted, batch, step.copies, engine_room=True)
            apart = ClusterBenchStep(planted, batch, step.copies, engine_room=True, joint=False)
        for name, level in LEVELS.items():
            step.ask(level)
            errors, shares = step.check(), step.shares()
            notes = {
                "errors": errors,
                "layers": len(step.copies),
                "planted_found": getattr(planted, "agreed", None),
                "level": vars(level),
                "p": list(config.stages),
                "summaries_of_kv": planted.summary_bytes / planted.kv_bytes,
            }
            floor = None if bandwidth is None else step.floor_bytes() / bandwidth
            if bandwidth is not None:
                notes["copy_tb_s"] = bandwidth * 1e-12
            ours = time_turns(step.run, len(step.copies), device)
            reading: Timing | None = None
            if wide is not None and apart is not None:
                notes["apart_because"] = wide.joint_refused()
                reading = time_turns(step.read_again, len(step.copies), device)
                for note, other in (("engine_room_ms", wide), ("engine_room_apart_ms", apart)):
                    other.ask(level)
                    other.check()
                    notes[note] = time_turns(other.run, len(other.copies), device).median * 1e3
            found.append(Case(batch, planted.length, name, ours, dense, dense_name, floor, shares, notes, reading))
            print(_line(found[-1]), flush=True)
        del step, planted, wide, apart
    return found


def _line(case: Case) -> str:
    shares, ours = case.shares, case.ours.median
    floor = "" if case.floor is None else f"floor {case.floor * 1e3:.4f} ({ours / case.floor:.2f}x), "
    return (
        f"{case.name}: {ours * 1e3:.4f} ms (engine's buffers: {case.notes.get('engine_room_ms', math.nan):.4f}, "
        f"scores and selection apart there: {case.notes.get('engine_room_apart_ms', math.nan):.4f}), "
        f"dense {case.dense.median * 1e3:.4f} ({case.dense.median / ours:.2f}x), {floor}exact {shares['exact']:.3f}, "
        f"by centroid {shares['approx']:.3f}, recovered {shares['recovered']:.4f} (5%: {shares['recovered_p5']:.4f})"
    )


def _steps(
    shape: HeadShape, lengths: Sequence[int], batches: Sequence[int], config: DoubleP, device: torch.device
) -> Iterator[ClusterBenchStep]:
    for length in lengths:
        planted = Planted(length, max(batches), shape, config, device, cluster_on(device))
        for batch in batches:
            yield ClusterBenchStep(planted, batch, layers(planted, batch))
        del planted


def measure(
    device: torch.device, shape: str, lengths: Sequence[int], batches: Sequence[int], config: DoubleP
) -> list[Figure]:
    """All rows of the kernels' half."""
    return [row for case in cases(SHAPES[shape], lengths, batches, config, device) for row in figures_of(case)]
