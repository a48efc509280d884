"""The gated delta rule and what stands around it, beside definitions written out token by token in float64."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_ext.attention import linear
from sglang_ext.kernels.gated_delta import causal_convolution, delta_rule, delta_step, gates, norm_gated
from sglang_ext.kernels.gated_delta.reference import CHUNK

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 24


def drawn(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """Query, key, value, log of the decay (from nothing in a hundred tokens to nearly all in one), share, state."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    decay = torch.tensor([-9.0, -5.0, -1.0, 1.5])
    log_decay, share = gates(normal(tokens, HEADS), normal(tokens, HEADS), decay, normal(HEADS))
    queries = [normal(tokens, KEY_HEADS, KEY_DIM) for _ in range(2)]
    return [*queries, normal(tokens, HEADS, VALUE_DIM), log_decay, share, normal(HEADS, VALUE_DIM, KEY_DIM)]


def expected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    share: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equation 10 of the paper."""
    states, out = state.double(), torch.zeros(value.shape, dtype=torch.float64)
    for token in range(value.shape[0]):
        for head in range(HEADS):
            q, k = (each[token, head * KEY_HEADS // HEADS].double() for each in (query, key))
            q, k = (each / math.sqrt(float(each @ each) + 1e-6) for each in (q, k))
            s = states[head] * math.exp(float(log_decay[token, head]))
            s = s + float(share[token, head]) * torch.outer(value[token, head].double() - s @ k, k)
            states[head], out[token, head] = s, s @ q / math.sqrt(KEY_DIM)
    return out, states


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_a_prompt(tokens: int) -> None:
    given = drawn(tokens)
    before = given[-1].clone()
    out, state = delta_rule(*given)
    wanted, left = expected(*given)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(state.double(), left, rtol=0, atol=1e-5)
    assert torch.equal(given[-1], before), "the state that was given is the caller's"


def test_chunks_go_on_where_the_last_one_ended() -> None:
    *rows, state = drawn(150)
    whole, end = delta_rule(*rows, state)
    first, middle = delta_rule(*(each[:90] for each in rows), state)
    second, last = delta_rule(*(each[90:] for each in rows), middle)
    torch.testing.assert_close(torch.cat((first, second)), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(last, end, rtol=0, atol=1e-5)


def test_steps_of_several_rows() -> None:
    several = [drawn(5, seed) for seed in range(3)]
    states = torch.stack([given[-1] for given in several])
    read = []
    for token in range(5):
        rows = [torch.stack([given[part][token] for given in several]) for part in range(5)]
        out, states = delta_step(*rows, states)
        read.append(out)
    for row, given in enumerate(several):
        wanted, left = expected(*given)
        torch.testing.assert_close(torch.stack(read)[:, row].double(), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(states[row].double(), left, rtol=0, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_knows_what_came_before(biased: bool) -> None:
    gen = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 3, 7, generator=gen), torch.randn(3, 4, generator=gen)
    bias = torch.randn(3, generator=gen) if biased else None
    nothing = torch.zeros(2, 3, 3)
    out, state = causal_convolution(x, weight, bias, nothing)
    for row, channel, token in ((0, 0, 0), (1, 2, 1), (1, 1, 6)):
        seen = sum(float(weight[channel, 3 - age] * x[row, channel, token - age]) for age in range(min(4, token + 1)))
        seen += float(bias[channel]) if biased else 0.0
        assert out[row, channel, token] == pytest.approx(seen / (1 + math.exp(-seen)), abs=1e-6)
    first, between = causal_convolution(x[..., :2], weight, bias, nothing)
    second, last = causal_convolution(x[..., 2:], weight, bias, between)
    torch.testing.assert_close(torch.cat((first, second), -1), out)
    assert torch.equal(last, x[..., -3:]) and torch.equal(state, last)


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_the_norm_and_its_gate(activation: str) -> None:
    gen = torch.Generator().manual_seed(2)
    x, gate, weight = torch.randn(5, 8, generator=gen), torch.randn(5, 8, generator=gen), torch.rand(8, generator=gen)
    wide, factor = x.double(), gate.double()
    factor = torch.sigmoid(factor) * (1 if activation == "sigmoid" else factor)
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight * factor
    torch.testing.assert_close(norm_gated(x, gate, weight, 1e-3, activation).double(), wanted, rtol=0, atol=1e-6)


def test_an_activation_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="activation 'gelu': expected silu, swish or sigmoid"):
        norm_gated(torch.ones(1, 2), torch.ones(1, 2), torch.ones(2), 1e-6, "gelu")


# ---- what stands in for SGLang's functions ----


def never(*_args: object, **_kwargs: object) -> None:
    raise AssertionError("a kernel for GPUs was called with tensors of a CPU")


def test_projections_that_stand_together_by_head_and_by_kind() -> None:
    """Both layouts of the same projections give the same; each number says what it is."""
    q = torch.arange(KEY_HEADS * KEY_DIM).view(KEY_HEADS, KEY_DIM).float()
    k, group = q + 1000, HEADS // KEY_HEADS
    v = torch.arange(HEADS * VALUE_DIM).view(HEADS, VALUE_DIM) + 2000.0
    z, b = v + 1000, torch.arange(HEADS) + 4000.0
    a = b + 1000
    parts = [torch.cat((q[h], k[h], *v[h * group : (h + 1) * group], *z[h * group : (h + 1) * group])) for h in (0, 1)]
    small = [torch.cat((b[h * group : (h + 1) * group], a[h * group : (h + 1) * group])) for h in (0, 1)]
    sizes = KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM
    interleaved = linear.around_split_interleaved(never, torch.cat(parts)[None], torch.cat(small)[None], *sizes)
    by_kind = torch.cat([each.flatten() for each in (q, k, v, z)])
    contiguous = linear.around_split_contiguous(never, by_kind[None], torch.cat((b, a))[None], *sizes)
    wanted = torch.cat((q.flatten(), k.flatten(), v.flatten())), z, b, a
    for one, other, each in zip(interleaved, contiguous, wanted, strict=True):
        assert torch.equal(one, each[None]) and torch.equal(other, each[None])


def test_gates_of_attention_and_of_a_shared_expert() -> None:
    attention, gate = torch.randn(3, 8), torch.randn(3, 2, 4)
    wanted = attention * torch.sigmoid(gate.flatten(1))
    assert torch.equal(linear.around_sigmoid_mul(never, attention, gate), wanted)
    assert linear.around_sigmoid_mul(never, attention, gate, inplace=True) is attention
    assert torch.equal(attention, wanted)
    hidden, weight, shared, out = torch.randn(3, 8), torch.randn(8), torch.randn(3, 8), torch.randn(3, 8)
    added = out + torch.sigmoid((hidden * weight).sum(-1, keepdim=True)) * shared
    linear.around_gated_add(never, hidden, weight, shared, out)
    torch.testing.assert_close(out, added)


def test_norms_of_another_kind_are_refused() -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    assert torch.equal(
        linear.around_rms_norm_gated(never, x, x, weight, None),
        linear.around_layer_norm_gated(never, x=x, weight=weight, bias=None, z=x, is_rms_norm=True),
    )
    with pytest.raises(ValueError, match="a gated norm with a bias or a residual"):
        linear.around_rms_norm_gated(never, x, x, weight, weight)
    for other in ({"z": None}, {"group_size": 2}, {"norm_before_gate": False}, {"is_rms_norm": False}):
        given = {"z": x, "is_rms_norm": True, **other}
        with pytest.raises(ValueError, match="a gated norm of another kind"):
            linear.around_layer_norm_gated(never, x=x, weight=weight, bias=None, **given)


def test_the_device_module_is_the_cpu_s_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert linear.around_get_device_module(asked.append) is torch.cpu and not asked
    linear.around_get_device_module(asked.append, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    linear.around_get_device_module(asked.append)
    assert asked == ["cuda", None]
