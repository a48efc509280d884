"""Settings that must stand before torch and transformers are imported, by the tests and by the servers they start."""

from __future__ import annotations

import os
from typing import Any

# Servers of several processes share few cores: a torch thread that waits for a core holds up its whole parallel region.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests use models made here: a name that is not a folder is a mistake, not something to download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch  # after the settings above

from tests.e2e.warm import forked_children

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # our Triton kernels run, slowly, on the CPU
    forked_children()  # engines in the tests' own processes, too, start in seconds


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share an engine run in one process, and in no other (`--dist loadgroup`).

    They share it where a fixture of their module has the same parameters: each parameter of one is an engine.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: Any) -> str:
    callspec = getattr(item, "callspec", None)
    shared = (
        [] if callspec is None else [name for name, scope in callspec._arg2scope.items() if scope.value != "function"]
    )
    values = [str(callspec.indices[name]) for name in sorted(shared)]
    return ":".join([item.location[0], *values])
