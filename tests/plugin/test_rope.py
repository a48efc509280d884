"""The rotation read off SGLang's rotary modules is the one those modules apply, and the others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sglang_ext.attention.rope import find_rope, rope_of
from sglang_ext.kernels.rope import rotate

CONTEXT = 4096
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn attn_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attn_factor": 1.7,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn not truncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
    },
}


@pytest.fixture(scope="module", autouse=True)
def sglang_context():
    """What SGLang's layers read when they are built: the server's arguments."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))


def get_rope(scaling: dict[str, Any] | None, head_dim: int = 64, neox: bool = True, **options: Any) -> Any:
    from sglang.srt.layers.rotary_embedding import get_rope as sglang_get_rope

    options = {"max_position": CONTEXT, "base": 10000, "dtype": torch.float32, **options}
    rotary_dim = options.pop("rotary_dim", head_dim)
    return sglang_get_rope(head_dim, rotary_dim, is_neox_style=neox, rope_scaling=scaling, **options)


def forward(module: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What the model does to a key [tokens, heads, head_dim]: the module's own PyTorch path."""
    _, key = module.forward_native(positions, x.flatten(1).clone(), x.flatten(1).clone())
    return key.view_as(x)


def check(module: Any, head_dim: int, tolerance: float = 2e-3) -> None:
    """rotate(forward(p), d) == forward(p + d): any magnitude was applied once, by the model."""
    rope = rope_of(module)
    rows = module.cos_sin_cache.shape[0]
    gen = torch.Generator().manual_seed(0)
    before = torch.tensor([0, 0, 5, 100, 511, 512, rows // 2, rows - 1, rows - 1, 37])
    after = torch.tensor([0, 9, 5, 3, 1400, 511, rows - 1, 0, rows // 3, 38])
    x = torch.randn(len(before), 3, head_dim, generator=gen)
    moved = rotate(forward(module, x, before), (after - before).unsqueeze(-1), rope)
    # The module's table holds float32 angles: at position 4,095 they are off by 1e-4 rad, at 32,767 by 1e-3.
    torch.testing.assert_close(moved, forward(module, x, after), rtol=0, atol=tolerance)
    # It is a rotation: whatever the model scales, moving does not.
    norm = forward(module, x, before).norm(dim=-1)
    torch.testing.assert_close(moved.norm(dim=-1), norm, rtol=1e-5, atol=0)
    # And a key that is not moved at all is far off.
    assert (forward(module, x, before) - forward(module, x, after))[before != after].abs().amax() > 0.5


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_moves_keys_as_the_model_would_have_written_them(scaling: str, neox: bool) -> None:
    module = get_rope(SCALINGS[scaling], neox=neox)
    rope = rope_of(module)
    assert rope.neox is neox and rope.rotary_dim == 64 and rope.inv_freq.dtype == torch.float32
    check(module, 64)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("scaling", ["none", "llama3", "yarn"])
@pytest.mark.parametrize(("head_dim", "factor"), [(64, 0.5), (80, 0.25)])
def test_partial_rotary(head_dim: int, factor: float, scaling: str, neox: bool) -> None:
    module = get_rope(SCALINGS[scaling], head_dim, neox, partial_rotary_factor=factor)
    assert rope_of(module).rotary_dim == int(head_dim * factor)
    check(module, head_dim)


@pytest.mark.parametrize("scaling", ["llama3", "yarn", "none"])
@pytest.mark.parametrize("base", [500_000, 1_000_000])
def test_long_contexts_and_large_bases(scaling: str, base: int) -> None:
    """The check of linearity must not refuse a real model for the rounding of float32 angles at far positions."""
    options = SCALINGS[scaling] and {**SCALINGS[scaling], "original_max_position_embeddings": 8192}
    check(get_rope(options, 128, base=base, max_position=65_536), 128, tolerance=2e-2)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_tables_kept_in_bfloat16_are_accepted_and_give_the_same_frequencies(scaling: str) -> None:
    half = rope_of(get_rope(SCALINGS[scaling], dtype=torch.bfloat16))
    assert torch.equal(half.inv_freq, rope_of(get_rope(SCALINGS[scaling])).inv_freq)


def test_the_magnitude_of_yarn_is_not_in_the_rotation() -> None:
    module = get_rope(SCALINGS["yarn"])
    magnitude = torch.hypot(*module.cos_sin_cache.chunk(2, dim=-1))
    assert magnitude.min() > 1.1  # it is in the model's table
    x = torch.randn(1, 1, 64)
    torch.testing.assert_close(rotate(x, torch.tensor([[17]]), rope_of(module)).norm(), x.norm())


# ---- refusals ----------------------------------------------------------------------------------------------------


def longrope() -> Any:
    factors = [1.0 + 0.1 * pair for pair in range(32)]
    options = {
        "short_factor": factors,
        "long_factor": [3 * f for f in factors],
        "original_max_position_embeddings": 1024,
    }
    return get_rope({"rope_type": "longrope", **options})


def dual_chunk() -> Any:
    from sglang.srt.layers.rotary_embedding.rope_variant import DualChunkRotaryEmbedding

    module = DualChunkRotaryEmbedding.__new__(DualChunkRotaryEmbedding)  # its tables want a CUDA device
    nn.Module.__init__(module)
    return module


REFUSED = {
    "Phi3LongRoPEScaledRotaryEmbedding": longrope,
    "DualChunkRotaryEmbedding": dual_chunk,
    "MRotaryEmbedding": lambda: get_rope({"rope_type": "default", "mrope_section": [8, 12, 12]}),
    "YaRNScalingMRotaryEmbedding": lambda: get_rope({**SCALINGS["yarn"], "mrope_section": [8, 12, 12]}),
}


def test_a_variant_this_project_does_not_know_is_moved_rightly_or_refused() -> None:
    """Hunyuan's NTK by alpha: linear, with a base that only the module's own table shows."""
    module = get_rope({"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0})
    try:
        rope_of(module)
    except ValueError as error:
        assert "rotary embedding DynamicNTKAlphaRotaryEmbedding" in str(error)
    else:
        check(module, 64)


@pytest.mark.parametrize("name", REFUSED)
def test_ropes_that_are_not_linear_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"rotary embedding {name}\b.*not supported"):
        rope_of(REFUSED[name]())


class Bent(nn.Module):
    """Like RotaryEmbedding, with one thing wrong in its table."""

    def __init__(self, bend: str, rows: int = 1024) -> None:
        super().__init__()
        self.base, self.is_neox_style, self.rotary_dim = 10000, True, 16
        inv_freq = self._compute_inv_freq(self.base)
        position = torch.arange(rows, dtype=torch.float32)
        if bend == "squeezed behind 512":  # longrope and dynamic scalings switch there
            position = torch.where(position < 512, position, 512 + (position - 512) / 4)
        elif bend == "one frequency":
            inv_freq = inv_freq.clone()
            inv_freq[-1] *= 1.1
        elif bend == "last bits":  # as another device computes powers
            inv_freq = torch.nextafter(inv_freq, torch.zeros(()))
        elif bend == "backwards":
            position = -position
        angle = position.unsqueeze(-1) * inv_freq
        self.register_buffer("cos_sin_cache", torch.cat([angle.cos(), angle.sin()], -1))

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return base ** -(torch.arange(0, 16, 2, dtype=torch.float32) / 16)


def test_a_table_that_is_position_times_frequency_is_accepted_whatever_its_class() -> None:
    assert rope_of(Bent("not at all")).rotary_dim == 16


def test_the_last_bits_of_a_frequency_are_nobodys_mistake() -> None:
    """A million positions, and frequencies computed on another device; 0.02 radians there."""
    far = Bent("last bits", 2**20)
    assert (far.cos_sin_cache[-1] - Bent("not at all", 2**20).cos_sin_cache[-1]).abs().max() > 0.01
    assert rope_of(far).rotary_dim == 16
    for bend in ("squeezed behind 512", "one frequency", "backwards"):
        with pytest.raises(ValueError, match="rotary embedding Bent: not linear in position"):
            rope_of(Bent(bend, 2**20))


@pytest.mark.parametrize("bend", ["squeezed behind 512", "one frequency", "backwards"])
def test_a_table_that_is_not_linear_is_refused(bend: str) -> None:
    with pytest.raises(ValueError, match="rotary embedding Bent: not linear in position"):
        rope_of(Bent(bend))


def test_a_module_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="rotary embedding Identity: not linear"):
        rope_of(nn.Identity())


# ---- whole models ------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, *ropes: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for rope in ropes:
            layer = nn.Module()
            layer.rotary_emb = rope
            self.layers.append(layer)


def test_find_rope() -> None:
    shared = get_rope(None)
    assert torch.equal(find_rope(Model(shared, shared)).inv_freq, rope_of(shared).inv_freq)
    with pytest.raises(ValueError, match="Model has no rotary embedding"):
        find_rope(Model())
    with pytest.raises(ValueError, match="Model has layers with different rotary embeddings"):
        find_rope(Model(shared, get_rope(None, base=500_000)))
    with pytest.raises(ValueError, match="different rotary embeddings"):
        find_rope(Model(shared, get_rope(None, neox=False)))
    with pytest.raises(ValueError, match="different rotary embeddings"):
        find_rope(Model(shared, get_rope(None, 128)))
