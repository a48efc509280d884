"""CUDA C++ kernels on a CPU, compiled by g++ with `host/instructions.cuh` in the place of the GPU's instructions."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.cluster_attention import joint_impl
from sglang_ext.kernels.top_p import cuda_impl

HERE = Path(__file__).parent / "host"
COMPILER = shutil.which("g++")
MULTIPROCESSORS = 12

STANDS_IN = COMPILER is not None and not torch.cuda.is_available()

needed = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


def _read(name: str) -> str:
    return (HERE / name).read_text() if (HERE / name).exists() else nvrtc._read(name)


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="sglang-ext-host-"))


@cache
def kernel(
    index: int, source: str, name: str, threads: int, constants: tuple[tuple[str, int], ...]
) -> Callable[..., None]:
    """`nvrtc.kernel` on this CPU; RuntimeError where a block comes to no end."""
    cluster = re.search(r"__cluster_dims__\((\w+),", nvrtc.text_of(source, _read))
    macros = "".join(f"#define {key} {value}\n" for key, value in constants)
    macros += f"#define CLUSTER {cluster[1] if cluster else 1}\n"
    text = f"{macros}{nvrtc.text_of(source, _read)}\n#define KERNEL {name}\n{_read('launch.inc')}"
    path = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
    path.write_text(text)
    command = [str(COMPILER), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", str(path), "-o"]
    done = subprocess.run([*command, str(path.with_suffix(".so"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    library = ctypes.CDLL(str(path.with_suffix(".so")))

    waits = re.search(rf"\s{name}\([^{{}}]*\)\s*{{\s*wait_for_launch_before\(\);", nvrtc.text_of(source))

    def launch(grid: tuple[int, ...], *arguments: Any, cooperative: bool = False, early: bool = False) -> None:
        assert waits or not early, (
            f"{name} begins before the kernel before it has ended, and does not wait first of all"
        )
        values = [ctypes.c_void_p(each) if isinstance(each, int) else each for each in arguments]
        table = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
        if library.launch(*(*grid, 1, 1)[:3], threads, int(cooperative), table):
            raise RuntimeError(f"{name}: threads of a block wait for others that never come")

    return launch


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `nvrtc` launch kernels on this CPU, as on a GPU of a few multiprocessors."""
    monkeypatch.setattr(nvrtc, "kernel", kernel)
    monkeypatch.setattr(nvrtc, "multiprocessors", lambda index: MULTIPROCESSORS)
    monkeypatch.setattr(nvrtc, "index_of", lambda device: 0)


@contextmanager
def cuda(*modules: Any) -> Iterator[None]:
    """Let modules launch their CUDA kernels: on the GPU if there is one, else on this CPU.

    Args:
        modules: with `_kernel`, `_unusable` and `refusal`, whose first argument is a device: asked as if for a GPU.
    """

    def of_gpu(refusal: Callable[..., str | None]) -> Callable[..., str | None]:
        return lambda _, *args, **kwargs: refusal(torch.device("cuda"), *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        if STANDS_IN:
            patch(patched)
            for module in modules:
                patched.setattr(module, "_kernel", module._kernel.__wrapped__)
                patched.setattr(module, "_unusable", lambda *_: None)
                if module is not joint_impl:  # which asks another module for it
                    patched.setattr(module, "refusal", of_gpu(module.refusal))
        yield


def top_p() -> AbstractContextManager[None]:
    """`cuda` for the kernels of `top_p/select.cu`."""
    return cuda(cuda_impl, joint_impl)
