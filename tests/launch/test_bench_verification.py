"""What it costs to verify drafts: the layer that is measured, and the rows, without a GPU."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.nn.functional as F

from sglang_ext.launch.bench import verification
from sglang_ext.launch.bench._record import Timing
from sglang_ext.launch.bench.verification import Layer, Passes, Shape, figures, measure

SHAPE = Shape(hidden_size=24, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
CPU = torch.device("cpu")


def plain_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    """The same in plain PyTorch, without a GPU."""
    groups = queries.shape[2] // keys.shape[2]
    k, v = (each[pages.long(), 0].repeat_interleave(groups, dim=2).transpose(1, 2) for each in (keys, values))
    tokens, length = queries.shape[1], pages.shape[1]
    at = torch.arange(length - tokens, length, device=pages.device)
    mask = torch.arange(length, device=pages.device) <= at[:, None]
    return F.scaled_dot_product_attention(queries.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)


def layer(batch: int = 2, length: int = 33) -> Layer:
    torch.manual_seed(0)
    return Layer(SHAPE, batch, length, plain_attention, CPU, torch.float64)


def test_a_verification_computes_what_steps_compute_one_after_the_other() -> None:
    """The last token of each request sees all that the only token of a step sees."""
    made = layer()
    hidden = made.random(2 * 3, SHAPE.hidden_size)
    whole = made.run(hidden).view(2, 3, -1)
    assert whole.shape[-1] == SHAPE.hidden_size
    step = made.run(hidden.view(2, 3, -1)[:, -1])
    assert torch.allclose(whole[:, -1], step, rtol=1e-12, atol=0) and whole.abs().max() > 0


def test_bytes_are_those_of_all_tensors() -> None:
    made = layer(batch=3, length=7)
    weights = (4 + 2 * 2) * 8 * 24 + 24 * 4 * 8 + 2 * 40 * 24 + 24 * 40
    assert made.bytes == 8 * (weights + 2 * 3 * 7 * 2 * 8)


def test_passes_have_all_lengths() -> None:
    found = measure(layer(), 50, [1, 3], CPU)
    assert set(found.layer) == set(found.logits) == {1, 3} and found.logits_bytes == 8 * 50 * 24


def test_rows() -> None:
    at = lambda seconds: Timing(seconds, seconds, seconds, 5)  # noqa: E731
    found = Passes({1: at(1.0), 3: at(1.5), 9: at(2.0)}, {1: at(0.5), 3: at(0.5), 9: at(0.5)}, 100, 10)
    two, eight = figures(found, 8, 640, 10, bandwidth=1010.0)
    assert two.name == "verifying drafts of 2, 8 requests of 640 tokens, 10 layers"
    assert (two.timing.median, two.ratio) == (15.5, pytest.approx(15.5 / 10.5))
    assert (eight.timing.median, eight.notes["floor"]) == (20.5, 1.0)


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    verification.add_arguments(parser)
    monkeypatch.setattr(verification, "require_gpu", lambda: CPU)
    for words in (["--length", "8", "--drafted", "8"], ["--batches", "0"], ["--drafted", "0"]):
        with pytest.raises(ValueError, match="expected numbers of at least"):
            verification.main(parser.parse_args(words))
