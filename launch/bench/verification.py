"""``sglang-ext bench verification``: what it costs dense attention to verify drafts, beside a dense decoding step.

A step of decoding runs one token of each request through the model, and a verification runs a draft and the token
before it. Both read the same weights and the same keys and values, so a verification costs little more than a step
until its arithmetic counts. This benchmark measures how much, on one GPU: all matrix products of a layer in a stated
shape, its attention by FlashAttention-3 as SGLang calls it, and the matrix product of the logits. Norms, the rotary
embedding and sampling are left out of both. A layer runs in a CUDA graph, and what a row says of a model is its layers'
time, which is that of one layer for each, and the time of its logits.

The gains that ``sglang-ext bench drafts`` computes take a verification for one dense step; these rows say how near
that is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from sglang_ext.launch.bench._gpu import copy_bandwidth, require_gpu, time_turns
from sglang_ext.launch.bench._record import SHAPE, Figure, Timing, json_file, save, table
from sglang_ext.launch.bench._shapes import SHAPES

RESULTS = Path(__file__).resolve().parent / "results"
ROW = "verifying drafts of {drafted}, {batch} requests of {length} tokens"
"""How the name of a row begins."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(queries, keys, values, page table) -> what attention gives; shapes as in `Layer`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default=SHAPE, help=f"of the model (default: {SHAPE})")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="of it (default: the shape's)")
    parser.add_argument("--length", type=int, default=65_536, metavar="TOKENS", help="of a request (default: 65536)")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="requests (default: 1 8 32)"
    )
    parser.add_argument(
        "--drafted", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="tokens of a draft (default: 2 4 8)"
    )
    parser.add_argument(
        "--out",
        type=json_file,
        default=RESULTS / "verification.json",
        help="(default: launch/bench/results/verification.json)",
    )
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: fields of its configuration."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


class Layer:
    """One layer over a cache of keys and values, all of random numbers.

    Args:
        shape: of the model.
        batch: requests.
        length: tokens of each in the cache, those that are verified included.
        attend: its attention.
        device, dtype: of everything.

    Attributes:
        keys, values: [batch * length, 1, key-value heads, head size]; a page has one token.
        pages: int32 [batch, length], where a request's tokens lie: scattered, as in a server that has run for a while.
    """

    def __init__(
        self, shape: Shape, batch: int, length: int, attend: Attend, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape, self.batch, self.attend = shape, batch, attend
        self.device, self.dtype = device, dtype
        heads = shape.num_attention_heads * shape.head_dim
        both = 2 * shape.num_key_value_heads * shape.head_dim
        self.project, self.output = self.random(heads + both, shape.hidden_size), self.random(shape.hidden_size, heads)
        self.gate_up = self.random(2 * shape.intermediate_size, shape.hidden_size)
        self.down = self.random(shape.hidden_size, shape.intermediate_size)
        self.keys, self.values = (
            self.random(batch * length, 1, shape.num_key_value_heads, shape.head_dim) for _ in range(2)
        )
        self.pages = torch.randperm(batch * length, device=device).int().view(batch, length)

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self.device, dtype=self.dtype) * 0.02

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer over [batch * tokens, hidden size], a request's tokens next to each other."""
        count, size = self.shape.num_attention_heads, self.shape.head_dim
        queries = F.linear(hidden, self.project)[:, : count * size].view(self.batch, -1, count, size)
        seen = self.attend(queries, self.keys, self.values, self.pages).reshape(hidden.shape[0], count * size)
        gate, up = F.linear(F.linear(seen, self.output), self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)

    @property
    def bytes(self) -> int:
        """That a step reads at least: weights, keys and values."""
        tensors = (self.project, self.output, self.gate_up, self.down, self.keys, self.values)
        return sum(each.numel() * each.element_size() for each in tensors)


def flash_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    """FlashAttention-3 over the whole cache, causal among the queries: [batch, tokens, heads, head size]."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    lengths = torch.full((pages.shape[0],), pages.shape[1], dtype=torch.int32, device=pages.device)
    found: torch.Tensor = flash_attn_with_kvcache(
        queries, keys, values, cache_seqlens=lengths, page_table=pages, causal=True
    )
    return found


@dataclass(frozen=True)
class Passes:
    """Seconds of passes over one batch.

    Attributes:
        layer: tokens of a request -> of one layer.
        logits: the same of the matrix product of the logits.
        layer_bytes, logits_bytes: that either reads at least.
    """

    layer: dict[int, Timing]
    logits: dict[int, Timing]
    layer_bytes: int
    logits_bytes: int

    def model(self, tokens: int, layers: int) -> Timing:
        """Of the whole model."""
        layer, logits = self.layer[tokens], self.logits[tokens]
        low, high = layers * layer.low + logits.low, layers * layer.high + logits.high
        return Timing(layers * layer.median + logits.median, low, high, layer.samples)


def _layer(layer: Layer, hidden: torch.Tensor, _: int) -> torch.Tensor:
    return layer.run(hidden)


def _logits(hidden: torch.Tensor, head: torch.Tensor, _: int) -> torch.Tensor:
    return F.linear(hidden, head)


def measure(
    layer: Layer, vocabulary: int, tokens: list[int], device: torch.device, *, milliseconds: int = 400
) -> Passes:
    """Times of passes with so many tokens of each request."""
    head = layer.random(vocabulary, layer.shape.hidden_size)
    layers, logits = dict[int, Timing](), dict[int, Timing]()
    for count in tokens:
        hidden = layer.random(layer.batch * count, layer.shape.hidden_size)
        layers[count] = time_turns(partial(_layer, layer, hidden), 1, device, milliseconds=milliseconds)
        logits[count] = time_turns(partial(_logits, hidden, head), 1, device, milliseconds=milliseconds)
    return Passes(layers, logits, layer.bytes, head.numel() * head.element_size())


def figures(found: Passes, batch: int, length: int, layers: int, bandwidth: float) -> list[Figure]:
    """A row for each length of a draft: a verification beside a step, and what bandwidth allows either.

    Args:
        found: times, of a step (one token) among them.
        batch, length: requests, and tokens of each.
        layers: of the model.
        bandwidth: bytes a second.
    """
    step, rows = found.model(1, layers), list[Figure]()
    floor = (layers * found.layer_bytes + found.logits_bytes) / bandwidth
    for tokens in sorted(found.layer):
        if tokens == 1:
            continue
        ours = found.model(tokens, layers)
        name = f"{ROW.format(drafted=tokens - 1, batch=batch, length=length)}, {layers} layers"
        notes = {"layer": found.layer[tokens].median, "logits": found.logits[tokens].median, "floor": floor}
        rows.append(Figure(name, ours, "a decoding step", step, ours.median / step.median, notes=notes))
    return rows


def main(args: argparse.Namespace) -> int:
    """Measure, print the table, and write it.

    Raises:
        ValueError: there is no GPU, or a number is below 1.
    """
    device = require_gpu()
    if min(*args.batches, *args.drafted) < 1 or args.length <= max(args.drafted):
        raise ValueError(
            f"--batches {args.batches}, --drafted {args.drafted}, --length {args.length}: expected numbers of at least"
            " 1, and requests that are longer than drafts"
        )
    sizes = SHAPES[args.shape]
    shape = Shape(**{name: sizes[name] for name in Shape.__dataclass_fields__})
    layers, bandwidth, rows = args.layers or sizes["num_hidden_layers"], copy_bandwidth(device), list[Figure]()
    for batch in args.batches:
        layer = Layer(shape, batch, args.length, flash_attention, device, torch.bfloat16)
        found = measure(layer, sizes["vocab_size"], [1, *(each + 1 for each in args.drafted)], device)
        rows += figures(found, batch, args.length, layers, bandwidth)
        del layer
    print(table(rows))
    save(args.out, rows, commit=args.commit, bandwidth=bandwidth)
    print(f"written: {args.out}")
    return 0
