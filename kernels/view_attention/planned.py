"""Attention of a batch over a loaded plan: which kernel runs it, and what every kernel may rely on."""

from __future__ import annotations

import torch

from sglang_ext.kernels.float8 import FLOAT8
from sglang_ext.kernels.view_attention import triton_impl
from sglang_ext.kernels.view_attention.buffers import DTYPES, PlanBuffers
from sglang_ext.kernels.view_attention.config import Config


def view_attention_plan(
    query: torch.Tensor,
    buffers: PlanBuffers,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Attention of a batch over the loaded plan; equal to `view_attention` of each request's view.

    Few launches, no synchronisation. In a CUDA graph the plan may change between replays, as long as plans for
    another `config` are not loaded.

    Args:
        query: [rows, heads, head_dim], rotated at the rows' positions; head_dim a multiple of 16. Rows beyond the
            plan's are padding.
        buffers: holds the plan.
        key_cache: [num_slots, kv_heads, head_dim] float32, bfloat16, float16 or float8 e4m3, rotated at the written
            positions. Float8 needs a `config` without groups.
        value_cache: [num_slots, kv_heads, value_dim] in the same type; value_dim a multiple of 16.
        scale: factor of the logits, usually head_dim ** -0.5.
        out: [rows, heads, value_dim] to be written, any floating type; made in the query's type when left out.
        lse: [rows, heads] float32 to be written with the natural-log sums; nothing is written when left out.
        config: what every plan of this graph is cut for; the loaded plan's when left out.

    Returns:
        `out`. A row that sees nothing, padding included, gets zeros and a log-sum-exp of -inf.

    Raises:
        ValueError: shapes, types, strides or devices other than these, more rows than the buffers hold, fewer than the
            plan has, or a config other than the loaded plan's.
    """
    if out is None:
        out = query.new_empty(query.shape[0], buffers.heads, buffers.value_dim)
    _check_output("out", out, (query.shape[0], buffers.heads, buffers.value_dim), query.device)
    attend(query, buffers, key_cache, value_cache, scale, config)
    return merge(buffers, out, lse, config)


def attend(
    query: torch.Tensor,
    buffers: PlanBuffers,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    config: Config | None = None,
) -> None:
    """The first half of `view_attention_plan`: every item's output and log-sum-exp, into the buffers' partials."""
    config = _config(buffers, config)
    plan = buffers.plan
    rows = _check_attention(query, buffers, key_cache, value_cache)
    if plan is not None and rows < plan.num_rows:
        raise ValueError(f"{rows} query rows for a plan of {plan.num_rows}: expected at least as many")
    if rows == 0:
        return
    workers = config.workers(buffers.kv_heads)
    if workers > buffers.capacity.workers:
        raise ValueError(f"{workers} workers: expected at most {buffers.capacity.workers}; allocate larger PlanBuffers")
    if config.groups:
        from sglang_ext.kernels.view_attention import hopper_impl  # Gluon: not everywhere

        hopper_impl.attend(query, buffers, key_cache, value_cache, scale, config)
    else:
        triton_impl.attend(query, buffers, key_cache, value_cache, scale, config)


def merge(
    buffers: PlanBuffers, out: torch.Tensor, lse: torch.Tensor | None = None, config: Config | None = None
) -> torch.Tensor:
    """The second half of `view_attention_plan`: each row's entries, merged by log-sum-exp into `out`."""
    config = _config(buffers, config)
    rows, heads, value_dim = out.shape[0], buffers.heads, buffers.value_dim
    _check_output("out", out, (rows, heads, value_dim), buffers.device)
    if lse is not None:
        _check_output("lse", lse, (rows, heads), buffers.device)
    if rows:
        triton_impl.merge(buffers, out, lse, config)
    return out


def _config(buffers: PlanBuffers, config: Config | None) -> Config:
    plan = buffers.plan
    if config is None:
        if plan is None:
            raise ValueError("no plan is loaded and no config given: load a plan, or say for which config to run")
        return plan.config
    if plan is not None and plan.config != config:
        raise ValueError(f"config {config} for a plan that was cut for {plan.config}: expected the same")
    return config


def _check_attention(
    query: torch.Tensor, buffers: PlanBuffers, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> int:
    if query.dim() != 3 or query.shape[1] != buffers.heads or query.shape[2] % 16 or not query.shape[2]:
        raise ValueError(
            f"query {tuple(query.shape)}: expected [rows, {buffers.heads}, head_dim] with head_dim a multiple of 16"
        )
    rows, _, head_dim = query.shape
    if rows > buffers.capacity.rows:
        raise ValueError(f"{rows} query rows: expected at most {buffers.capacity.rows}; allocate larger PlanBuffers")
    if buffers.rope.rotary_dim > head_dim:
        raise ValueError(f"a rotary part of {buffers.rope.rotary_dim} in heads of {head_dim}: expected no more")
    for name, cache, dim in (("key", key_cache, head_dim), ("value", value_cache, buffers.value_dim)):
        if cache.dim() != 3 or cache.shape[1:] != (buffers.kv_heads, dim) or dim % 16:
            raise ValueError(
                f"{name} cache {tuple(cache.shape)}: expected [num_slots, {buffers.kv_heads}, {dim}], a multiple of 16"
            )
    if key_cache.dtype not in (*DTYPES, FLOAT8) or value_cache.dtype != key_cache.dtype or query.dtype not in DTYPES:
        raise ValueError(
            f"query {query.dtype}, keys {key_cache.dtype}, values {value_cache.dtype}: expected types of {DTYPES}, "
            f"equal for keys and values, which may be {FLOAT8}, too; use view_attention for others"
        )
    for name, tensor in (("query", query), ("key cache", key_cache), ("value cache", value_cache)):
        if tensor.stride(2) != 1:
            raise ValueError(f"{name} with strides {tensor.stride()}: expected the last dimension contiguous")
        if tensor.device != buffers.device:
            raise ValueError(f"{name} on {tensor.device}: expected {buffers.device}")
    return int(rows)


def _check_output(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.shape != shape or tensor.device != device or tensor.stride(-1) != 1 or not tensor.is_floating_point():
        raise ValueError(
            f"{name} {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {tensor.stride()}: expected "
            f"{shape}, floating, on {device}, last dimension contiguous"
        )
