"""A layer of a decoding step of `bench double_p`, and dense attention beside it; neither is timed while it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from sglang_ext.kernels.cluster_attention import ClusterReads, ClusterRows, DenseTokens, joint_impl, reference
from sglang_ext.kernels.cluster_attention.buffers import RowBuffers
from sglang_ext.kernels.cluster_attention.rows import PlannedRow, RowCapacity
from sglang_ext.kernels.cluster_attention.types import TUNING, ClusterTuning
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.top_p import SearchedClusters, Selection, SetRule
from sglang_ext.kernels.top_p import select as select_by_sorting
from sglang_ext.kernels.top_p.types import TUNING as SEARCH
from sglang_ext.kernels.top_p.types import TopPTuning
from sglang_ext.launch.bench._double_p_rows import WIDTH, CachedRows, ClusteredLayer, Level, true_logits
from sglang_ext.launch.bench._gpu import time_turns
from sglang_ext.launch.bench._record import Timing
from sglang_ext.policies.double_p import DoubleP, recovered_mass

TOLERANCE = 2e-2
"""Half precision, of the largest value of the reference."""

EDGE = 0.01
"""Share of the clusters by which the kernels' selection may differ from sorting: rounded masses at the threshold."""


def tunings(device: torch.device) -> tuple[ClusterTuning, TopPTuning]:
    """Those of `attention.readers.clusters`; small ones for Triton's interpreter."""
    if device.type == "cuda":
        from sglang_ext.attention.readers.clusters import PROGRAMS

        sms = torch.cuda.get_device_properties(device).multi_processor_count
        return replace(TUNING, programs=PROGRAMS * sms), SEARCH
    return replace(TUNING, programs=5, registers=None), replace(SEARCH, joint=False)


def _engine_capacity(batch: int, config: DoubleP) -> RowCapacity:
    """What `attention.readers.clusters` allocates for `double_p`'s CUDA graphs of so many rows."""
    from sglang_ext.attention.readers.clusters import GRAPH_TOKENS, graph_capacity

    return graph_capacity(batch, GRAPH_TOKENS, config.cluster * WIDTH, over_pools=False)


class ClusterBenchStep:
    """One layer of a decoding step over planted rows, through what the engine's backend calls."""

    def __init__(
        self,
        planted: CachedRows,
        batch: int,
        copies: Sequence[ClusteredLayer],
        engine_room: bool = False,
        *,
        rule: SetRule | None = None,
        joint: bool = True,
        fused: bool = TUNING.fused,
    ) -> None:
        """Args: as named; engine_room: buffers as large as the engine's for CUDA graphs, not as the batch needs.

        rule: which clusters a row keeps (default: the configuration's); where it counts clusters, `keep` tells how
        many; joint: scores and selection in one kernel, where that runs (`joint_refused`); fused: attention and merge
        likewise.
        """
        self.planted, self.batch, self.copies = planted, batch, copies
        self.rule, self.stages = rule or SetRule(planted.config.group), planted.config.stages
        device, shape = planted.device, planted.shape
        rows, lengths = self._rows()
        frequency = 500000.0 ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
        how, search = tunings(device)
        capacity = RowCapacity.of(rows, lengths)
        self.buffers = RowBuffers(
            capacity.joined(_engine_capacity(batch, planted.config)) if engine_room else capacity,
            shape,
            Rope(frequency.float().to(device)),
            WIDTH,
            rule=self.rule,
            tuning=replace(how, joint=joint, fused=fused),
            search=search,
        )
        self.keep(*self.stages)
        self.query = torch.empty(batch, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
        self.ask()

    def _rows(self) -> tuple[list[PlannedRow], list[int]]:
        rows = [replace(self.planted.row(number), p=self.stages) for number in range(self.batch)]
        return rows, [self.planted.length] * self.batch

    def keep(self, first: float, second: float) -> None:
        """Have every row keep so much from now on: (p1, p2), or the numbers of clusters."""
        self.stages = (first, second)
        planted, device = self.planted, self.planted.device
        rows, lengths = self._rows()
        table = torch.arange(self.batch * planted.length, dtype=torch.int32, device=device)
        self.buffers.load(rows, lengths, table)
        ends = torch.tensor(lengths, device=device)
        self.buffers.advance(ends, torch.arange(1, self.batch + 1, device=device) * planted.length - 1)

    def ask(self, level: Level | None = None) -> None:
        """Queries of a level (of rows that have levels) for the runs to come: the same at every call."""
        self.query.copy_(self.planted.queries(level)[: self.batch])

    def run(self, turn: int = 0) -> torch.Tensor:
        layer = self.copies[turn]
        return self.buffers.attend(self.query, layer.keys, layer.values, layer.pool, self.planted.scale)

    def read_again(self, turn: int = 0) -> torch.Tensor:
        """Attention alone, to what the last `run` chose: the copies are alike."""
        layer = self.copies[turn]
        return self.buffers.read_again(self.query, layer.keys, layer.values, layer.pool, self.planted.scale)

    def check(self) -> dict[str, float]:
        """Errors of the last row: {"logits", "selection", "output"}, of the largest value or of the clusters.

        Raises:
            ValueError: one of them is larger than `TOLERANCE` or `EDGE`; nothing is timed then.
        """
        out = self.run()
        layer, planted, last = self.copies[0], self.planted, self.batch - 1
        selection, logits = self.buffers.chosen(self.batch)
        chosen, logits, query = (
            selection.of(slice(last, last + 1)),
            logits[last : last + 1],
            self.query[last : last + 1],
        )
        device, whole = planted.device, planted.row(last)
        rows = ClusterRows(
            torch.tensor(whole.tiles, device=device).unsqueeze(0),
            torch.tensor([planted.tiles], dtype=torch.int32, device=device),
        )
        slots = torch.arange(last * planted.length, (last + 1) * planted.length, dtype=torch.int32, device=device)
        own = torch.cat([slots[: planted.begin], slots[planted.end :]])
        dense = DenseTokens(own.unsqueeze(0), torch.tensor([len(own)], dtype=torch.int32, device=device))
        rotated = query.double().unsqueeze(1)
        expected, sizes, starts = reference.centroid_scores(rotated, layer.pool, rows, planted.scale)
        logits = logits[..., : expected.shape[-1]]  # buffers may be wider
        filled = sizes.unsqueeze(2).expand_as(expected) > 0
        errors = {"logits": relative_error(logits[filled], expected[filled])}
        cells = torch.tensor([planted.tiles * WIDTH], dtype=torch.int32, device=device)
        p = torch.tensor([self.stages], dtype=torch.float64, device=device)
        clusters = SearchedClusters(sizes, starts, cells)
        sorted_out = select_by_sorting(logits.double(), clusters, p, rule=self.rule)
        errors["selection"] = difference(chosen, sorted_out, int(cells))
        reads = ClusterReads(rows, dense, chosen, logits)
        wanted, _ = reference.cluster_attention(rotated, layer.keys, layer.values, layer.pool, reads, planted.scale)
        errors["output"] = relative_error(out[last : last + 1], wanted)
        for name, most in (("logits", TOLERANCE), ("selection", EDGE), ("output", TOLERANCE)):
            if not errors[name] <= most:
                raise ValueError(f"the kernels' {name} are wrong by {errors[name]:.2g} (at most {most}): not timed")
        return errors

    def joint_refused(self) -> str | None:
        """Why scores and selection are not one kernel here, or None where they are."""
        rotated, pool = self.query.unsqueeze(1), self.copies[0].pool
        return joint_impl.refusal(rotated, pool, self.buffers.clusters(self.batch), group=self.rule.group)

    def shares(self, sampled: int = 4) -> dict[str, float]:
        """What the last run kept, means over rows and key-value heads, and the true attention that it recovered.

        `exact`: share of the clustered tokens that a group of heads reads; `approx`: share of the clusters that it
        reads by their centroid; `kept` and `kept_tokens`, both together, of the clusters and of the tokens;
        `recovered`, of the true attention (float32, sinks and window counted): mean, 5th percentile, least over the
        query heads of at most `sampled` rows. `read_p5` likewise, of what is read token by token alone.
        """
        self.run()
        selection, _ = self.buffers.chosen(self.batch)
        counts = selection.counts.double()
        exact, tokens, approx, clusters = (counts[..., n] for n in range(4))
        planted = self.planted
        numbers = sorted({round(n) for n in np.linspace(0, self.batch - 1, min(sampled, self.batch))})
        mass, read, kept_tokens = [], [], []
        for row in numbers:
            both = _mask(selection.of(slice(row, row + 1)), planted.tiles * WIDTH)[0]
            kept = both.any(0)
            labels = planted.labels[row].long()
            x = true_logits(planted, self.query, row)
            dense = torch.cat([x[..., : planted.begin], x[..., planted.end :]], -1)
            middle = x[..., planted.begin : planted.end]
            mass.append(recovered_mass(middle, labels, kept, dense).flatten())
            read.append(recovered_mass(middle, labels, both[0], dense).flatten())
            kept_tokens.append(kept.gather(1, labels).double().mean())
        recovered = torch.cat(mass)
        return {
            "exact": float((tokens / (planted.end - planted.begin)).mean()),
            "approx": float((approx / clusters).mean()),
            "kept": float(((exact + approx) / clusters).mean()),
            "kept_tokens": float(torch.stack(kept_tokens).mean()),
            "recovered": float(recovered.mean()),
            "recovered_p5": float(recovered.quantile(0.05)),
            "recovered_least": float(recovered.min()),
            "read_p5": float(torch.cat(read).quantile(0.05)),
        }

    def floor_bytes(self) -> float:
        """What a step must read: every centroid; mean values of the approximated clusters; exact keys and values."""
        selection, _ = self.buffers.chosen(self.batch)
        _, tokens, approx, clusters = (float(selection.counts[..., n].double().sum()) for n in range(4))
        shape, planted = self.planted.shape, self.planted
        own = self.batch * shape.kv_heads * (planted.length - planted.end + planted.begin)
        vectors = approx * shape.value_dim + (tokens + own) * (shape.head_dim + shape.value_dim)
        return vectors * shape.dtype.itemsize + clusters * shape.head_dim * planted.pool.centroids.itemsize


def _mask(selection: Selection, cells: int) -> torch.Tensor:
    """[batch, 2 (exact, approximated), kv_heads, cells] bool."""
    batch, kv_heads, _ = selection.counts.shape
    mask = torch.zeros(batch, 2, kv_heads, cells + 1, dtype=torch.bool, device=selection.counts.device)
    place = torch.arange(selection.exact.shape[-1], device=mask.device)
    for which, (listed, column) in enumerate(((selection.exact, 0), (selection.approx, 2))):
        named = torch.where(place < selection.counts[..., column : column + 1], listed.long(), cells)
        mask[:, which].scatter_(-1, named, True)
    return mask[..., :cells]


def difference(one: Selection, other: Selection, cells: int) -> float:
    """Share of the clusters that two selections read differently, the worst head's."""
    return float((_mask(one, cells) != _mask(other, cells)).any(1).double().mean(-1).max())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(error.nan_to_num(float("inf")))


class DenseStep:
    """FlashInfer's paged decode over all tokens, page size 1; plain PyTorch where there is no GPU."""

    def __init__(self, step: ClusterBenchStep) -> None:
        self.step, self.planted = step, step.planted
        self.out = torch.empty(
            step.batch, self.planted.shape.heads, self.planted.shape.value_dim, dtype=step.query.dtype,
            device=self.planted.device,
        )  # fmt: skip

    def _flashinfer(self) -> Callable[[int], None]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        step, planted, shape, device = self.step, self.planted, self.planted.shape, self.planted.device
        workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
        # Tensor cores, as SGLang decodes where four heads or more share keys.
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        bounds = torch.arange(step.batch + 1, dtype=torch.int32) * planted.length
        slots = torch.arange(step.batch * planted.length, dtype=torch.int32, device=device)
        last = torch.ones(step.batch, dtype=torch.int32)
        wrapper.plan(
            bounds, slots, last, shape.heads, shape.kv_heads, shape.head_dim, 1, q_data_type=shape.dtype,
            kv_data_type=shape.dtype, sm_scale=planted.scale,
        )  # fmt: skip

        def run(turn: int) -> None:
            layer = step.copies[turn]
            wrapper.run(step.query, (layer.keys.unsqueeze(1), layer.values.unsqueeze(1)), out=self.out)

        return run

    def _plain(self, turn: int) -> None:
        step, layer, shape = self.step, self.step.copies[turn], self.planted.shape
        for row in range(step.batch):
            part = slice(row * self.planted.length, (row + 1) * self.planted.length)
            weights = torch.softmax(true_logits(self.planted, step.query, row), -1)
            out = torch.einsum("hgt,thd->hgd", weights, layer.values[part].float())
            self.out[row] = out.reshape(shape.heads, -1).to(self.out.dtype)

    def check(self, run: Callable[[int], None]) -> None:
        self.out.fill_(float("nan"))
        run(0)
        last = self.step.batch - 1
        weights = torch.softmax(true_logits(self.planted, self.step.query, last), -1)
        values = self.planted.values[last * self.planted.length : (last + 1) * self.planted.length].float()
        expected = torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1)
        error = relative_error(self.out[last], expected)
        if not error <= TOLERANCE:
            raise ValueError(f"dense attention is wrong by {error:.2g} of the largest value: not timed")

    def time(self) -> tuple[str, Timing]:
        """(name, seconds a layer)."""
        device = self.planted.device
        gpu = device.type == "cuda"
        name = "dense FlashInfer" if gpu else "dense PyTorch, no GPU"
        run: Callable[[int], None] = self._flashinfer() if gpu else self._plain
        self.check(run)
        return name, time_turns(run, len(self.step.copies), device)
