"""The oracle of float8 caches judged before it judges: without rounding it is the other one, and it sees mistakes."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import float8, models, oracle

PIECES = [(0, 0, 20), (3, 4, 31), (1, 0, 17)]
OWN = [11, 80, 200, 33, 127, 90]
SEEN = 1e-2  # what a mistake moves log-probabilities by, at least


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request, tmp_path_factory):
    return models.load_model(models.save_model(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def blocks():
    gen = torch.Generator().manual_seed(3)
    return [torch.randint(7, 370, (size,), generator=gen).tolist() for size in (20, 31, 25, 40)]


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def coarser(x: torch.Tensor) -> torch.Tensor:
    """Float8 e5m2, which has a bit less."""
    return x.to(torch.float8_e5m2).to(x.dtype)


@pytest.mark.parametrize("positions", oracle.POSITIONS)
def test_without_rounding_it_is_the_other_oracle(model, blocks, positions):
    want = oracle.log_probs(model, oracle.encode(model, blocks, positions=positions), PIECES, OWN)
    encoded = float8.encode(model, blocks, positions=positions, rounding=as_it_is)
    got = float8.log_probs(model, encoded, PIECES, OWN, rounding=as_it_is)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("positions", oracle.POSITIONS)
def test_it_sees_mistakes(model, blocks, positions):
    encoded = float8.encode(model, blocks, positions=positions)
    right = float8.log_probs(model, encoded, PIECES, OWN)
    states = [*encoded.keys[1], *encoded.values[1]]
    assert all(torch.equal(x, float8.rounded(x)) for x in states), "what is kept is rounded"
    unrounded = float8.encode(model, blocks, positions=positions, rounding=as_it_is)
    wrong = {
        "nothing is rounded": float8.log_probs(model, unrounded, PIECES, OWN, rounding=as_it_is),
        "own tokens are not rounded": float8.log_probs(model, encoded, PIECES, OWN, rounding=as_it_is),
        "another float8": float8.log_probs(model, encoded, PIECES, OWN, rounding=coarser),
        "keys stay where they were": float8.log_probs(model, encoded, PIECES, OWN, rebase=False),
        "positions": float8.log_probs(model, encoded, PIECES, OWN, own_offset=1),
    }
    for name, table in wrong.items():
        assert (table - right).abs().max() > SEEN, name
