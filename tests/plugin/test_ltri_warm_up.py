"""What a warm-up of Ltri-LLM compiles is all that chunks need later, whatever a stream's length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_ext.attention import ltri_kernels
from sglang_ext.attention.policy import Request
from sglang_ext.kernels.block_votes import BlockIndex, QuerySpans
from tests.plugin.test_ltri_kernels import PROMPT, TOKENS, World, both, text


def sizes(given: Any) -> Any:
    """What a kernel may be compiled for: shapes of tensors, and arguments that are no tensors."""
    if isinstance(given, BlockIndex):
        return tuple(given.ids.shape)
    if isinstance(given, QuerySpans):
        return tuple(given.vectors.shape)
    if isinstance(given, torch.Tensor):
        return tuple(given.shape)
    return given if isinstance(given, (int, str, bool, type(None))) else type(given).__name__


def watched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """The elections and scores that chunks launch from here on."""
    found: set[tuple[Any, ...]] = set()

    def watch(name: str) -> None:
        launch = getattr(ltri_kernels, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            found.add((name, *map(sizes, args), *((key, sizes(value)) for key, value in sorted(kwargs.items()))))
            return launch(*args, **kwargs)

        monkeypatch.setattr(ltri_kernels, name, noted)

    for name in ("elect", "score_blocks"):
        watch(name)
    return found


def launch_all(world: World) -> None:
    """Two turns of a conversation, none of whose chunks is replayed; the second begins in the middle of a chunk."""
    world.chunks._graphs = None
    turn = PROMPT // 2
    list(world.run(world.begin(1, turn), text(1), 0, turn))
    list(world.run(Request(1, "r1", None, {}, prompt=TOKENS), text(1), turn, TOKENS))


@pytest.mark.parametrize("similarity", ["sum", "max", "mass"])
def test_a_turn_compiles_nothing(similarity: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    launches = watched(monkeypatch)
    _, kernels = both(monkeypatch, tmp_path, {"similarity": similarity}, places=2)
    warmed = set(launches)
    assert {name for name, *_ in warmed} == {"elect", "score_blocks"}
    launches.clear()
    launch_all(kernels)
    assert launches and launches <= warmed, launches - warmed
