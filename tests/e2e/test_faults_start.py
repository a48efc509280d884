"""What a server is not started with: refused by name, with what to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.serving.checks import after_server_args, refusals
from tests.e2e.server import Server, model

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
        ("enable_lora", True, "--enable-lora"),
        ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype auto"),
        ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype auto"),
        ("tokenizer_worker_num", 4, "--tokenizer-worker-num 1"),
        ("disable_radix_cache", True, "--disable-radix-cache"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
    ],
)
def test_what_views_do_not_serve_is_refused_by_name(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        after_server_args(None, arguments(**{name: value}))
    assert remedy in str(caught.value) and repr(value) in str(caught.value)


def test_all_problems_are_named_at_once() -> None:
    assert len(refusals(arguments(page_size=16, dp_size=2, tokenizer_worker_num=2))) == 3
    assert refusals(arguments()) == []
    after_server_args(None, arguments())


@pytest.mark.parametrize(
    "one", [{"attention_backend": "torch_native"}, {"radix_cache_backend": None}, {"radix_cache_backend": "radix"}]
)
def test_one_of_the_two_backends_alone_is_refused(one: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="set both"):
        after_server_args(None, arguments(**one))


def test_a_stock_server_is_left_alone() -> None:
    stock = arguments(attention_backend="torch_native", radix_cache_backend=None, page_size=64, dp_size=2)
    after_server_args(None, stock)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 16, "tokenizer_worker_num": 2}, ["page_size=16", "--page-size 1", "tokenizer_worker_num=2"]),
        ({"radix_cache_backend": None}, ["set both", "sglang_ext"]),
    ],
)
def test_a_real_launch_says_so_and_ends(options: dict[str, Any], words: list[str]) -> None:
    with Server(model(), wait=False, **options) as server:
        assert server.wait_for_exit(250) != 0
        for word in words:
            assert word in server.log(), server.tail()
