"""Virtual requests of the libraries that SGLang brings, against plain PyTorch; how they are asked, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from sglang_ext.kernels.hopper import is_hopper
from sglang_ext.kernels.view_attention.flash_attention_impl import FlashAttentionRequests
from sglang_ext.kernels.view_attention.flashinfer_impl import FlashInferRequests, LayerHeads
from sglang_ext.kernels.view_attention.virtual_requests import VirtualBatch, VirtualRequests
from tests.kernels.dense import check_signature, plain_attention, stand_in

GPU = torch.cuda.is_available()
HOPPER = GPU and is_hopper(torch.device("cuda"))
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
LEVEL = 1e-3
"""Of log-sum-exps, which both libraries have in float32."""
ROUNDED_LEVEL = 2**-9 + LEVEL
"""Of FlashInfer's `fa2` in bfloat16, which adds up probabilities that are rounded to eight bits."""
ROWS, TOKENS = (131, 1, 37, 300, 5), (257, 9, 0, 1031, 5)
"""Of odd numbers, and one that sees nothing."""


def like_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    num_splits: int,
    return_softmax_lse: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """SGLang's `flash_attn_with_kvcache` over pages of one slot, as its documentation has it."""
    assert return_softmax_lse and {each.dtype for each in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
    assert num_splits == (1 if q.shape[0] * q.shape[1] >= 65_536 else 0)
    assert max_seqlen_q == cu_seqlens_q.diff().max() and k_cache.shape[1] == 1
    out = torch.empty_like(q) if out is None else out
    levels = q.new_full((q.shape[1], q.shape[0]), float("-inf"))
    ends = cu_seqlens_q.tolist()
    for begin, end, tokens, pages in zip(ends[:-1], ends[1:], cache_seqlens.tolist(), page_table, strict=True):
        keys, values = (cache[pages[:tokens].long(), 0] for cache in (k_cache, v_cache))
        out[begin:end] = 0
        if tokens:
            found, level = plain_attention(q[begin:end], keys, values, scale=softmax_scale, causal=causal)
            out[begin:end], levels[:, begin:end] = found, level.T
    return out, levels, torch.empty(0), torch.empty(0)


def test_sglangs_kernel_takes_what_it_is_asked_with() -> None:
    check_signature(like_pages)


def drawn(head_dim: int, dtype: torch.dtype, device: str, heads: tuple[int, int]) -> list[torch.Tensor]:
    """Queries, and caches of keys and values whose slots have no order, with NaN where no request looks."""
    draw = torch.Generator(device).manual_seed(head_dim)
    sizes = ((sum(ROWS), heads[0]), (sum(TOKENS) + 7, heads[1]), (sum(TOKENS) + 7, heads[1]))
    query, *caches = (torch.randn(n, h, head_dim, generator=draw, device=device, dtype=dtype) for n, h in sizes)
    for cache in caches:
        cache[sum(TOKENS) :] = float("nan")
    return [query, *caches]


def compare(
    kernel: VirtualRequests, tensors: Sequence[torch.Tensor], causal: bool, tolerance: float, level: float
) -> None:
    """Against plain attention, request by request; twice with one plan, into an output of NaN and a new one."""
    query, keys, values = tensors
    scale = query.shape[2] ** -0.5
    slots = torch.randperm(sum(TOKENS), generator=torch.Generator().manual_seed(1)).int().to(query.device)
    kernel.plan(VirtualBatch(ROWS, TOKENS, slots, causal, scale))
    for out in (torch.full_like(query, float("nan")), None):
        found, levels = kernel.run(query, keys, values, out)
        assert out is None or found.data_ptr() == out.data_ptr()
        row = token = 0
        for rows, tokens in zip(ROWS, TOKENS, strict=True):
            seen, part = slots[token : token + tokens].long(), slice(row, row + rows)
            if tokens:
                expected = plain_attention(query[part], keys[seen], values[seen], scale=scale, causal=causal)
                assert (found[part] - expected[0]).abs().max() <= tolerance
                assert (levels[part] - expected[1]).abs().max() <= level
            else:
                assert not found[part].any() and (levels[part] == -torch.inf).all()
            row, token = row + rows, token + tokens


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_is_asked_as_it_is_documented(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, like_pages)
    tensors = drawn(16, torch.float32, "cpu", (6, 2))
    compare(FlashAttentionRequests(torch.device("cpu")), tensors, causal, 1e-5, 1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_flash_attention(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    tensors = drawn(head_dim, dtype, "cuda", (32, 8))
    compare(FlashAttentionRequests(torch.device("cuda")), tensors, causal, TOLERANCE[dtype], LEVEL)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["fa2", "auto"])
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
def test_flashinfer(backend: str, causal: bool) -> None:
    tensors = drawn(128, torch.bfloat16, "cuda", (32, 8))
    kernel = FlashInferRequests(torch.device("cuda"), LayerHeads(32, 8, 128, 128, torch.bfloat16), backend)
    compare(kernel, tensors, causal, TOLERANCE[torch.bfloat16], ROUNDED_LEVEL if backend == "fa2" else LEVEL)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda slots: VirtualBatch((3, 4), (5,), slots, False, 1.0), "2 row counts and 1 token counts: expected as"),
        (lambda slots: VirtualBatch((3,), (6,), slots, False, 1.0), "5 KV slots for 6 tokens: expected one each"),
        (lambda slots: VirtualBatch((6,), (5,), slots, True, 1.0), "6 rows and 5 tokens: its own are missing"),
    ],
)
def test_wrong_input(make: Callable[[torch.Tensor], VirtualBatch], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(torch.zeros(5, dtype=torch.int32))


def test_many_rows_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is split takes memory, and gains nothing where all multiprocessors are busy."""
    asked = []

    def kernel(q: torch.Tensor, *_: torch.Tensor, num_splits: int, **given: object) -> tuple[torch.Tensor, ...]:
        asked.append(num_splits)
        return q, q[..., 0].T

    stand_in(monkeypatch, kernel)
    for rows in (2047, 2048):
        query, found = torch.zeros(rows, 32, 8), FlashAttentionRequests(torch.device("cpu"))
        found.plan(VirtualBatch((rows,), (rows,), torch.zeros(rows, dtype=torch.int32), True, 1.0))
        found.run(query, query, query)
    assert asked == [0, 1]


def test_another_query_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, like_pages)
    kernel, query = FlashAttentionRequests(torch.device("cpu")), torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="no virtual requests are planned: call plan before run"):
        kernel.run(query, query, query)
    kernel.plan(VirtualBatch((3,), (3,), torch.zeros(3, dtype=torch.int32), True, 1.0))
    with pytest.raises(ValueError, match="4 query rows, 3 were planned: plan again"):
        kernel.run(query, query, query)
