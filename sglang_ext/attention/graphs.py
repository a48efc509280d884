"""CUDA graphs with views beside those without, so that plain batches pay nothing.

Decoding: SGLang captures a second graph of every batch size for servers with LoRA adapters. LoRA is refused beside
views, so its two labels are free.

A hybrid linear model's backend stands around ours there: it plans both, and decode graphs are asked of ours.

Prefills: SGLang's `breakable` graphs stop at attention in every layer, which the host then launches. A question over
resident blocks has little to compute, so that launching takes longer than the GPU does. Its work lists lie in static
buffers, however: small sizes are captured a second time, in one piece, for prefills whose rows are all in one list.
Models some of whose layers have windows or states have no pools, so that none of their prefills is captured twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_ext import compat
from sglang_ext.attention.backend import ViewBackend, views_of
from sglang_ext.names import ForwardBatch, GraphRunner, Passed

if TYPE_CHECKING:
    from sglang.srt.model_executor.runner.shape_key import ShapeKey
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend


def before_capture(runner: GraphRunner) -> None:
    """BEFORE DecodeCudaGraphRunner.capture: both variants, of those sizes that the backend has a use for.

    Where every request is a stream, there is one variant: it has views. Verifications of drafts have one, too: rows
    with views are verified without a graph.
    """
    backend = views_of(runner.attn_backend)
    if backend is None or compat.verifies(runner):
        return
    compat.keep_graph_sizes(runner, backend.begin_capture(list(runner.capture_bs)))
    if backend.both_variants:
        compat.record_both_variants(runner)


def after_capture(_result: None, runner: GraphRunner) -> None:
    """AFTER DecodeCudaGraphRunner.capture: the next batch says itself whether it has views."""
    if (backend := views_of(runner.attn_backend)) is not None:
        backend.end_capture()


def around_resolve_variant(
    original: Callable[..., str | None], runner: GraphRunner, forward_batch: ForwardBatch
) -> str | None:
    """AROUND DecodeCudaGraphRunner._resolve_lora_variant."""
    backend = views_of(runner.attn_backend)
    if backend is not None and backend.both_variants and not compat.verifies(runner):
        return compat.graph_variant(backend)
    return original(runner, forward_batch)


def around_can_run_decode(original: Callable[..., bool], runner: GraphRunner, forward_batch: ForwardBatch) -> bool:
    """AROUND DecodeCudaGraphRunner.can_run_graph: what the graphs have no buffers for runs without."""
    backend = views_of(runner.attn_backend)
    if backend is not None and not backend.fits_graph(forward_batch.forward_mode.is_target_verify()):
        return False
    return original(runner, forward_batch)


def around_can_run_prefill(original: Callable[..., bool], runner: GraphRunner, forward_batch: ForwardBatch) -> bool:
    """AROUND PrefillCudaGraphRunner.can_run_graph: prefills with views only where the graph breaks at attention."""
    backend = views_of(runner.model_runner.attn_backend)
    if backend is not None and backend.viewing and not compat.breaks_at_attention(runner):
        return False
    return original(runner, forward_batch)


def before_capture_prefill(runner: GraphRunner) -> None:
    """BEFORE PrefillCudaGraphRunner.capture: room for prefills inside graphs."""
    backend = runner.model_runner.attn_backend
    if isinstance(backend, ViewBackend) and compat.breaks_at_attention(runner):
        backend.init_question_graphs(runner.capture_num_tokens)


def around_capture_breakable(
    original: Callable[..., None],
    graphs: BreakableCudaGraphBackend,
    shape_key: ShapeKey,
    forward: Callable[[], Passed],
    *args: Passed,
    **kwargs: Passed,
) -> None:
    """AROUND BreakableCudaGraphBackend.capture_one: small sizes once more, with views and in one piece."""
    original(graphs, shape_key, forward, *args, **kwargs)
    backend = compat.graphs_attention(graphs)
    if isinstance(backend, ViewBackend) and backend.capture_question(shape_key.size):
        try:
            compat.capture_whole(graphs, shape_key, forward)
        finally:
            backend.end_capture()


def around_execute_prefill(
    original: Callable[..., Passed], runner: GraphRunner, forward_batch: ForwardBatch, **kwargs: Passed
) -> Passed:
    """AROUND PrefillCudaGraphRunner.execute: tells the planner whether a graph in one piece has room for this batch."""
    backend = runner.model_runner.attn_backend
    if not isinstance(backend, ViewBackend):
        return original(runner, forward_batch, **kwargs)
    backend.question_size = compat.whole_graph_size(runner, forward_batch)
    try:
        return original(runner, forward_batch, **kwargs)
    finally:
        backend.question_size = None


def around_replay_breakable(
    original: Callable[..., Passed],
    graphs: BreakableCudaGraphBackend,
    shape_key: ShapeKey,
    static_forward_batch: ForwardBatch,
    **kwargs: Passed,
) -> Passed:
    """AROUND BreakableCudaGraphBackend.replay: the graph in one piece, where the batch was planned for it."""
    backend = compat.graphs_attention(graphs)
    if isinstance(backend, ViewBackend) and backend.in_question_graph():
        return compat.replay_whole(graphs, shape_key)
    return original(graphs, shape_key, static_forward_batch, **kwargs)
