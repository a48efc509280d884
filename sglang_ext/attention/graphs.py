"""CUDA graphs: one decode graph with views and one without for every batch size, so that plain batches pay nothing.

SGLang captures a second graph of every size for servers with LoRA adapters. LoRA is refused beside views, so its two
labels are free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext import compat
from sglang_ext.attention.planned import PlannedViews


def before_capture(runner: Any) -> None:
    """BEFORE DecodeCudaGraphRunner.capture: both variants, and their sizes for the backend."""
    backend = runner.attn_backend
    if isinstance(backend, PlannedViews):
        backend.graph_sizes = sorted(runner.capture_bs)
        compat.record_both_variants(runner)


def after_capture(_result: Any, runner: Any) -> None:
    """AFTER DecodeCudaGraphRunner.capture: the next batch says itself whether it has views."""
    if isinstance(runner.attn_backend, PlannedViews):
        runner.attn_backend.viewing = False


def around_resolve_variant(original: Callable[..., Any], runner: Any, forward_batch: Any) -> Any:
    """AROUND DecodeCudaGraphRunner._resolve_lora_variant."""
    if isinstance(runner.attn_backend, PlannedViews):
        return compat.graph_variant(runner.attn_backend)
    return original(runner, forward_batch)


def around_can_run_decode(original: Callable[..., bool], runner: Any, forward_batch: Any) -> bool:
    """AROUND DecodeCudaGraphRunner.can_run_graph: a plan that is too large for the graphs' buffers runs without."""
    backend = runner.attn_backend
    if isinstance(backend, PlannedViews) and backend.viewing and not backend.fits_graph():
        return False
    return original(runner, forward_batch)


def around_can_run_prefill(original: Callable[..., bool], runner: Any, forward_batch: Any) -> bool:
    """AROUND PrefillCudaGraphRunner.can_run_graph: prefills with views only where the graph breaks at attention."""
    backend = runner.model_runner.attn_backend
    if isinstance(backend, PlannedViews) and backend.viewing and not compat.breaks_at_attention(runner):
        return False
    return original(runner, forward_batch)
