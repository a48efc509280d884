"""CUDA C++ sources of this package, compiled for the device at hand when they are first needed.

By NVRTC through NVIDIA's `cuda-core`, both of which SGLang installs: half a second to five a kernel, no toolkit. Where
cuda-core keeps what it compiled (`~/.cache/sglang_ext/nvrtc`), the next start finds it there.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

HOPPER = "sm_90a"
"""The architecture that kernels are compiled for on Hopper: with the instructions that it alone has."""

EARLY = "programmatic_stream_serialization"
"""Of a `LaunchConfig`, in newer versions of cuda-core: a kernel may begin before the one before it has ended."""

SAVED = 256 << 20
"""Bytes of machine code that are kept on disk at most; those read longest ago go."""


def index_of(device: torch.device) -> int:
    """Number of a CUDA device."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def multiprocessors(index: int) -> int:
    """Of a CUDA device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def failure(index: int, what: str, *kernels: Callable[[], Any]) -> str | None:
    """Why not all of these kernels can be made for device `index`, or None where they can.

    A missing package or library, an older NVRTC or driver: `what` runs in Triton then, and a warning says so.
    """
    try:
        for make in kernels:
            make()
    except Exception as error:
        name = torch.cuda.get_device_properties(index).name
        reason = f"cuda-core cannot compile for {name}: {type(error).__name__}: {error}"
        logger.warning("%s in Triton, which is slower: %s", what, reason)
        return reason
    return None


def compiled(source: str, arch: str, constants: Mapping[str, int]) -> Any:
    """Machine code (`cuda.core.ObjectCode`) for an architecture such as HOPPER; needs no GPU.

    Args:
        source: of a file under `kernels`, "top_p/select.cu" for example.
        arch: what it is compiled for.
        constants: macros.

    Raises:
        Exception: what cuda-core raises where NVRTC refuses, with its log.
    """
    return _compiled(source, arch, tuple(constants.items()))


def compile_ahead(index: int, kernels: Iterable[tuple[str, Mapping[str, int]]]) -> None:
    """Compile (source, constants) for device `index`, several at once; `kernel` then finds them compiled.

    Raises:
        Exception: as `compiled`.
    """
    arch = _arch(index)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda each: compiled(each[0], arch, each[1]), kernels))


def _arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return HOPPER if properties.major == 9 else f"sm_{properties.major}{properties.minor}"


@cache
def _compiled(source: str, arch: str, constants: tuple[tuple[str, int], ...]) -> Any:
    core = _core()
    options = core.ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in constants],
        device_as_default_execution_space=True,  # lambdas that are templates cannot say it
    )
    program = core.Program(text_of(source), "c++", options)
    saved = _saved()
    if saved is not None:
        try:
            return program.compile("cubin", cache=saved)
        except OSError as error:
            logger.info("compiled without looking into %s: %s", _folder(), error)
    return program.compile("cubin")


def _folder() -> Path:
    """Where machine code is kept for the next start."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_ext" / "nvrtc"


@cache
def _saved() -> Any:
    """What was compiled before, by its text, options and compiler; None where that cannot be kept."""
    try:
        from cuda.core.utils import FileStreamProgramCache  # newer versions

        return FileStreamProgramCache(_folder(), max_size_bytes=SAVED)
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logger.info("kernels are compiled at every start: %s", error)
        return None


def _read(source: str) -> str:
    return files("sglang_ext").joinpath("kernels", source).read_text()


def text_of(source: str, read: Callable[[str], str] = _read) -> str:
    """A file under `kernels`, with the files in it that it includes, by their paths under `kernels`."""
    return re.sub(r'^#include "(.+)"$', lambda found: text_of(found[1], read), read(source), flags=re.MULTILINE)


@cache
def kernel(
    index: int, source: str, name: str, threads: int, constants: tuple[tuple[str, int], ...]
) -> Callable[..., None]:
    """A function (grid, arguments) that launches a kernel on the current stream of device `index`.

    With `cooperative=True` all blocks run at once, or the launch is refused. With `early=True`, on Hopper and newer,
    blocks begin while the kernel before in the stream ends ("programmatic dependent launch"), so all threads must call
    `wait_for_launch_before` (instructions.cuh) before they read or write memory.

    Args:
        index: of the device.
        source, constants: as for `compiled`.
        name: of the kernel, which is `extern "C"`.
        threads: of a block.

    Raises:
        Exception: as `compiled`.
    """
    core = _core()
    at_once = "is_cooperative" if hasattr(core.LaunchConfig, "is_cooperative") else "cooperative_launch"  # before 1.0
    overlaps = hasattr(core.LaunchConfig, EARLY) and torch.cuda.get_device_capability(index) >= (9, 0)
    with torch.cuda.device(index):
        code = _compiled(source, _arch(index), constants)
        function = code.get_kernel(name)

    def launch(grid: tuple[int, ...], *arguments: Any, cooperative: bool = False, early: bool = False) -> None:
        with torch.cuda.device(index):
            stream = _stream(torch.cuda.current_stream(index).cuda_stream)
            options = ({at_once: True} if cooperative else {}) | ({EARLY: True} if early and overlaps else {})
            config = core.LaunchConfig(grid=grid, block=threads, **options)
            core.launch(stream, config, function, *arguments)

    return launch


def _core() -> Any:
    """`cuda.core`, by the name that it had before 1.0 where there is that one."""
    import cuda.core

    return cuda.core if hasattr(cuda.core, "Program") else importlib.import_module("cuda.core.experimental")


@cache
def _stream(handle: int) -> Any:
    return _core().Stream.from_handle(handle)
