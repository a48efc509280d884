"""Refused arguments are SGLang's own, on the installed line: one that SGLang renames would be refused no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_ext import lines
from sglang_ext.serving import checks
from tests.models.architectures import SERVED
from tests.plugin.test_models import arguments

VALUES: dict[str, Any] = {
    "page_size": 16,
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "dp_size": 2,
    "attn_dp_size": 2,
    "pp_size": 2,
    "quantization_param_path": "scales.json",
    "tokenizer_worker_num": 2,
    "prefill_attention_backend": "triton",
    "decode_attention_backend": "triton",
    "schedule_policy": "dfs-weight",
    "dllm_algorithm": "LowConfidence",
    "dcp_size": 2,
    "radix_eviction_policy": "lfu",
}
"""Of arguments that are no flags, a value that is refused."""
NEWER_ONLY = {"attn_dp_size", "enable_nvidia_megakernel", "enable_unified_cache_external_linker"}
OF_ALL = [(name, "dbsa") for name, _, _ in checks._REFUSED]
OF_STREAMS = [(name, "cascade") for name, _, _ in checks._REFUSED_STREAMS]


@pytest.mark.parametrize(("name", "backend"), OF_ALL + OF_STREAMS)
def test_every_refused_argument_is_sglangs_and_is_read(name: str, backend: str, tmp_path: Path) -> None:
    folder = SERVED[0].save(tmp_path, weights=False)
    plain = arguments(folder, backend=backend)
    assert hasattr(plain, name) == (lines.current() is lines.NEWER or name not in NEWER_ONLY)
    if not hasattr(plain, name):
        return
    assert checks.refusals(plain) == []
    value = VALUES.get(name, True)
    (problem,) = checks.refusals(arguments(folder, backend=backend, **{name: value}))
    assert problem.startswith(f"{name}={value!r} is not supported with --attention-backend {backend}: ")


def test_attention_in_data_parallel_is_refused_however_it_is_spelled(tmp_path: Path) -> None:
    """SGLang 0.5.23 takes 0.5.17's flags, and makes `attn_dp_size` of them."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    folder = SERVED[0].save(tmp_path, weights=False)
    given = {"model_path": str(folder), "attention_backend": "dbsa", "device": "cpu", "dtype": "float32", "tp_size": 2}
    with pytest.raises(ValueError, match="dp_size=2 is not supported with --attention-backend dbsa"):
        made = ServerArgs(**given, dp_size=2, enable_dp_attention=True)
        if lines.current() is lines.NEWER:
            made.resolve_once()
