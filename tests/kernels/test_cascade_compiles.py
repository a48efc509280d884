"""A cascade's Triton kernels, compiled for Hopper without a GPU, at the shapes of Llama-3.1-8B and others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels import sm90

COMPILE = """
import torch
from sglang_ext.kernels import score_update
from sglang_ext.kernels.cascade_update import CascadeState, triton_impl as cascade
from sglang_ext.kernels.cells import (Cells, CountedScores, NewTokens, Rotation, decode_impl, empty_lists,
                                      triton_impl as cells)
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.score_update import CountedQueries, KeptScores, triton_impl as scores
from sglang_ext.policies.cascade import Cascade
from tests.kernels.sm90 import compiled, stand_in

SMALL = 99 * 1024  # what the smaller GPUs have
stand_in(cells, "_columns_kernel", "_list_kernel", "_gather_kernel", "_store_kernel", shared=SMALL, FAST=True)
stand_in(decode_impl, "_share_kernel", "_join_kernel", shared=SMALL, FAST=True)
stand_in(scores, "_bias_kernel", "_columns_kernel", shared=SMALL)
stand_in(cascade, "_fill_kernel", "_cascade_kernel", shared=SMALL)

setting = Cascade(window=4096, cascades=4, stride=1024)
rings, half = setting.rings, torch.bfloat16
state = CascadeState.empty(1, 2, 8, rings, "cpu")
lists, rotation = empty_lists(state), Rotation.of(Rope(torch.ones(64)))
row, zero = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
entries = torch.zeros(1, rings.entries, dtype=torch.int32)
cascade.cascade_update(state, row, row, row, rings)
cells.columns(rings, row, row, rings.entries)
cells.list_columns(lists, state, row, entries, entries, rings)
cache, window = (torch.zeros(rings.entries, 8, 128, dtype=half) for _ in range(2))
cells.gather(cache, cache, lists[0, 0], rotation, 4096, window, window)
cells.store(window[:1024], window[:1024], lists[0, 0], rotation, 64, cache, cache, window, window)
query = torch.zeros(1, 1024, 32, 128, dtype=half)
kept = KeptScores(state.score[0], entries, row, zero)
counted = CountedScores(state.score[0], entries, zero, zero, beta=0.9999)
levels = torch.zeros(1, 1024, 32)
scores.update_scores(kept, CountedQueries(query, window.transpose(0, 1)[None], levels, zero, zero, 0.1), beta=0.9999)
assert "wgmma" in compiled["score_update_columns_kernel"].asm["ptx"]
token = window[:1]
decode_impl.decode(NewTokens(query[:, 0], token, token), Cells(cache, cache, lists[0]), row, zero, rotation, 0.1,
                   scores=counted)
assert all(text in compiled["cells_share_kernel"].asm["ptx"] for text in ("mma.sync", "cos.approx", "cp.async"))
assert len(compiled) == 10, compiled

# Other heads, in as little shared memory as the smaller GPUs have.
for dim, dtype in ((64, half), (128, half), (192, half), (256, half), (64, torch.float32), (128, torch.float32),
                   (256, torch.float32)):
    rotation = Rotation.of(Rope(torch.ones(dim // 2)))
    cache = torch.zeros(rings.entries, 8, dim, dtype=dtype)
    query, token = torch.zeros(1, 1024, 32, dim, dtype=dtype), cache[:1]
    cells.gather(cache, cache, lists[0, 0], rotation, 4096, cache, cache)
    decode_impl.decode(NewTokens(query[:, 0], token, token), Cells(cache, cache, lists[0]), row, zero, rotation, 0.1,
                       scores=counted)
    keys = cache.transpose(0, 1)[None]
    for rows in (16, 1024):
        scores.update_scores(kept, CountedQueries(query[:, :rows], keys, torch.zeros(1, rows, 32), zero, zero, 0.1),
                             beta=0.9999)
    scores.update_scores(KeptScores(state.score[0, :, :1].contiguous(), entries, row, zero),
                         CountedQueries(query, keys, levels, zero, zero, 0.1), beta=0.9999, reduction="max")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler may not."""
    sm90.run(COMPILE, tmp_path)
