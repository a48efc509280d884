"""SGLang's hybrid linear models on a machine without a GPU: their layers with a state, in plain PyTorch.

SGLang has kernels in Triton for these layers, and builds of `sgl-kernel` for CPUs that the package registry lacks. What
a model calls besides its attention backend (norms, gates, what splits projections) is replaced function by function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_ext.kernels.gated_delta import norm_gated
from sglang_ext.names import AttentionBackend, ModelRunner, Passed

if TYPE_CHECKING:
    Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def around_attn_backend_wrapper(
    original: Callable[..., AttentionBackend], runner: ModelRunner, full: AttentionBackend
) -> AttentionBackend:
    """AROUND attn_backend_wrapper: layers with the gated delta rule run in PyTorch where there is no GPU."""
    wrapped = original(runner, full)
    if torch.cuda.is_available() or not hasattr(wrapped, "linear_attn_backend"):
        return wrapped
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    from sglang_ext.attention.on_torch_linear import TorchDeltaRule

    if type(wrapped.linear_attn_backend) is GDNAttnBackend:
        wrapped.linear_attn_backend = TorchDeltaRule(runner)
        wrapped.attn_backend_list = [full, wrapped.linear_attn_backend]
    return wrapped


def around_get_device_module(original: Callable[..., Passed], device: Passed = None) -> Passed:
    """AROUND torch.get_device_module (Qwen3-Next): newer versions name CUDA where there is no GPU, too."""
    return torch.cpu if device is None and not torch.cuda.is_available() else original(device)


def around_rms_norm_gated(
    original: Callable[..., torch.Tensor],
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """AROUND fused_norm_gate.rms_norm_gated (Qwen3-Next): the norm behind a state, times its gate."""
    if x.device.type != "cpu":
        return original(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps)
    if bias is not None or residual is not None or prenorm:
        raise ValueError(
            "a gated norm with a bias or a residual on the CPU: expected one of a gated delta rule's layer"
        )
    return norm_gated(x, g, weight, eps, activation)


def around_layer_norm_gated(
    original: Callable[..., torch.Tensor],
    *,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """AROUND layernorm_gated.rms_norm_gated (Qwen3.5): likewise."""
    if x.device.type != "cpu":
        return original(
            x=x,
            weight=weight,
            bias=bias,
            z=z,
            eps=eps,
            group_size=group_size,
            norm_before_gate=norm_before_gate,
            is_rms_norm=is_rms_norm,
            activation=activation,
        )
    if bias is not None or z is None or group_size is not None or not (norm_before_gate and is_rms_norm):
        raise ValueError("a gated norm of another kind on the CPU: expected one of a gated delta rule's layer")
    return norm_gated(x, z, weight, eps, activation)


def around_split_interleaved(
    original: Callable[..., Split],
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> Split:
    """AROUND fused_qkvzba_split_reshape_cat (Qwen3-Next): projections of a key head stand together.

    Returns:
        (queries, keys and values [tokens, ...] of all heads, z [tokens, heads, value_dim], b, a [tokens, heads]).
    """
    if qkvz.device.type != "cpu":
        return original(qkvz, ba, key_heads, heads, key_dim, value_dim)
    tokens, group = qkvz.shape[0], heads // key_heads
    q, k, v, z = qkvz.view(tokens, key_heads, -1).split([key_dim, key_dim, group * value_dim, group * value_dim], -1)
    b, a = ba.view(tokens, key_heads, -1).split([group, group], -1)
    mixed = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], -1)
    return mixed, z.reshape(tokens, heads, value_dim), b.reshape(tokens, heads), a.reshape(tokens, heads)


def around_split_contiguous(
    original: Callable[..., Split],
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> Split:
    """AROUND fused_qkvzba_split_reshape_cat_contiguous (Qwen3.5): each projection has all heads. Returns likewise."""
    if qkvz.device.type != "cpu":
        return original(qkvz, ba, key_heads, heads, key_dim, value_dim)
    width = heads * value_dim
    mixed, z = qkvz.split([qkvz.shape[-1] - width, width], -1)
    b, a = ba.split([heads, heads], -1)
    return mixed.contiguous(), z.reshape(-1, heads, value_dim), b.contiguous(), a.contiguous()


def around_sigmoid_mul(
    original: Callable[..., torch.Tensor], attention: torch.Tensor, gate: torch.Tensor, inplace: bool = False
) -> torch.Tensor:
    """AROUND fused_sigmoid_mul (Qwen3.5): the gate of what attention read."""
    if attention.device.type != "cpu":
        return original(attention, gate, inplace)
    factor: Passed = gate.reshape(attention.shape).sigmoid()
    return attention.mul_(factor) if inplace else attention * factor


def around_gated_add(
    original: Callable[..., None],
    hidden: torch.Tensor,
    gate_weight: torch.Tensor,
    shared: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """AROUND fused_gate_sigmoid_mul_add (models with a shared expert): add what it says, times its gate, to `out`."""
    if hidden.device.type != "cpu":
        return original(hidden, gate_weight, shared, out)
    out.add_((hidden @ gate_weight).sigmoid().unsqueeze(-1) * shared)
