"""Streams of Ltri-LLM in kernels: prompts chunk by chunk, decoding batched and in CUDA graphs.

The host waits for nothing (`attention.ltri_kernels`, `attention.ltri_decode`). Where an answer does not see what the
last chunk of its prompt got back, each of its tokens is a chunk (`LtriPolicy.captured`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton

from sglang_ext.attention.choice import KERNELS_ENV
from sglang_ext.attention.ltri import LtriPolicy
from sglang_ext.attention.ltri_decode import DecodeRows, StepBuffers
from sglang_ext.attention.ltri_index import stored_sizes
from sglang_ext.attention.ltri_state import ClampedAttention
from sglang_ext.attention.ltri_stores import KernelChunks, blocks_that_fit
from sglang_ext.attention.ltri_warm_up import WarmUp
from sglang_ext.attention.model import Machine, Model
from sglang_ext.attention.readers.reader import DecodeGraphs, Loaded, Reader, graph_sizes
from sglang_ext.attention.readers.streams import StreamReader, check_dense
from sglang_ext.attention.step import Batch, Forward, LayerCall
from sglang_ext.compat.ranks import sum_over_ranks
from sglang_ext.kernels.block_votes.triton_impl import MAX_VECTORS
from sglang_ext.kernels.block_votes.types import MAX_COUNT
from sglang_ext.kernels.cells import Rotation
from sglang_ext.kernels.clamped_attention import dense_impl, reference
from sglang_ext.kernels.host_fetch.triton_impl import MAX_WAYS
from sglang_ext.kernels.span_index.types import BLOCKS
from sglang_ext.policies.ltri import TensorRanks
from sglang_ext.policies.ltri_options import Ltri

MOST: Mapping[str, int] = {"retrieved": MAX_COUNT, "ways": MAX_WAYS}
"""Setting -> what kernels take of it at most."""


def check_kernels(settings: Ltri) -> None:
    """Raise ValueError for settings that the kernels do not take."""
    wrong = [f"{name}={getattr(settings, name)} (at most {most})" for name, most in MOST.items()
             if getattr(settings, name) > most]  # fmt: skip
    spans, vectors = map(triton.next_power_of_2, stored_sizes(settings))
    if settings.remembers and spans * vectors > MAX_VECTORS:
        wrong.append(
            f"vectors={settings.most_vectors * settings.spans} of spans={settings.spans} (at most {MAX_VECTORS}, where"
            " the numbers of spans and of vectors a span are rounded up to powers of two)"
        )
    if settings.remembers and settings.block not in BLOCKS:
        wrong.append(f"block={settings.block} ({', '.join(map(str, BLOCKS))})")
    if wrong:
        raise ValueError(
            f"--policy: the kernels do not take {'; '.join(wrong)}: choose other sizes, or set {KERNELS_ENV}=torch in"
            " the server's environment"
        )


def check_ranks(policy: LtriPolicy) -> None:
    """Raise ValueError where all heads of a layer vote on several ranks, each of which has a part of every product."""
    if policy.ranks > 1 and policy.config.remembers and policy.all_heads_vote:
        raise ValueError(
            f"tp_size={policy.ranks} with kernels, and all heads of a layer vote, whose products the ranks add in plain"
            " PyTorch alone: find the retrieval heads with sglang-ext heads MODEL and name its file with --policy"
            f' \'{{"heads": "FILE"}}\', set {KERNELS_ENV}=torch in the server\'s environment, or set --tp-size 1'
        )


class LtriReader(Reader[Batch, Loaded], DecodeGraphs[Batch, Loaded]):
    """Streams of a policy, in kernels; every batch is its.

    Raises:
        ValueError: settings or the model's heads are none that the kernels take; what they need does not fit the GPU;
            one request may need more slots than there are, or than a row has columns.
    """

    writes = True
    both = False

    def __init__(self, model: Model, policy: LtriPolicy, machine: Machine) -> None:
        check_kernels(policy.config)
        model.check_cache_type()
        self.model, self.policy = model, policy
        attention = self._attention(machine.kernels)
        self._prompts = StreamReader(model, policy, machine)  # has the policy meet the model
        check_ranks(policy)
        caches, settings = model.caches(), policy.config
        self._rows, voters = model.request_slots // settings.slots, {layer: policy.voter(layer) for layer in caches}
        keys, _ = next(iter(caches.values()))
        policy.fit_host(blocks_that_fit(settings, voters, model.shape.heads, self._rows, keys))
        self._chunks = KernelChunks(
            settings,
            policy.blocks_on_host,
            caches,
            voters,
            model.shape.heads,
            self._rows,
            Rotation.of(model.rope),
            attention,
            TensorRanks(policy.ranks, sum_over_ranks),
        )
        policy.compute_in(self._chunks)
        self._decoding = DecodeRows(model, policy, self._chunks) if policy.captured else None
        if self._decoding is not None:
            self.graphs = self
        self._steps = {"graph": 0, "eager": 0}
        self.warm_up()

    def step(self, batch: Batch) -> Batch:
        return self._prompts.step(batch)

    def before_layers(self, step: Batch, forward: Forward, graph_rows: int | None) -> Loaded:
        if not step.decode or self._decoding is None:
            return self._prompts.before_layers(step, forward, graph_rows)
        self._steps["eager"] += 1
        return self._decoding.load(step.rows, len(step.rows))

    def read(self, call: LayerCall[Loaded]) -> torch.Tensor:
        if self._decoding is not None and isinstance(call.loaded, StepBuffers):
            return self._decoding.decode(call)
        return self._prompts.read(call)

    def stats(self) -> Mapping[str, Mapping[str, float]]:
        chunks = self._chunks
        counted = {"prompt_chunks": chunks.prompts, "decoding_steps": self._steps, "host_cache": chunks.counters()}
        if self._decoding is not None:
            counted["block_ends"] = self._decoding.block_ends
        return {**super().stats(), **counted}

    def counters(self) -> Mapping[str, float]:
        return {f"host_cache_{name}": count for name, count in self._chunks.earlier_counters().items()}

    def warm_up(self) -> None:
        """Read a prompt, so that the first requests do not wait for compilers, and record whole chunks of prompts."""
        model, settings = self.model, self.policy.config
        shape = model.shape
        places = max(1, model.tokens_of_a_pass // settings.chunk)
        WarmUp(self.policy, self._chunks, model.caches(), shape.heads, model.rope, shape.scale).read(places)
        if self._decoding is not None:
            self._decoding.record()

    # ---- CUDA graphs ----

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        return graph_sizes(sizes, self._rows)

    def capture(self, rows: int) -> Loaded:
        return None if self._decoding is None else self._decoding.load((), rows)

    def fits(self, step: Batch) -> bool:
        return step.decode

    def before_replay(self, step: Batch, forward: Forward, rows: int) -> Loaded:
        self._steps["graph"] += 1
        return None if self._decoding is None else self._decoding.load(step.rows, rows)

    def _attention(self, chosen: str) -> ClampedAttention:
        """What computes attention."""
        if chosen != "flashinfer":
            return reference
        check_dense(self.model)
        return dense_impl
