"""The kernels' half of ``sglang-ext bench cascade``: one attention layer, Llama-3.1-8B's shape, bfloat16.

A layer goes through a long prompt stride by stride with its cache, index updates, scores and all; the update alone; and
decoding with a full window. Nothing is timed before its output was compared with the reference in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from sglang_ext.kernels.cascade_update import CascadeState
from sglang_ext.kernels.cascade_update import cascade_update as update_anywhere
from sglang_ext.kernels.cells import (
    Cells,
    CountedScores,
    DecodeWorkspace,
    NewTokens,
    dense_impl,
    dispatch,
    reference,
    triton_impl,
)
from sglang_ext.kernels.dense_attention import library_of
from sglang_ext.launch.bench._cascade_layer import (
    TOLERANCE,
    CascadeLayer,
    LayerShape,
    PromptLayer,
    check_prefill,
    check_update,
)
from sglang_ext.launch.bench._gpu import copy_bandwidth, time_gpu, time_turns
from sglang_ext.launch.bench._record import Figure, Timing, at_least, at_most
from sglang_ext.policies.cascade import Cascade

if TYPE_CHECKING:
    from sglang_ext.names import Passed


DENSE_ROWS = 65536
"""Query rows of one call of the dense baseline: a whole prompt's have more components than 32 bits count."""
UPDATE_BATCH, UPDATE_HEADS, UPDATE_TOKENS = 8, 32, 16384
TURNS = 5
"""Times that decoding and dense decoding are measured, one after the other: a GPU is not as fast at any time."""


def _seconds(work: Callable[[], None], repeats: int) -> Timing:
    """Seconds of long work, by events around each of some runs."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return Timing.of(times)


def prefill(cascade: Cascade, tokens: int, device: torch.device, repeats: int = 2) -> list[Figure]:
    """One layer through a long prompt, against dense causal attention; what scores and updates take of a stride."""
    shape = LayerShape()
    full = -(-(cascade.sinks + cascade.window) // cascade.stride) + 1
    errors = check_prefill(CascadeLayer(cascade, shape, 1, device), full + 2)
    layer = CascadeLayer(cascade, shape, 1, device)
    strides = -(-tokens // cascade.stride)
    drawn = [[layer.draw(cascade.stride, n) for n in (shape.heads, shape.kv_heads, shape.kv_heads)] for _ in range(4)]

    prompt = PromptLayer(cascade, shape, device)

    def whole(count: int = strides) -> None:
        prompt.begin()
        for number in range(count):
            prompt.stride(number * cascade.stride, *drawn[number % 4])

    whole(full + 1)  # compiles
    ours = _seconds(whole, repeats)
    layer.skip_to(strides - 1)
    parts = stages(layer, (strides - 1) * cascade.stride, *drawn[0])
    dense = dense_prefill(strides * cascade.stride, device)
    # The update goes over all layers at once in an engine; here it bears its launches alone.
    step = Timing.of([ours.median / strides])
    kept = Timing.of([parts["scores"].median + parts["update"].median])
    notes = {
        "strides": strides,
        "warm_l2": ["update", "lists"],
        "errors": errors,
        "stages_ms": {name: timing.median * 1e3 for name, timing in parts.items()},
        "stride_ms": step.median * 1e3,
    }
    sizes = f"window {cascade.window}, {cascade.cascades} cascades, {cascade.sinks} sinks, stride {cascade.stride}"
    name = f"prefill attention, one layer, {strides * cascade.stride} tokens, {sizes}"
    share = f"score and cache update of a stride, one layer, {sizes}"
    return [
        at_least(name, ours, f"{library_of(device)}, dense causal", dense, 10.0, notes=notes),
        at_most(share, kept, step.median, "the strided prefill attention, caching included", 0.25, notes=notes),
    ]


def stages(
    layer: CascadeLayer, added: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> dict[str, Timing]:
    """Each part of a stride with a full window by itself: inside a CUDA graph, with a cold L2 cache.

    But for the update and the lists: they change a state in place, of which there is one, so its L2 cache is warm.
    """
    kept = layer.rings.kept(added)
    layer.list(added)
    layer.prepare(kept, keys, values)
    _, lse = layer.attend(kept, query)
    return {
        "update": time_gpu(lambda: layer.add(added - layer.rings.stride)),
        "lists": time_gpu(lambda: layer.list(added)),
        "window": time_gpu(lambda k, v: layer.prepare(kept, k, v), keys, values),
        "attention": time_gpu(lambda q: layer.attend(kept, q), query, graph=False),
        "scores": time_gpu(lambda q: layer.score(added, q, lse), query),
    }


def stride_update_seconds(cascade: Cascade, layers: int, kv_heads: int, device: torch.device) -> Timing:
    """Seconds of adding a stride of one request to a full window: all layers and heads at once, as an engine does it.

    Raises:
        ValueError: the kernel's indices differ from the reference's; nothing is timed then.
    """
    rings = cascade.rings
    state = CascadeState.empty(layers, 1, cascade.lanes(kv_heads), rings, device)
    row, stride = (torch.full((1,), value, dtype=torch.int32, device=device) for value in (0, rings.stride))
    before = torch.zeros_like(row)
    update = partial(update_anywhere, state, row, before, stride, rings, selection=cascade.selection)
    generator = torch.Generator(device=device).manual_seed(0)
    for number in range(-(-(cascade.sinks + cascade.window) // cascade.stride) + 2):
        before.fill_(number * rings.stride)
        state.score.uniform_(generator=generator)
        check_update(update, state, row, before, cascade)
    return time_turns(lambda _: update(), 1, device)


def dense_prefill(tokens: int, device: torch.device) -> Timing:
    """Dense causal attention of one layer over a whole prompt, once: it takes seconds.

    In calls of `DENSE_ROWS` query rows over all keys up to their last: the same products and exponentials.
    """
    shape, generator = LayerShape(), torch.Generator(device=device).manual_seed(1)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, shape.dim, generator=generator, device=device, dtype=shape.dtype)

    rows = min(DENSE_ROWS, tokens)
    query, keys, values = draw(rows, shape.heads), draw(tokens, shape.kv_heads), draw(tokens, shape.kv_heads)

    def work() -> None:
        for begin in range(0, tokens, rows):
            end = min(begin + rows, tokens)
            dense_impl.attend(query[: end - begin], keys[:end], values[:end], shape.dim**-0.5)

    dense_impl.attend(query[:1024], keys[:2048], values[:2048], 1.0)  # compiles, or loads what is compiled
    return _seconds(work, 1)


def update(cascade: Cascade, device: torch.device) -> list[Figure]:
    """Tokens into a full window: indices, and new keys and values, against moving all that is kept."""
    shape, batch = LayerShape(heads=UPDATE_HEADS, kv_heads=UPDATE_HEADS), UPDATE_BATCH
    layer = CascadeLayer(cascade, shape, batch, device)
    strides = -(-UPDATE_TOKENS // cascade.stride)
    first = -(-(cascade.sinks + cascade.window) // cascade.stride)
    layer.skip_to(first)
    keys, values = (layer.draw(batch, cascade.stride, shape.kv_heads) for _ in range(2))
    kept = cascade.rings.kept(first * cascade.stride)

    def indices() -> None:
        for number in range(first, first + strides):
            layer.add(number * cascade.stride)
            layer.list((number + 1) * cascade.stride)

    def ours() -> None:
        for number in range(first, first + strides):
            for row in range(batch):
                slot = layer.lists[0, row]
                triton_impl.store(keys[row], values[row], slot, layer.rotation, kept, layer.keys, layer.values)
            layer.add(number * cascade.stride)
            layer.list((number + 1) * cascade.stride)

    whole, alone = time_gpu(ours), time_gpu(indices)
    size = (batch, shape.kv_heads, cascade.sinks + cascade.window, shape.dim)
    caches = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(2)]

    def shift(tokens: int, count: int) -> None:
        for start in range(0, count * tokens, tokens):
            at = start % cascade.stride
            for number, fresh in enumerate((keys, values)):
                new = fresh[:, at : at + tokens].transpose(1, 2)
                old = caches[number]
                sinks, rest = old[:, :, : cascade.sinks], old[:, :, cascade.sinks + tokens :]
                caches[number] = torch.cat([sinks, rest, new], dim=2)

    shift(cascade.stride, 1)
    by_stride = _seconds(lambda: shift(cascade.stride, strides), 5)
    tokens = strides * cascade.stride
    name = f"cache update, {tokens} tokens into a window of {cascade.window}, batch {batch}, {UPDATE_HEADS} heads"
    notes = {
        "indices_alone_ms": alone.median * 1e3,
        "cascades": cascade.cascades,
        "stride": cascade.stride,
        "warm_l2": True,  # one state, changed in place: there is no second one to read instead
    }
    keeping = f"{name}, new keys and values written"
    return [at_least(keeping, whole, "StreamingLLM by concatenation, a stride at a time", by_stride, 3.0, notes=notes)]


class Decoding:
    """A batch that decodes with a full window, in the middle of a stride."""

    def __init__(self, cascade: Cascade, batch: int, device: torch.device, shape: LayerShape | None = None) -> None:
        self.shape = shape or LayerShape()
        self.layer = CascadeLayer(cascade, self.shape, batch, device)
        strides = 2 * -(-(cascade.sinks + cascade.window) // cascade.stride) + 3
        self.layer.skip_to(strides)  # so that cells are as mixed as they become
        self.seen = self.layer.rings.kept(strides * cascade.stride) + cascade.stride // 2
        self.skip = self.layer.number(self.layer.rings.settled(strides * cascade.stride))
        query = self.layer.draw(batch, self.shape.heads)
        self.tokens = NewTokens(query, *(self.layer.draw(batch, self.shape.kv_heads) for _ in range(2)))
        self.columns, self.fresh = self.layer.number(self.seen), self.layer.number(1)

    def workspace(self, multiprocessors: int) -> DecodeWorkspace:
        shape, layer, batch = self.shape, self.layer, self.tokens.query.shape[0]
        width = layer.rings.entries
        shares = dispatch.splits(batch, shape.heads, layer.keys, layer.values, layer.rotation, width, multiprocessors)
        return DecodeWorkspace.empty(batch, shape.heads, shape.kv_heads, shape.dim, width, shares, layer.device, True)

    def scores(self) -> CountedScores:
        layer = self.layer
        return CountedScores(
            score=layer.state.score[0],
            entries=layer.entries,
            skip=self.skip,
            fresh=self.fresh,
            beta=layer.cascade.decay,
            reduction=layer.cascade.head_reduction,
        )

    def run(
        self, decode: Callable[..., torch.Tensor], keys: torch.Tensor, values: torch.Tensor, **more: Passed
    ) -> torch.Tensor:
        """`decode` of the new tokens over some caches."""
        layer = self.layer
        return decode(
            self.tokens,
            Cells(keys, values, layer.lists[0]),
            layer.rows,
            self.columns,
            layer.rotation,
            layer.scale,
            **more,
        )

    def check(self, **more: Passed) -> dict[str, float]:
        """Errors beside the reference: (output, scores).

        Raises:
            ValueError: one is larger than the tolerance; nothing is timed then.
        """
        layer = self.layer
        before = layer.state.score.clone()
        layer.state.score.zero_()  # what one query adds is small beside scores
        got = self.run(dispatch.decode, layer.keys, layer.values, scores=self.scores(), **more)
        scored = layer.state.score.clone()
        layer.state.score.zero_()
        wanted = self.run(reference.decode, layer.keys, layer.values, scores=self.scores())
        errors = {
            "output": float((got - wanted).abs().max() / wanted.abs().max()),
            "scores": float((scored - layer.state.score).abs().max() / layer.state.score.max()),
        }
        layer.state.score[:] = before
        if not errors["output"] <= TOLERANCE or not errors["scores"] <= TOLERANCE:
            raise ValueError(f"decoding is wrong by {errors} (at most {TOLERANCE}): not timed")
        return errors


def dense_decode(decoding: Decoding) -> dict[str, Callable[..., None]]:
    """FlashInfer's paged decoding of as many tokens, with and without tensor cores: functions of (keys, values)."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    query = decoding.tokens.query
    layer, shape, batch = decoding.layer, decoding.shape, query.shape[0]
    found: dict[str, Callable[..., None]] = {}
    for name, cores in (("tensor cores", True), ("CUDA cores", False)):
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=layer.device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=cores)
        indptr = torch.arange(batch + 1, dtype=torch.int32, device=layer.device) * decoding.seen
        wrapper.plan(
            indptr,
            layer.slots[:, : decoding.seen].reshape(-1).contiguous(),
            torch.ones(batch, dtype=torch.int32, device=layer.device),
            shape.heads,
            shape.kv_heads,
            shape.dim,
            1,
            pos_encoding_mode="NONE",
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            sm_scale=layer.scale,
        )

        def run(
            keys: torch.Tensor, values: torch.Tensor, wrapper: BatchDecodeWithPagedKVCacheWrapper = wrapper
        ) -> None:
            wrapper.run(query, (keys.unsqueeze(1), values.unsqueeze(1)))

        found[name] = run
    return found


def decode(cascade: Cascade, batches: Sequence[int], device: torch.device, bandwidth: float) -> list[Figure]:
    """Decoding with a full window, the new token stored and its query counted, against dense decoding."""
    figures = []
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    for batch in batches:
        decoding = Decoding(cascade, batch, device)
        layer = decoding.layer
        workspace = decoding.workspace(multiprocessors)
        errors = decoding.check(workspace=workspace)

        def work(keys: torch.Tensor, values: torch.Tensor, decoding: Decoding = decoding, **more: Passed) -> None:
            decoding.run(dispatch.decode, keys, values, **more)

        scored = {"workspace": workspace, "scores": decoding.scores()}
        plain = {"workspace": workspace}
        bare = time_gpu(lambda k, v, work=work, more=plain: work(k, v, **more), layer.keys, layer.values)
        rivals = {"ours": lambda k, v, work=work, more=scored: work(k, v, **more), **dense_decode(decoding)}
        times: dict[str, list[float]] = {name: [] for name in rivals}
        for _ in range(TURNS):
            for name, rival in rivals.items():
                times[name].append(time_gpu(rival, layer.keys, layer.values, milliseconds=100).median)
        times_of_ours = times.pop("ours")
        ours = Timing.of(times_of_ours)
        dense = {name: Timing.of(each) for name, each in times.items()}
        best = min(dense, key=lambda name: dense[name].median)
        floor = batch * decoding.seen * 2 * layer.shape.kv_heads * layer.shape.dim * 2 / bandwidth
        notes = {
            "batch": batch,
            "columns": decoding.seen,
            "errors": errors,
            "without_scores_ms": bare.median * 1e3,
            "dense_ms": {name: timing.median * 1e3 for name, timing in dense.items()},
            "turns": TURNS,
            "ratios": [own / other for own, other in zip(times_of_ours, times[best], strict=True)],
            "floor_ms": floor * 1e3,
            "shares": workspace.parts.shape[2],
        }
        name = f"decode attention, one layer, {decoding.seen} tokens kept, batch {batch}"
        aim = 1.35 if batch == 1 else 1.2 if batch >= 8 else None
        words = f"FlashInfer, dense, as many tokens ({best})"
        figures.append(at_most(name, ours, dense[best].median, words, aim, notes=notes))
    return figures


def measure(device: torch.device, cascade: Cascade, tokens: int, batches: Sequence[int]) -> list[Figure]:
    """All rows of the kernels' half."""
    bandwidth = copy_bandwidth(device)
    return [*prefill(cascade, tokens, device), *update(cascade, device), *decode(cascade, batches, device, bandwidth)]
