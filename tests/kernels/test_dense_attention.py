"""Dense attention of the libraries that SGLang brings, against plain PyTorch; how both are asked, without a GPU."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.kernels import dense_attention
from sglang_ext.kernels.hopper import is_hopper
from tests.kernels.dense import check_signature, plain_attention, stand_in

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
LIBRARIES = [
    pytest.param(
        dense_attention._flash_attention_3, marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"), id="fa3"
    ),
    pytest.param(dense_attention._flashinfer, marks=NEEDS_GPU, id="flashinfer"),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
LEVEL = 1e-3
"""Of log-sum-exps, which both libraries have in float32."""


def like_flashinfer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    kv_layout: str,
    sm_scale: float,
    window_left: int,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's `single_prefill_with_kv_cache`, as its documentation has it: log-sum-exps are to base 2."""
    assert kv_layout == "NHD" and return_lse
    width = None if window_left < 0 else window_left + 1
    out, lse = plain_attention(q, k, v, scale=sm_scale, causal=causal, width=width)
    return out, lse.contiguous() / math.log(2.0)


def like_flash_attention_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    return_softmax_lse: bool,
) -> tuple[torch.Tensor, ...]:
    """SGLang's `flash_attn_with_kvcache`, as its documentation has it: log-sum-exps are [batch, heads, rows]."""
    assert return_softmax_lse and window_size[1] == -1
    width = None if window_size[0] < 0 else window_size[0] + 1
    out, lse = plain_attention(q[0], k_cache[0], v_cache[0], scale=softmax_scale, causal=causal, width=width)
    return out[None], lse.transpose(0, 1)[None], torch.empty(0), torch.empty(0)


@pytest.fixture
def chosen_anew() -> Iterator[None]:
    """No other test sees which library is chosen here."""
    dense_attention._library.cache_clear()
    yield
    dense_attention._library.cache_clear()


CASES = {"all": (5, 23, False, None), "causal": (5, 23, True, None), "a window": (7, 23, True, 4)}


@pytest.mark.parametrize(("rows", "tokens", "causal", "width"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("hopper", [True, False], ids=["on Hopper", "on another GPU"])
@pytest.mark.usefixtures("chosen_anew")
def test_libraries_are_asked_as_they_are_documented(
    hopper: bool, rows: int, tokens: int, causal: bool, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(single_prefill_with_kv_cache=like_flashinfer))
    stand_in(monkeypatch, like_flash_attention_3)
    monkeypatch.setattr("sglang_ext.kernels.hopper.is_hopper", lambda device: hopper)
    draw = torch.Generator().manual_seed(3)
    query, keys, values = (
        torch.randn(count, heads, 16, generator=draw) for count, heads in ((rows, 6), (tokens, 2), (tokens, 2))
    )
    found = dense_attention.attend(query, keys, values, scale=0.3, causal=causal, width=width)
    assert dense_attention.library_of(query.device) == ("FlashAttention-3" if hopper else "FlashInfer")
    wanted = plain_attention(query, keys, values, scale=0.3, causal=causal, width=width)
    for each, expected in zip(found, wanted, strict=True):
        assert each.shape == expected.shape and (each - expected).abs().max() <= 1e-5


def test_libraries_take_what_they_are_asked_with() -> None:
    flashinfer = pytest.importorskip("flashinfer")
    takes = inspect.signature(flashinfer.single_prefill_with_kv_cache).parameters
    assert set(inspect.signature(like_flashinfer).parameters) <= set(takes)
    check_signature(like_flash_attention_3)


@pytest.mark.parametrize(
    ("rows", "causal", "width", "message"),
    [
        (3, True, 0, "width=0, causal=True: expected at least 1"),
        (3, False, 4, "width=4, causal=False: expected at least 1, with causal=True"),
        (6, True, None, "6 rows over 5 tokens: expected at least as many"),
    ],
)
def test_wrong_input(rows: int, causal: bool, width: int | None, message: str) -> None:
    query, keys = torch.zeros(rows, 2, 8), torch.zeros(5, 2, 8)
    with pytest.raises(ValueError, match=message):
        dense_attention.attend(query, keys, keys, scale=1.0, causal=causal, width=width)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "device", "served"),
    [
        (128, torch.float16, "cuda", True),
        (64, torch.bfloat16, "cuda", True),
        (128, torch.float32, "cuda", False),
        (96, torch.float16, "cuda", False),
        (128, torch.float16, "cpu", False),
    ],
)
def test_which_heads_are_served(head_dim: int, dtype: torch.dtype, device: str, served: bool) -> None:
    assert dense_attention.serves(head_dim, dtype, torch.device(device)) == served


def drawn(rows: int, tokens: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values of Llama's numbers of heads, on the GPU."""
    draw = torch.Generator("cuda").manual_seed(head_dim)
    sizes = ((rows, 32), (tokens, 8), (tokens, 8))
    return [torch.randn(count, heads, head_dim, generator=draw, device="cuda", dtype=dtype) for count, heads in sizes]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", dense_attention.HEAD_SIZES)
@pytest.mark.parametrize(
    ("rows", "tokens", "causal", "width"), [(77, 600, True, 97), (1, 333, True, None), (130, 999, False, None)]
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_attention(
    library: Any, dtype: torch.dtype, head_dim: int, rows: int, tokens: int, causal: bool, width: int | None
) -> None:
    """Keys are part of a wider tensor, whose other tokens are NaN."""
    query, keys, values = drawn(rows, tokens + 9, head_dim, dtype)
    for each in (keys, values):
        each[:5] = each[-4:] = torch.nan
    seen = [each[5:-4] for each in (keys, values)]
    out, lse = library(query, *seen, 0.1, causal, -1 if width is None else width - 1)
    wanted, level = plain_attention(
        query.double(), *(each.double() for each in seen), scale=0.1, causal=causal, width=width
    )
    assert (out.double() - wanted).abs().max() <= TOLERANCE[dtype] and (lse - level).abs().max() <= LEVEL


@pytest.mark.parametrize("rows", [64, 512])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("library", LIBRARIES)
def test_attention_is_the_same_each_time(library: Any, head_dim: int, rows: int, times: int = 5000) -> None:
    """Also while another stream keeps the GPU busy. A row of a head that differs is one that was read too early."""
    given = drawn(rows, 4736, head_dim, torch.float16)
    (first, lse), wanted = library(*given, 0.1, True, 4095), plain_attention(*given, scale=0.1, causal=True, width=4096)
    assert (first - wanted[0]).abs().max() <= TOLERANCE[torch.float16] and (lse - wanted[1]).abs().max() <= LEVEL
    beside, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    differ, levels = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
    for number in range(times):
        if number % 10 == 0:
            with torch.cuda.stream(beside):
                noise = (noise * 1.0001).sin_()
        out, level = library(*given, 0.1, True, 4095)
        differ += (out != first).any(-1).sum()
        levels += (level != lse).sum()
    assert (int(differ), int(levels)) == (0, 0), f"rows of heads, and log-sum-exps, that differ in {times} calls"
