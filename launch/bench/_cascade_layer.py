"""One layer of a cascading KV cache for ``sglang-ext bench cascade``: an engine's own stride, and its parts beside it.

The whole stride is that of the product (`attention.cascade_rows`); its parts are called one by one here, to be timed
and compared with their references.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from sglang_ext.attention.cascade_rows import Attend, Rows
from sglang_ext.compat import AttentionShape
from sglang_ext.kernels import dense_attention
from sglang_ext.kernels.cascade_update import CascadeState, stride_update
from sglang_ext.kernels.cascade_update.triton_impl import cascade_update
from sglang_ext.kernels.cells import Rotation, dense_impl, empty_lists, reference, triton_impl
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.score_update import CountedQueries, KeptScores
from sglang_ext.kernels.score_update.reference import update_scores as exact_scores
from sglang_ext.kernels.score_update.triton_impl import update_scores
from sglang_ext.policies.cascade import Cascade

HEADS, KV_HEADS, DIM = 32, 8, 128
TOLERANCE = 2e-2  # bfloat16, of the largest value of the reference
SCORE_TOLERANCE = 1e-3  # of the largest score: keys are the same numbers in both, products are added in float32


@dataclass(frozen=True)
class LayerShape:
    """Heads of a layer, and its number type."""

    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM
    dtype: torch.dtype = torch.bfloat16


class CascadeLayer:
    """One layer in parts, which are timed and checked one by one: caches, state and lists of some requests.

    Args:
        cascade: the settings.
        shape: of the layer.
        requests: how many, each in a row of the state of its own.
        device: of everything.
    """

    def __init__(self, cascade: Cascade, shape: LayerShape, requests: int, device: torch.device, seed: int = 0) -> None:
        self.cascade, self.shape, self.device, self.scale = cascade, shape, device, shape.dim**-0.5
        rings = self.rings = cascade.rings
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.state = CascadeState.empty(1, requests, cascade.lanes(shape.kv_heads), rings, device)
        self.lists = empty_lists(self.state)
        self.rotation = rotation_of(shape, device)
        self.rows = torch.arange(requests, dtype=torch.int32, device=device)
        self.slots = torch.arange(requests * rings.entries, dtype=torch.int32, device=device).view(requests, -1)
        self.keys, self.values = (self.draw(self.slots.numel(), shape.kv_heads) for _ in range(2))
        self.window = [torch.empty_like(self.keys[: rings.entries]) for _ in range(2)]
        self.entries = torch.empty(0)

    def draw(self, *size: int) -> torch.Tensor:
        """Random numbers [*size, head_dim] of the layer's type."""
        drawn = torch.randn(*size, self.shape.dim, generator=self.generator, device=self.device)
        return drawn.to(self.shape.dtype)

    def number(self, value: int) -> torch.Tensor:
        """One number a request, made on the device: copies from the host would wait for it."""
        return torch.full((self.rows.numel(),), value, dtype=torch.int32, device=self.device)

    def add(self, before: int) -> None:
        """Add the stride that began with token `before` to the sub-caches."""
        stride = self.number(self.rings.stride)
        cascade_update(self.state, self.rows, self.number(before), stride, self.rings, self.cascade.selection)

    def list(self, added: int) -> None:
        """Write down what the stride sees that begins with token `added`."""
        now = self.number(added)
        self.entries = triton_impl.columns(self.rings, now, now + self.rings.stride, self.rings.entries)
        triton_impl.list_columns(self.lists, self.state, self.rows, self.entries, self.slots, self.rings)

    def skip_to(self, strides: int) -> None:
        """Let so many strides pass by with random scores: indices alone, from the beginning."""
        for number in range(strides):
            self.list(number * self.rings.stride)
            self.state.score.uniform_(generator=self.generator)
            self.add(number * self.rings.stride)
        self.list(strides * self.rings.stride)

    def prepare(self, kept: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The window and the stride's own keys and values behind it; the latter into their cells, too."""
        slot = self.lists[0, 0]
        triton_impl.gather(self.keys, self.values, slot, self.rotation, kept, *self.window)
        triton_impl.store(keys, values, slot, self.rotation, kept, self.keys, self.values, *self.window)

    def attend(self, kept: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the stride over [window | itself, causal]."""
        seen = kept + query.shape[0]
        attend = attention_of(self.shape, self.device)
        return attend(query, self.window[0][:seen], self.window[1][:seen], self.scale)

    def score(self, added: int, query: torch.Tensor, lse: torch.Tensor) -> None:
        """Count the stride's queries in the scores."""
        kept, counted = self.rings.kept(added), self.cascade.counted(added, added + query.shape[0])
        seen = kept + query.shape[0]
        update_scores(
            KeptScores(
                score=self.state.score[0],
                entries=self.entries[:1, :seen],
                rows=self.rows[:1],
                skip=self.number(self.rings.settled(added))[:1],
            ),
            CountedQueries(
                query=query[counted.start - added :: counted.step].unsqueeze(0),
                keys=self.window[0][:seen].transpose(0, 1).unsqueeze(0),
                lse=lse[counted.start - added :: counted.step].unsqueeze(0),
                before=self.number(kept + counted.start - added)[:1],
                count=self.number(len(counted))[:1],
                scale=self.scale,
                every=counted.step,
            ),
            beta=self.cascade.decay,
            reduction=self.cascade.head_reduction,
        )


class PromptLayer:
    """One layer of an engine's stream (`attention.cascade_rows`), which reads a long prompt stride by stride.

    Args:
        cascade: the settings.
        shape: of the layer.
        device: of everything.
    """

    def __init__(self, cascade: Cascade, shape: LayerShape, device: torch.device) -> None:
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        sizes = shape.heads, shape.kv_heads, shape.dim, shape.dim
        self.shape = AttentionShape(*sizes, shape.dtype, shape.dim**-0.5, multiprocessors)
        self.rows = Rows(cascade, 1, (1, 0), self.shape, rotation_of(shape, device), device)
        self.slots = torch.arange(cascade.slots, dtype=torch.int32, device=device).unsqueeze(0)
        size = cascade.slots, shape.kv_heads, shape.dim
        zeros = torch.zeros(size, dtype=shape.dtype, device=device)
        self.caches = zeros, zeros.clone()
        self.attend = attention_of(shape, device)
        self.stream = self.rows.begin()

    def begin(self) -> None:
        """Forget the prompt so far."""
        self.stream.close()
        self.stream = self.rows.begin()

    def stride(self, added: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Tokens [added, added + rows), one whole stride: attended to, scored and kept. [rows, heads, value_dim]."""
        (step,) = self.stream.steps(added, added + query.shape[0])
        shown = self.rows.show(step)
        self.rows.open(self.stream.row, step, shown, self.slots)
        given = query, (keys, values), self.caches, self.shape.scale, self.attend
        return self.rows.prefill(0, self.stream.row, step, shown, *given)


def rotation_of(shape: LayerShape, device: torch.device) -> Rotation:
    """Llama-3.1's rotation, without its scaling of low frequencies."""
    frequency = 500000.0 ** (-torch.arange(0, shape.dim, 2, dtype=torch.float64) / shape.dim)
    return Rotation.of(Rope(frequency.float().to(device)))


def attention_of(shape: LayerShape, device: torch.device) -> Attend:
    """Dense kernels' attention where they serve the layer, plain PyTorch elsewhere."""
    fast = dense_attention.serves(shape.dim, shape.dtype, device)
    return dense_impl.attend if fast else reference.attend


def check_update(
    update: Callable[[], None], state: CascadeState, rows: torch.Tensor, before: torch.Tensor, cascade: Cascade
) -> None:
    """Run `update`, which is to add the stride that began with token `before`, beside its reference.

    Raises:
        ValueError: an index or a score differs; nothing is timed then.
    """
    wanted = CascadeState(*(array.clone() for array in vars(state).values()))
    update()
    count = torch.full_like(before, cascade.rings.stride)
    stride_update(wanted, rows, before, count, cascade.rings, cascade.selection)
    if not all(torch.equal(a, b) for a, b in zip(vars(state).values(), vars(wanted).values(), strict=True)):
        raise ValueError(f"stride at token {int(before[0])}: the cache update differs from its reference: not timed")


def check_prefill(layer: CascadeLayer, strides: int, rows: int = 64) -> dict[str, float]:
    """Run some strides, each step, and the engine's own stride, beside the reference; the largest errors.

    Raises:
        ValueError: one is larger than the tolerance, or an index differs; nothing is timed then.
    """
    rings, shape, worst = layer.rings, layer.shape, {"window": 0.0, "attention": 0.0, "scores": 0.0}
    prompt = PromptLayer(layer.cascade, shape, layer.device)

    def note(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
        error = float(((got.double() - wanted.double()).abs().max() / wanted.abs().max()).nan_to_num(float("inf")))
        worst[name] = max(worst[name], error)
        if error > tolerance:
            raise ValueError(f"{name}: wrong by {error:.2g} of the largest value (at most {tolerance}): not timed")

    for number in range(strides):
        added = number * rings.stride
        kept = rings.kept(added)
        seen = kept + rings.stride
        query, keys, values = (layer.draw(rings.stride, n) for n in (shape.heads, shape.kv_heads, shape.kv_heads))
        if number:
            last = added - rings.stride
            check_update(partial(layer.add, last), layer.state, layer.rows, layer.number(last), layer.cascade)
        layer.list(added)
        wanted = empty_lists(layer.state)
        reference.list_columns(wanted, layer.state, layer.rows, layer.entries, layer.slots, rings)
        now = layer.number(added)
        if not (
            torch.equal(layer.entries, rings.columns(now, now + rings.stride, rings.entries))
            and torch.equal(layer.lists, wanted)
        ):
            raise ValueError(f"stride {number}: the lists differ from their reference: not timed")
        layer.prepare(kept, keys, values)
        expected = [torch.empty_like(part) for part in layer.window]
        reference.gather(layer.keys, layer.values, wanted[0, 0], layer.rotation, seen, *expected)
        for part, whole in zip(layer.window, expected, strict=True):
            note("window", part[:seen], whole[:seen], TOLERANCE)
        out, lse = layer.attend(kept, query)
        exact_keys, exact_values = (part[:seen].double() for part in expected)
        own, levels = reference.attend(query[-rows:].double(), exact_keys, exact_values, layer.scale)
        note("attention", out[-rows:], own, TOLERANCE)
        note("attention", lse[-rows:], levels, TOLERANCE)
        note("attention", prompt.stride(added, query, keys, values)[-rows:], own, TOLERANCE)
        score = layer.state.score[0, :1, :1].clone()
        layer.score(added, query, lse)
        group = shape.heads // shape.kv_heads
        counted, every = layer.cascade.counted(added, added + rings.stride), layer.cascade.score_every
        some = slice(counted.start - added, None, every)
        exact_scores(
            KeptScores(
                score=score,
                entries=layer.entries[:1, :seen].contiguous(),
                rows=layer.rows[:1],
                skip=layer.number(rings.settled(added))[:1],
            ),
            CountedQueries(
                query=query[None, some, :group].float(),
                keys=layer.window[0][:seen, :1].transpose(0, 1)[None].float(),
                lse=lse[None, some, :group].contiguous(),
                before=layer.number(kept + counted.start - added)[:1],
                count=layer.number(len(counted))[:1],
                scale=layer.scale,
                every=every,
            ),
            beta=layer.cascade.decay,
        )
        note("scores", layer.state.score[0, :1, :1], score, SCORE_TOLERANCE)
    return worst
