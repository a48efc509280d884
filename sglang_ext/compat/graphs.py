"""CUDA graphs of SGLang's runners: which variants are captured, and which one is replayed."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ext.compat.line import capture_scope, capture_variant, replay_scope

_VIEWS, _PLAIN = "lora", "nolora"  # SGLang's two labels of decode graphs; LoRA is refused beside views


def capturing_views() -> bool:
    """Whether the decode graph that is being captured is the variant with views."""
    return capture_variant() == _VIEWS


def breaks_at_attention(runner: Any) -> bool:
    """Whether a prefill graph leaves attention to the backend, once a layer, with the batch's own metadata."""
    return getattr(runner, "prefill_backend_name", None) == "breakable"


def graph_variant(backend: Any) -> str:
    """Label of the decode graph for the batch at hand."""
    return _VIEWS if backend.viewing else _PLAIN


def record_both_variants(runner: Any) -> None:
    """Have a decode graph captured with views and without, for every batch size.

    SGLang runs what it captures twice before. For the second graph of a size one run is enough: all but the kernels of
    its attention are loaded. Other backends than SGLang's own for whole graphs stay as they are.
    """
    runner.record_nolora_graph = True
    if isinstance(runner.backend, FullCudaGraphBackend):
        runner.backend.capture_one = functools.partial(_capture_one, runner.backend)


def _capture_one(graphs: Any, key: Any, forward: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    """FullCudaGraphBackend.capture_one, without the first of its two runs where there is a graph of the same size."""
    captured = any(each.size == key.size for each in graphs._graphs)
    runs = itertools.count(0 if captured else 1)  # the run with number 0 is left out
    type(graphs).capture_one(graphs, key, lambda: forward() if next(runs) else None, *args, **kwargs)


def keep_graph_sizes(runner: Any, sizes: list[int]) -> None:
    """Have decode graphs captured for these of the runner's batch sizes alone; larger batches must never come."""
    runner.capture_bs = sizes


def verifies(runner: Any) -> bool:
    """Whether a runner of decode graphs is one of verifications."""
    return bool(runner.capture_forward_mode.is_target_verify())


@contextlib.contextmanager
def as_steps(model_runner: Any, graphs: Any) -> Iterator[None]:
    """Within the context SGLang takes decoding steps for steps, on a server whose decoding batches are verifications.

    Args:
        model_runner: the target model's.
        graphs: of such steps (`capture_steps`); None where there are none.
    """
    algorithm, verifying = model_runner.spec_algorithm, model_runner.decode_cuda_graph_runner
    model_runner.spec_algorithm, model_runner.decode_cuda_graph_runner = SpeculativeAlgorithm.NONE, graphs
    try:
        yield
    finally:
        model_runner.spec_algorithm, model_runner.decode_cuda_graph_runner = algorithm, verifying


def capture_steps(model_runner: Any) -> Any:
    """CUDA graphs of decoding steps, where SGLang has captured those of verifications; None where it captures none."""
    if not isinstance(model_runner.decode_cuda_graph_runner, DecodeCudaGraphRunner):
        return None
    with as_steps(model_runner, None):
        return DecodeCudaGraphRunner(model_runner)


_WHOLE = "sglang_ext_whole"


def graphs_attention(graphs: Any) -> Any:
    """The attention backend of the model whose prefill graphs these are."""
    return graphs._model_runner.attn_backend


def capture_whole(graphs: Any, shape_key: Any, forward: Callable[[], Any]) -> None:
    """Capture a prefill that SGLang has just captured in pieces once more, in one piece, with its attention inside.

    As SGLang's `FullCudaGraphBackend` does it, but with one run before: SGLang has just run all but the attention. The
    result goes where that of the pieces goes.
    """
    graphs._device_module.synchronize()
    graphs._tp_group.barrier()
    forward()
    graph = torch.cuda.CUDAGraph()
    with capture_scope(), torch.cuda.graph(graph, pool=graphs._pool, stream=graphs._capture_stream):
        out = forward()
        rows = graphs._output_rows(out, shape_key.size)
        graphs._copy_output_to_buffer(out, graphs._shared_output_buffer, rows)
    whole = getattr(graphs, _WHOLE, {})
    whole[shape_key] = graph
    setattr(graphs, _WHOLE, whole)


def whole_graph_size(runner: Any, forward_batch: Any) -> int | None:
    """Rows of the graph in one piece that has room for this prefill, or None."""
    size = int(runner._pad_to_bucket(len(forward_batch.input_ids), runner.capture_num_tokens))
    return size if any(key.size == size for key in getattr(runner.backend, _WHOLE, {})) else None


def replay_whole(graphs: Any, shape_key: Any) -> Any:
    """Replay a graph of `capture_whole`; returns what SGLang's `replay` returns."""
    with replay_scope():
        getattr(graphs, _WHOLE)[shape_key].replay()
    return graphs._outputs[shape_key]
