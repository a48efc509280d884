"""Where CUDA sources cannot be compiled, somebody is told, and Triton's kernels run; what was compiled is kept."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.kmeans import cuda_impl as kmeans
from sglang_ext.kernels.top_p import cuda_impl as top_p


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """One that is there by its properties only."""
    properties = SimpleNamespace(name="a GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for module in (kmeans, top_p):
        module._unusable.cache_clear()
    yield torch.device("cuda", 0)
    for module in (kmeans, top_p):
        module._unusable.cache_clear()


def broken(*_: Any) -> None:
    raise RuntimeError("no NVRTC")


def test_what_cannot_be_compiled_is_refused_with_a_warning(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (kmeans, top_p):
        monkeypatch.setattr(module, "_kernel", broken)
    reason = "cuda-core cannot compile for a GPU: RuntimeError: no NVRTC"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # found out and said once
            assert top_p.refusal(device, 4, 100) == reason
            assert kmeans.refusal(device, torch.bfloat16, 128, 64) == reason
    assert [record.getMessage() for record in caplog.records] == [
        f"top-p runs in Triton, which is slower: {reason}",
        f"k-means sums in Triton, which is slower: {reason}",
    ]


def test_what_can_be_compiled_is_not(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    for module in (kmeans, top_p):
        monkeypatch.setattr(module, "_kernel", lambda *arguments: made.append(arguments))
    assert top_p.refusal(device, 4, 100) is None and len(made) == 1
    assert kmeans.refusal(device, torch.bfloat16, 128, 64) is None
    assert made[1:] == [(0, 128, torch.bfloat16), (0, 64, torch.bfloat16)]
    assert nvrtc.failure(0, "nothing") is None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where machine code is kept in a test."""
    pytest.importorskip("cuda.core")
    forget = [function.cache_clear for function in (nvrtc._compiled, nvrtc._saved)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for each in forget:
        each()
    yield tmp_path
    for each in forget:
        each()


def code() -> bytes:
    """Machine code of a small kernel, as a process that has just started gets it."""
    nvrtc._compiled.cache_clear()
    return bytes(top_p.compiled(nvrtc.HOPPER, 1, top_p.SearchBlock(256, 1)).code)


def test_the_next_start_finds_what_was_compiled(cache: Path) -> None:
    first = code()
    (kept,) = (each for each in cache.rglob("*") if each.is_file() and each.read_bytes() == first)
    assert kept.is_relative_to(cache / "sglang_ext" / "nvrtc") and code() == first
    kept.write_bytes(b"found")
    assert code() == b"found"
    assert bytes(top_p.compiled(nvrtc.HOPPER, 1, top_p.SearchBlock(256, 2)).code) not in (first, b"found")


@pytest.mark.parametrize("place", ["a file", "no home", "fails later"])
def test_where_nothing_can_be_kept_it_is_compiled(place: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "a file":
        (cache / "sglang_ext").write_text("")
    elif place == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", broken)
    else:
        assert nvrtc._saved() is not None
        shutil.rmtree(cache / "sglang_ext")
        (cache / "sglang_ext").write_text("")
    assert code().startswith(b"\x7fELF")
