"""Why `--enable-lora` is refused: what was seen of SGLang's LoRA (docs/troubleshooting.md)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, memory can be pinned")
def test_sglang_pins_memory_for_adapters_also_where_there_is_no_gpu() -> None:
    """With a SGLang that does not, LoRA can be tried without a GPU: try it, and write down what is seen then."""
    from sglang.srt.lora.layers import ColumnParallelLinearWithLoRA

    class Linear(torch.nn.Linear):
        output_partition_sizes = (4,)

    backend: Any = SimpleNamespace()
    with pytest.raises(RuntimeError, match=r"NVIDIA|pin"):
        ColumnParallelLinearWithLoRA(Linear(4, 4), backend)


def test_views_have_the_graphs_that_sglang_captures_for_adapters() -> None:
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    from sglang_ext import compat

    found = set()
    for adapter, viewing in (("an adapter", True), (None, False)):
        # An engine of an earlier test may have hooked it: without a backend of ours, the hook leaves it to SGLang.
        runner = SimpleNamespace(record_nolora_graph=True, attn_backend=None)
        theirs = DecodeCudaGraphRunner._resolve_lora_variant(runner, SimpleNamespace(lora_ids=[adapter]))
        assert theirs == compat.graph_variant(SimpleNamespace(viewing=viewing))
        found.add(theirs)
    assert len(found) == 2
