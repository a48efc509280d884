"""A KV cache in float8 around the kernels: scales of a checkpoint, clusters, blocks on the host, and what serves it."""

from __future__ import annotations

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

from sglang_ext import compat
from sglang_ext.attention import choice
from sglang_ext.attention.backend import ViewBackend
from sglang_ext.attention.model import Machine
from sglang_ext.attention.on_torch import TorchViews
from sglang_ext.attention.readers import plans, prefill
from sglang_ext.attention.readers.reader import Reader
from sglang_ext.cache.budget import ClusterBytes, KVShape
from sglang_ext.cache.cluster_pool import ClusterMemory
from sglang_ext.cache.clusters import cluster_run
from sglang_ext.cache.host_tier import PAGE, HostTier
from sglang_ext.kernels.dense_attention import FLASH_ATTENTION_3, FLASHINFER
from sglang_ext.kernels.float8 import FLOAT8, bytes_of
from sglang_ext.kernels.view_attention import hopper_impl
from sglang_ext.kernels.view_attention.flashinfer_impl import LayerHeads
from sglang_ext.policies.double_p import DoubleP
from sglang_ext.systems.registry import systems

HEADS, DIM, SLOTS = 2, 32, 40
CONFIG = DoubleP(cluster=4, segment=32, append=16, iterations=3)


# ---- scales ----


class Dense(Reader[Any, Any]):
    """Every row sees slots 1 to 8."""

    def step(self, batch: Any) -> str:
        return "step"

    def before_layers(self, step: Any, forward: Any, graph_rows: int | None) -> str:
        return "step"

    def read(self, call: Any) -> torch.Tensor:
        keys, values = (cache[1:9].float() for cache in call.caches)
        weights = torch.softmax(torch.einsum("rhd,thd->rht", call.query, keys) * call.scale, -1)
        return torch.einsum("rht,thd->rhd", weights, values)


def pool(dtype: torch.dtype) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        SLOTS, 1, dtype, head_num=HEADS, head_dim=DIM, layer_num=1, device="cpu", enable_memory_saver=False
    )


def layer(key_scale: float | None, value_scale: float | None) -> RadixAttention:
    """As SGLang leaves it, where a checkpoint has such scales (`BaseKVCacheMethod`), and where it has none."""
    found = RadixAttention(HEADS, DIM, DIM**-0.5, num_kv_heads=HEADS, layer_id=0)
    if key_scale is not None:
        found.k_scale, found.v_scale = torch.tensor(key_scale), torch.tensor(value_scale)
        found.k_scale_float, found.v_scale_float = key_scale, value_scale
    return found


def written_and_read(kind: type[ViewBackend], of: RadixAttention, dtype: torch.dtype = FLOAT8) -> Any:
    """(what the KV cache holds, what a layer gives, its query, its new keys and values)."""
    gen = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(8, HEADS, DIM, generator=gen) for _ in range(3))
    backend = kind.__new__(kind)
    backend.reader, backend._pool, backend._carry = Dense(), pool(dtype), {}
    backend.prepared, backend.loaded, backend._planned = "step", "step", True
    batch = SimpleNamespace(out_cache_loc=torch.arange(1, 9))
    got = backend.forward_decode(query.flatten(1), keys.clone(), values.clone(), of, batch).view(8, HEADS, DIM)
    return backend._pool.get_kv_buffer(0), got, query, keys, values


def test_scales_of_a_checkpoint() -> None:
    """Written divided, as SGLang's backends write, and read multiplied: attention over what was meant."""
    by = 0.03, 2.5
    held, got, query, keys, values = written_and_read(ViewBackend, layer(*by))
    stock = pool(FLOAT8)
    of = layer(*by)
    stock.set_kv_buffer(of, KVWriteLoc(torch.arange(1, 9), None), keys.clone(), values.clone(), of.k_scale, of.v_scale)
    assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(held, stock.get_kv_buffer(0), strict=True))
    k, v = (cache[1:9].double() * scale for cache, scale in zip(held, by, strict=True))
    weights = torch.softmax(torch.einsum("rhd,thd->rht", query.double(), k) * DIM**-0.5, -1)
    want = torch.einsum("rht,thd->rhd", weights, v)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert (k - keys).abs().max() < 0.15 * keys.abs().max(), "float8 rounds, and does no more"


@pytest.mark.parametrize("dtype", [FLOAT8, torch.float32], ids=str)
def test_where_there_are_no_scales(dtype: torch.dtype) -> None:
    """None in the checkpoint; a KV cache that is not in float8; and SGLang's PyTorch attention, which knows none."""
    kinds = [(ViewBackend, layer(None, None)), (TorchViews, layer(0.03, 2.5))]
    if dtype != FLOAT8:
        kinds.append((ViewBackend, layer(0.03, 2.5)))
    for kind, of in kinds:
        held, got, query, keys, values = written_and_read(kind, of, dtype)
        for cache, new in zip(held, (keys, values), strict=True):
            assert torch.equal(cache[1:9].float(), new.to(dtype).float())
        wide = [cache[1:9].float() for cache in held]
        weights = torch.softmax(torch.einsum("rhd,thd->rht", query, wide[0]) * DIM**-0.5, -1)
        torch.testing.assert_close(got, torch.einsum("rht,thd->rhd", weights, wide[1]), rtol=0, atol=1e-5)


# ---- clusters ----


def caches(dtype: torch.dtype) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Of two layers, float8 numbers in `dtype`."""
    gen = torch.Generator().manual_seed(0)
    made = {number: [torch.randn(SLOTS, HEADS, DIM, generator=gen).to(FLOAT8) for _ in range(2)] for number in (3, 4)}
    return {number: (keys.to(dtype), values.to(dtype)) for number, (keys, values) in made.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clusters_of_a_cache_in_float8_are_those_of_the_wider_one(dtype: torch.dtype) -> None:
    slots, filled = torch.arange(3, 36), []
    for memory in (ClusterMemory(caches(FLOAT8), CONFIG, dtype=dtype), ClusterMemory(caches(dtype), CONFIG)):
        run = memory.make(slots, 0)
        memory.settle()
        filled.append((run, memory.layers))
    for number in (3, 4):
        got, want = (vars(layers[number]) for _, layers in filled)
        assert got["centroids"].dtype == got["values"].dtype == dtype
        assert all(torch.equal(got[name], want[name]) for name in want)
    options: dict[str, Any] = {"cluster": 4, "iterations": 3, "assignment": "inner"}
    mine = cluster_run(caches(FLOAT8), slots, 0, dtype=dtype, **options)
    theirs = cluster_run(caches(dtype), slots, 0, **options)
    for number in (3, 4):
        for name, tensor in vars(mine.layers[number]).items():
            assert torch.equal(tensor, vars(theirs.layers[number])[name])


def test_the_memory_budget_knows_that_clusters_are_wider_than_the_cache() -> None:
    memory = ClusterMemory(caches(FLOAT8), CONFIG, dtype=torch.bfloat16)
    shape = KVShape(2, HEADS, DIM, DIM, itemsize=1, query_itemsize=2)
    assert memory.bytes_of(1, 0) == memory.width * ClusterBytes.of(shape, 2).cluster
    pooled = memory.layers[3]
    of_a_tile = sum(x[0].numel() * x.element_size() for x in (pooled.centroids, pooled.values))
    assert 2 * of_a_tile + 2 * HEADS * memory.width * 8 == memory.bytes_of(1, 0)


# ---- blocks on the host ----


def test_blocks_come_back_from_the_host_as_they_were() -> None:
    cache = caches(FLOAT8)
    tier = HostTier(cache, 8 * PAGE * 2 * 2 * HEADS * DIM)
    slots, others = torch.arange(5, 25), torch.arange(18, 38)
    kept = [bytes_of(x)[slots].clone() for pair in cache.values() for x in pair]
    tier.store("block", array("q", range(20)), 0, slots, ())
    for keys, values in cache.values():
        bytes_of(keys).fill_(0x7F)  # NaN
        bytes_of(values).fill_(0x7F)
    tier.load("block", others)
    back = [bytes_of(x)[others] for pair in cache.values() for x in pair]
    assert all(torch.equal(a, b) for a, b in zip(kept, back, strict=True))


# ---- what serves it ----


def model(dtype: torch.dtype, device: str = "cuda") -> Any:
    shape = compat.AttentionShape(32, 8, 128, 128, torch.bfloat16, 0.1, num_sms=132)
    checked = lambda float8=False: None  # noqa: E731
    return SimpleNamespace(shape=shape, cache_dtype=dtype, device=torch.device(device), check_cache_type=checked)


def test_kernels_for_16_bits_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(hopper_impl, "serves", lambda *given: asked.append(given[4]) or given[4] != FLOAT8)
    assert plans._hopper_serves(model(torch.bfloat16)) and not plans._hopper_serves(model(FLOAT8))
    assert asked == [torch.bfloat16, FLOAT8]
    monkeypatch.setattr(prefill, "FlashAttentionRequests", lambda *_: "fa3")
    monkeypatch.setattr(prefill, "FlashInferRequests", lambda *given: given[1:])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(prefill, "library_of", lambda _: FLASH_ATTENTION_3)
    found = prefill.dense_kernel
    kinds = [found(model(dtype), Machine("flashinfer", None)) for dtype in (torch.bfloat16, FLOAT8)]
    assert kinds == ["fa3", None]
    narrow = model(torch.bfloat16)
    narrow.shape = replace(narrow.shape, value_dim=64)
    assert found(narrow, Machine("flashinfer", None)) == (LayerHeads(32, 8, 128, 64, torch.bfloat16), "auto")
    monkeypatch.setattr(prefill, "library_of", lambda _: FLASHINFER)
    assert found(model(torch.bfloat16), Machine("flashinfer", None)) == (
        LayerHeads(32, 8, 128, 128, torch.bfloat16),
        "auto",
    )
    assert found(model(torch.bfloat16), Machine("triton", None)) is None


def test_gpus_that_do_not_convert_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, found=capability: found)
        assert prefill.dense_kernel(model(FLOAT8), Machine("triton", None)) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(ValueError, match=r"float8 on a GPU of compute capability 8\.0: kernels read it from 8\.9 on"):
        prefill.dense_kernel(model(FLOAT8), Machine("triton", None))


def test_triton_serves_it_unless_plain_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    dbsa = systems()["dbsa"]
    monkeypatch.delenv("SGLANG_EXT_KERNELS", raising=False)
    monkeypatch.setattr(choice, "_hopper", lambda: True)
    found = [choice.kernels(dbsa, dtype, float8) for dtype in ("auto", "float32") for float8 in (False, True)]
    assert found == ["flashinfer", "triton", "torch", "torch"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("SGLANG_EXT_KERNELS", "flashinfer")
    with pytest.raises(ValueError, match=r"flashinfer with a KV cache in float8.*use triton or auto"):
        choice.kernels(dbsa, "auto", float8=True)
    assert choice.kernels(dbsa, "auto") == "flashinfer"
