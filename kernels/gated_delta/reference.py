"""The gated delta rule and what stands around it, in plain PyTorch.

A layer has no keys and values of a context, but one matrix a head, its state S [value_dim, key_dim]. A token with query
q, key k and value v, both of unit length, decays it by exp(g), corrects what it says of the key by a share beta of the
error, and reads it (Yang, Kautz and Hatamizadeh: Gated Delta Networks, 2025, equation 10):

    S <- exp(g) S;    S <- S + beta (v - S k) k^T;    o = S q / sqrt(key_dim)

A prompt is computed in chunks (section 3.3): within a chunk, the corrections of all tokens are the solution of one
triangular system, and the state is read and written once.
"""

from __future__ import annotations

import torch
from torch.nn.functional import conv1d, softplus

CHUNK = 64
"""Tokens of a chunk."""

_EPSILON = 1e-6  # of the squared length of a query and of a key


def causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve each channel with the tokens before, and apply SiLU.

    Args:
        x: [rows, channels, tokens], of rows that do not know each other; any floating dtype.
        weight: [channels, width]; the last one is a token's own.
        bias: [channels], or None.
        state: [rows, channels, width - 1] the tokens before the first, oldest first; zeros where there are none.

    Returns:
        ([rows, channels, tokens] in x's dtype, the state behind the last token in its own dtype).
    """
    seen = torch.cat((state.to(x.dtype), x), -1)
    out = conv1d(seen, weight.to(x.dtype).unsqueeze(1), bias, groups=weight.shape[0])
    return torch.nn.functional.silu(out), seen[..., seen.shape[-1] - state.shape[-1] :].to(state.dtype)


def gates(
    a: torch.Tensor, b: torch.Tensor, decay: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log of the decay, share of the error), each [..., heads] float32.

    Args:
        a, b: [..., heads] what the layer's projections say of each.
        decay: [heads] log of the largest decay (`A_log` of a checkpoint).
        shift: [heads] added to `a` (`dt_bias`).
    """
    return -decay.float().exp() * softplus(a.float() + shift.float()), b.float().sigmoid()


def delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    share: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of several rows.

    Args:
        query, key: [rows, key_heads, key_dim]; key_heads divides heads.
        value: [rows, heads, value_dim].
        log_decay, share: [rows, heads], of `gates`.
        state: [rows, heads, value_dim, key_dim].

    Returns:
        ([rows, heads, value_dim] in value's dtype, the states behind the tokens in float32).
    """
    heads = value.shape[-2]
    query, key = _unit(query, heads) * query.shape[-1] ** -0.5, _unit(key, heads)
    state = state.float() * log_decay.exp()[..., None, None]
    error = value.float() - torch.einsum("rhvk,rhk->rhv", state, key)
    state = state + torch.einsum("rhv,rhk->rhvk", error * share.unsqueeze(-1), key)
    return torch.einsum("rhvk,rhk->rhv", state, query).to(value.dtype), state


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    share: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of one row, one after the other.

    Args:
        query, key: [tokens, key_heads, key_dim]; key_heads divides heads.
        value: [tokens, heads, value_dim].
        log_decay, share: [tokens, heads], of `gates`.
        state: [heads, value_dim, key_dim] before the first token.

    Returns:
        ([tokens, heads, value_dim] in value's dtype, the state behind the last token in float32).
    """
    heads = value.shape[-2]
    query, key = _unit(query, heads) * query.shape[-1] ** -0.5, _unit(key, heads)
    rows = [each.transpose(0, 1) for each in (query, key, value.float(), log_decay.unsqueeze(-1), share.unsqueeze(-1))]
    state, out = state.float(), []
    for begin in range(0, value.shape[0], CHUNK):
        q, k, v, g, beta = (each[:, begin : begin + CHUNK] for each in rows)
        read, state = _chunk(q, k, v, g, beta, state)
        out.append(read)
    return torch.cat(out, 1).transpose(0, 1).to(value.dtype), state


def _chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    share: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the tokens of a chunk read [heads, tokens, value_dim], the state behind them); inputs likewise, float32."""
    since = log_decay.cumsum(1)  # the decay of what was there before the chunk
    between = (since - since.transpose(1, 2)).tril().exp().tril()  # of a token's correction, seen by a later one
    seen = share * (key @ key.transpose(1, 2)) * between  # the diagonal is taken for ones
    wanted = share * (value - since.exp() * (key @ state.transpose(1, 2)))
    corrections = torch.linalg.solve_triangular(seen, wanted, upper=False, unitriangular=True)
    before = since.exp() * (query @ state.transpose(1, 2))
    out = before + ((query @ key.transpose(1, 2)) * between) @ corrections
    left = since[:, -1:].exp()
    return out, left * state + corrections.transpose(1, 2) @ (key * (since[:, -1:] - since).exp())


def norm_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float, activation: str
) -> torch.Tensor:
    """RMS norm of what a state was read for, times its gate.

    Args:
        x, gate: [..., width].
        weight: [width].
        epsilon: added to the mean of the squares.
        activation: `silu` (also called `swish`) or `sigmoid`, of the gate.

    Returns:
        [..., width] in x's dtype; computed in float32.

    Raises:
        ValueError: the activation is another one.
    """
    if activation not in ("silu", "swish", "sigmoid"):
        raise ValueError(f"a gate of activation {activation!r}: expected silu, swish or sigmoid")
    normed = torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), epsilon)
    wide = gate.float()
    gated = wide.sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(wide)
    return (normed * gated).to(x.dtype)


def _unit(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[..., heads, dim] float32: vectors of unit length, each of them of as many heads as share it."""
    x = x.float()
    return (x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()).repeat_interleave(heads // x.shape[-2], -2)
