"""Warnings that there is no GPU: left out where there is none, and no others."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from sglang_ext import quiet

LEFT_OUT = [(name, message) for name, message in quiet.LOGGED.items()]


@pytest.fixture
def filtered() -> Iterator[None]:
    """Filters as on a machine without a GPU, taken away afterwards."""
    before = {name: list(logging.getLogger(name).filters) for name in quiet.LOGGED}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet.leave_out_gpu_warnings()
        yield
    for name, filters in before.items():
        logging.getLogger(name).filters = filters


@pytest.mark.parametrize("message", quiet.WARNED)
def test_warnings(filtered: None, message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=1)
    for other in (message + " Really.", "sglang_ext: " + message):
        with pytest.raises(UserWarning):
            warnings.warn(other, UserWarning, stacklevel=1)
    with pytest.raises(DeprecationWarning):
        warnings.warn(message, DeprecationWarning, stacklevel=1)


@pytest.mark.parametrize(("name", "message"), LEFT_OUT)
def test_log_lines(filtered: None, name: str, message: str) -> None:
    arguments = ("/usr/local",) if "%s" in message else ()

    def shown(logger: str, words: str, *given: str) -> bool:
        record = logging.LogRecord(logger, logging.WARNING, "file.py", 1, words, given, None)
        return bool(logging.getLogger(logger).filter(record))

    assert not shown(name, message, *arguments)
    assert shown(name, "something else") and shown(name, message + ".", *arguments)
    assert shown("sglang_ext", message, *arguments)


def test_they_are_filtered_once(filtered: None) -> None:
    quiet.leave_out_gpu_warnings()
    for name in quiet.LOGGED:
        logger = logging.getLogger(name)
        assert sum(isinstance(each, quiet._LeavesOut) for each in logger.filters) == 1


def test_a_machine_with_a_gpu_shows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext import platform_cpu

    monkeypatch.setattr(platform_cpu, "leave_out_gpu_warnings", lambda: pytest.fail("filtered"))
    monkeypatch.setattr(platform_cpu.torch.cuda, "is_available", lambda: True)
    assert platform_cpu.activate() is None
