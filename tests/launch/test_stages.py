"""The stages of a profiled round, from traces such as SGLang's profiler writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch.bench import _stages


@pytest.mark.parametrize(
    ("kernel", "stage"),
    [
        ("_attend", "attention"),
        ("_merge", "merge"),
        ("_rotate", "rotation"),
        ("_advance", "planning"),
        ("void flashinfer::PrefillWithKVCacheKernel<flashinfer::SparseCollectiveMainloop>", "attention"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8u>", "merge"),
        ("nvjet_sm90_tst_128x8_64x12_2x1_v_bz_splitK_TNT", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "other kernels"),
        ("Memcpy HtoD (Pinned -> Device)", "other kernels"),
    ],
)
def test_kernels_by_name(kernel: str, stage: str) -> None:
    assert _stages.stage_of(kernel) == stage


def event(name: str, start: float, length: float, category: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": length, "cat": category}


def test_time_is_shared_out_once() -> None:
    """Kernels side by side count once, gaps are idle, and what the host does is no stage."""
    events = [
        event("_attend", 100, 50),
        event("_merge", 140, 20),  # ten of them beside the attention
        event("cudaLaunchKernel", 0, 500, "cuda_runtime"),
        event("nvjet_x", 200, 30),
        event("_advance", 205, 5),
        {"name": "_attend", "ts": 1, "cat": "kernel"},  # without an end
    ]
    found = _stages.gpu_stages(reversed(events))
    micro = {name: round(seconds * 1e6, 6) for name, seconds in found.items() if seconds}
    assert micro == {"attention": 50, "merge": 10, "matrix products": 30, _stages.IDLE: 40, "span": 130}
    assert sum(micro.values()) == 2 * micro["span"]


def test_no_gpu_no_stages() -> None:
    assert _stages.gpu_stages([event("cudaLaunchKernel", 0, 5, "cuda_runtime")]) == {}


class Engine:
    """Writes a trace when the profiler stops."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.folder = Path()

    def start_profile(self, output_dir: str, **_: Any) -> None:
        self.folder = Path(output_dir) / "2"
        self.folder.mkdir()

    def stop_profile(self) -> None:
        (self.folder / "1-TP-0.trace.json.gz").write_bytes(self.content)


def test_profiled() -> None:
    engine, done = Engine(gzip.compress(json.dumps({"traceEvents": [event("_rotate", 5, 2)]}).encode())), []
    found = _stages.profiled(engine, lambda: done.append(1))
    assert done and found["rotation"] == pytest.approx(2e-6) and found["span"] == pytest.approx(2e-6)


def test_a_trace_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stages, "WAIT_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match=r"no trace .* within 0\.5 seconds"):
        _stages.profiled(Engine(b"cut off"), lambda: None)


def test_table() -> None:
    rounds = {"1 at a time": {"attention": 1.5e-3, "span": 2e-3}, "32 at a time": {"merge": 1e-5}}
    assert _stages.table(rounds).splitlines() == [
        "| stage, ms a request | 1 at a time | 32 at a time |",
        "|---|---|---|",
        "| attention | 1.5 |  |",
        "| span | 2 |  |",
        "| merge |  | 0.01 |",
    ]
