"""What a server is not started with: refused by name, with what to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext import compat
from sglang_ext.serving.checks import after_server_args, before_server_args, refusals
from sglang_ext.settings import POOL_DIR_ENV
from tests.e2e.server import Server, model
from tests.oracle.models import demonstrations

FINE = {
    "attention_backend": "dbsa",
    "dtype": "auto",
    "radix_cache_backend": "sglang_ext",
    "page_size": 1,
    "speculative_algorithm": None,
    "enable_hierarchical_cache": False,
    "disaggregation_mode": "null",
    "dp_size": 1,
    "pp_size": 1,
    "tp_size": 2,
    "enable_lora": None,
    "lora_paths": None,
    "kv_cache_dtype": "auto",
    "tokenizer_worker_num": 1,
    "disable_radix_cache": False,
    "chunked_prefill_size": None,
}


def arguments(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**FINE, **changed})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("page_size", 16, "--page-size 1"),
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode"),
        ("disaggregation_mode", "decode", "--disaggregation-mode"),
        ("dp_size", 2, "--dp-size 1"),
        ("pp_size", 2, "--pp-size 1"),
        ("dcp_size", 2, "leave out --dcp-size"),
        ("enable_lora", True, "--enable-lora"),
        ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype auto"),
        ("kv_cache_dtype", "fp8_e5m2", "or fp8_e4m3"),
        ("kv_cache_dtype", "mxfp8", "--kv-cache-dtype auto or fp8_e4m3"),
        ("kv_cache_dtype", "nvfp4", "--kv-cache-dtype auto or fp8_e4m3"),
        ("quantization_param_path", "scales.json", "--quantization-param-path"),
        ("tokenizer_worker_num", 4, "--tokenizer-worker-num 1"),
        ("disable_radix_cache", True, "--disable-radix-cache"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
    ],
)
def test_what_views_do_not_serve_is_refused_by_name(
    name: str, value: Any, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "serves_states", lambda *_: False)  # these arguments name no model
    with pytest.raises(ValueError, match=name) as caught:
        after_server_args(None, arguments(**{name: value}))
    assert remedy in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize("backend", ["dbsa", "double_p", "dbsa+double_p"])
def test_a_cache_in_float8_is_served_by_systems_that_read_it(backend: str) -> None:
    assert refusals(arguments(attention_backend=backend, kv_cache_dtype="fp8_e4m3")) == []


@pytest.mark.parametrize("backend", ["quest", "retroinfer", "twilight", "cascade", "streaming_llm", "ltri", "infllm"])
def test_a_cache_in_float8_is_refused_by_all_others(backend: str) -> None:
    (problem,) = refusals(arguments(attention_backend=backend, kv_cache_dtype="fp8_e4m3", tp_size=1))
    assert problem.startswith("kv_cache_dtype='fp8_e4m3' is not supported with --attention-backend " + backend)
    assert "--attention-backend to one of dbsa, double_p, dbsa+double_p, which read fp8_e4m3" in problem


def test_pages_are_served_without_pools_and_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POOL_DIR_ENV, raising=False)
    paged = arguments(attention_backend="double_p", page_size=16)
    assert refusals(paged) == []
    monkeypatch.setenv(POOL_DIR_ENV, "pools")
    (problem,) = refusals(paged)
    assert "page_size=16" in problem and "leave out --pool-dir" in problem
    monkeypatch.delenv(POOL_DIR_ENV)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (problem,) = refusals(paged)
    assert "page_size=16 is not supported on a GPU" in problem and "set --page-size 1" in problem


@pytest.mark.parametrize("backend", ["dbsa", "dbsa+double_p", "quest", "retroinfer", "twilight"])
def test_pages_are_refused_by_all_others(backend: str) -> None:
    (problem,) = refusals(arguments(attention_backend=backend, page_size=16))
    assert problem.startswith(f"page_size=16 is not supported with --attention-backend {backend}")


def test_all_problems_are_named_at_once() -> None:
    assert len(refusals(arguments(page_size=16, dp_size=2, tokenizer_worker_num=2))) == 3
    assert refusals(arguments()) == []
    after_server_args(None, arguments())


@pytest.mark.parametrize("one", [{"attention_backend": "torch_native"}, {"radix_cache_backend": "radix"}])
def test_a_foreign_one_of_the_two_backends_is_refused(one: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else it would be set here, too
    changed = arguments(**one)
    before_server_args(changed)
    with pytest.raises(ValueError, match="belong together; leave out --radix-cache-backend"):
        after_server_args(None, changed)


def test_the_attention_backend_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = arguments(radix_cache_backend=None, page_size=None)
    before_server_args(alone)
    assert (alone.radix_cache_backend, alone.page_size) == ("sglang_ext", 1)
    after_server_args(None, alone)
    stock = arguments(attention_backend="torch_native", radix_cache_backend=None, page_size=None)
    before_server_args(stock)
    assert (stock.radix_cache_backend, stock.page_size) == (None, None)


def test_a_stock_server_is_left_alone() -> None:
    stock = arguments(attention_backend="torch_native", radix_cache_backend=None, page_size=64, dp_size=2)
    after_server_args(None, stock)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 16, "tokenizer_worker_num": 2}, ["page_size=16", "--page-size 1", "tokenizer_worker_num=2"]),
        ({"attention_backend": "torch_native"}, ["torch_native", "belong together", "dbsa"]),
    ],
)
def test_a_real_launch_says_so_and_ends(options: dict[str, Any], words: list[str]) -> None:
    with Server(model(), wait=False, warm=False, **options) as server:
        assert server.wait_for_exit(250) != 0
        for word in words:
            assert word in server.log(), server.tail()


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's warnings are shown")
@pytest.mark.parametrize("backend", ["dbsa", "dbsa+double_p", "double_p", "cascade", "streaming_llm", "quest"])
def test_the_attention_backend_alone_starts_a_server_that_speaks_of_no_gpu(backend: str) -> None:
    """`python -m sglang.launch_server --attention-backend dbsa`, or any of ours: the plugin chooses the rest."""
    env = {"SGLANG_EXT_SETTINGS": '{"pool_metrics": true}'}
    if backend in ("cascade", "streaming_llm"):
        env["SGLANG_EXT_POLICY"] = '{"window": 64, "stride": 16}'
    first = backend == "dbsa"
    with Server(
        model(), attention_backend=backend, radix_cache_backend=None, enable_metrics=first, warm=not first, env=env
    ) as server:
        info = server.json("GET", "/server_info")
        assert info["radix_cache_backend"] == "sglang_ext" and info["page_size"] == 1
        if backend.startswith("dbsa"):
            server.put("p", demonstrations(20), block_size=5)
            answer = server.generate("which one", pool="p", ratio=0.5)
            assert answer["meta_info"]["sglang_ext"]["blocks"]
        assert server.generate("a plain question", 4)["meta_info"]["completion_tokens"] == 4
        if first:  # `--pool-metrics`: by name
            lines = server.call("GET", "/metrics").text.splitlines()
            counted = [
                line for line in lines if line.startswith("sglang_ext:pool_requests_total") and 'pool="p"' in line
            ]
            assert [float(line.rsplit(" ", 1)[1]) for line in counted] == [1.0], lines
        log = server.log()
        for word in ("CUDA runtime", "Triton is not supported", "AWQ", "GGUF", "AllReduce is disabled"):
            assert word not in log, [line for line in log.splitlines() if word in line]
