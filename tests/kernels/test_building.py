"""FlashInfer's modules are compiled beside the start of a server, and FlashInfer takes what it is asked with."""

from __future__ import annotations

import inspect
import logging
import threading
from typing import Any

import pytest
import torch

from sglang_ext.kernels.view_attention import building
from sglang_ext.kernels.view_attention.building import Building, hopper_module


class FakeModule:
    """A module whose compiler ends when it is let go."""

    name = "batch_prefill"

    def __init__(self, compiled: bool = False, error: str = "") -> None:
        self.is_compiled, self._error = compiled, error
        self.begun, self.go = threading.Event(), threading.Event()

    def build(self, verbose: bool, need_lock: bool) -> None:
        assert need_lock, "ranks compile into one folder"
        self.begun.set()
        self.go.wait(20)
        if self._error:
            raise RuntimeError(self._error)


def test_the_compiler_runs_while_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    module = FakeModule()
    with caplog.at_level(logging.INFO, logger=building.__name__):
        found = Building(module)
        assert module.begun.wait(20)  # and this line is reached while it compiles
        module.go.set()
        found.wait()
        found.wait()
    begun, ended = [record.getMessage() for record in caplog.records]
    assert "batch_prefill, which no cache has" in begun
    assert ended.startswith("FlashInfer compiled batch_prefill in ")
    assert "of which the start of the server waited" in ended


def test_what_a_cache_has_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    module = FakeModule(compiled=True)
    with caplog.at_level(logging.INFO, logger=building.__name__):
        Building(module).wait()
    assert not module.begun.is_set()
    assert caplog.records == []


def test_a_compiler_that_fails_is_named_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    module = FakeModule(error="nvcc is not there")
    module.go.set()
    with caplog.at_level(logging.WARNING, logger=building.__name__):
        Building(module).wait()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "could not compile batch_prefill" in said
    assert "nvcc is not there" in said


def test_flashinfers_own_modules_take_the_lock() -> None:
    core = pytest.importorskip("flashinfer.jit.core")
    kind = getattr(core, "JitSpecNvcc", core.JitSpec)  # its name since FlashInfer 0.7
    assert {"verbose", "need_lock"} <= set(inspect.signature(kind.build).parameters)
    assert isinstance(kind.is_compiled, property)


def test_flashinfer_takes_the_arguments_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("flashinfer.jit")
    utils = pytest.importorskip("flashinfer.utils")
    asked: dict[str, Any] = {}
    takes = inspect.signature(jit.gen_batch_prefill_module)

    def generate(*args: object, **kwargs: object) -> str:
        asked.update(takes.bind(*args, **kwargs).arguments)  # raises where FlashInfer takes other arguments
        return "module"

    chosen = "fa3"
    kinds = inspect.signature(utils.determine_attention_backend)

    def determine(*args: object, **kwargs: object) -> str:
        kinds.bind(*args, **kwargs)
        return chosen

    monkeypatch.setattr(jit, "gen_batch_prefill_module", generate)
    monkeypatch.setattr(utils, "determine_attention_backend", determine)
    assert hopper_module(torch.device("cpu"), torch.bfloat16, 128, 64) == "module"
    assert list(asked) == list(takes.parameters)  # none is left to a default
    assert (asked["backend"], asked["dtype_q"], asked["use_sliding_window"]) == ("fa3", torch.bfloat16, False)
    assert (asked["head_dim_qk"], asked["head_dim_vo"]) == (128, 64)
    chosen = "fa2"
    assert hopper_module(torch.device("cpu"), torch.bfloat16, 128, 64) is None
