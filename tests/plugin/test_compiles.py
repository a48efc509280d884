"""What a server says of kernels that are compiled while requests wait."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from sglang_ext.attention import compiles
from sglang_ext.attention.compiles import Compiles


def told(listener: Any, cache_hit: bool) -> None:
    """As Triton's compiler tells its listener; times are microseconds."""
    times = SimpleNamespace(total=1_250_000)
    listener(src=SimpleNamespace(name="_attend"), metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)


def test_compiled_kernels_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    found = Compiles()
    with caplog.at_level(logging.WARNING):
        told(found, cache_hit=True)
        assert found.record() == {"kernels": 0, "seconds": 0.0} and not caplog.records
        told(found, cache_hit=False)
        told(found, cache_hit=False)
    assert found.record() == {"kernels": 2, "seconds": 2.5}
    assert "requests waited 1.2 s for Triton to compile the kernel _attend" in caplog.text


def test_watching_begins_once_and_leaves_another_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = SimpleNamespace(listener=None)
    monkeypatch.setattr(triton.knobs, "compilation", knobs)
    compiles.watch(3)
    assert knobs.listener is compiles.COMPILES
    knobs.listener = other = object()
    compiles.watch(4)
    assert knobs.listener is other


def test_triton_has_such_a_listener() -> None:
    """Triton reads this knob before it compiles: one of another name would never be called."""
    assert "listener" in type(triton.knobs.compilation).__annotations__
    assert "knobs.compilation.listener" in inspect.getsource(triton.compiler.compiler.compile)
