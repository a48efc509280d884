"""Top-p in CUDA: a search is as long as its chain of dependent steps, and those are short there (`select.cu`).

Compiled for the device at hand by NVRTC through NVIDIA's `cuda-core`, both of which SGLang installs: half a second, no
toolkit. Where it cannot run (`refusal`), `triton_impl.select` does the same.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from sglang_ext.kernels.top_p.selection import Selection, check, check_buffers

MAX_GROUP = 8
"""Blocks of a thread block cluster that every GPU with clusters takes."""

MAX_CELLS = 32768
"""Clusters that the registers of a block hold."""

BINS = 1024


@dataclass(frozen=True)
class Tuning:
    """What is chosen by measurement.

    Attributes:
        quads: groups of four clusters that a thread holds, where a block of 256 to 1,024 threads can.
    """

    quads: int = 4


TUNING = Tuning()


def block_of(width: int, tuning: Tuning = TUNING) -> tuple[int, int]:
    """(threads of a block, groups of four clusters of a thread) for up to `width` clusters."""
    threads = 256
    while threads < 1024 and threads * 4 * tuning.quads < width:
        threads *= 2
    return threads, max(1, -(-width // (4 * threads)))


def refusal(
    device: torch.device, heads: int, width: int, *, group: str = "union", run: int = 1, align: int = 1
) -> str | None:
    """Why the kernel cannot select among `width` clusters for groups of `heads`, or None where it can."""
    if device.type != "cuda":
        return f"device {device}: it is written in CUDA"
    properties = torch.cuda.get_device_properties(device)
    if importlib.util.find_spec("cuda.core") is None:
        return "cuda-core is not installed: pip install cuda-core"
    if properties.major < 9:
        return f"compute capability {properties.major}.{properties.minor}: thread block clusters begin at 9.0"
    if group != "union":
        return f"group={group!r}: it searches for each head"
    if heads > MAX_GROUP:
        return f"groups of {heads} heads: at most {MAX_GROUP}"
    if align > 1 and not 4 <= run <= 1024:
        return f"runs of {run} clusters: 4 to 1,024"
    if width > MAX_CELLS:
        return f"{width} clusters of a request: at most {MAX_CELLS}"
    return None


def compiled(
    arch: str, heads: int, width: int, by_count: bool = False, run: int = 1, align: int = 1, tuning: Tuning = TUNING
) -> Any:
    """The kernel's machine code (`cuda.core.ObjectCode`) for an architecture such as "sm_90"; needs no GPU.

    Raises:
        RuntimeError: NVRTC refused, with its log.
    """
    core = _core()
    threads, quads = block_of(width, tuning)
    constants = dict(
        GROUP=heads, THREADS=threads, QUADS=quads, BINS=BINS, BY_COUNT=int(by_count), RUN=run if align > 1 else 1,
        ALIGN=align,
    )  # fmt: skip
    options = core.ProgramOptions(
        arch=arch, std="c++17", define_macro=[(name, str(value)) for name, value in constants.items()]
    )
    source = files("sglang_ext").joinpath("kernels/top_p/select.cu").read_text()
    return core.Program(source, "c++", options).compile("cubin")


def _core() -> Any:
    """`cuda.core`, by the name that it had before 1.0 where there is that one."""
    import cuda.core

    return cuda.core if hasattr(cuda.core, "Program") else importlib.import_module("cuda.core.experimental")


@cache
def _kernel(
    index: int, heads: int, width: int, by_count: bool, run: int, align: int, tuning: Tuning
) -> Callable[..., None]:
    """A function (grid, arguments) that launches on the current stream of device `index`."""
    core = _core()
    properties = torch.cuda.get_device_properties(index)
    code = compiled(f"sm_{properties.major}{properties.minor}", heads, width, by_count, run, align, tuning)
    kernel, (threads, _) = code.get_kernel("select_clusters"), block_of(width, tuning)

    def run_it(grid: tuple[int, int], *arguments: Any) -> None:
        stream = core.Stream.from_handle(torch.cuda.current_stream(index).cuda_stream)
        core.launch(stream, core.LaunchConfig(grid=grid, block=threads), kernel, *arguments)

    return run_it


def select(
    logits: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    cells: torch.Tensor,
    p: torch.Tensor,
    *,
    group: str = "union",
    by_count: bool = False,
    run: int = 1,
    align: int = 1,
    out: Selection | None = None,
    tuning: Tuning = TUNING,
) -> Selection:
    """`reference.select` on the device: a fixed grid, counts and p read from tensors, no synchronisation.

    Args:
        logits: as in the reference, contiguous float32 on a CUDA device.
        sizes, starts, cells: as in the reference, contiguous int32.
        p: [batch, 2] float32.
        group, by_count, run, align: as in the reference; `group` is "union".
        out: buffers to use; needed under CUDA graphs, made otherwise.
        tuning: see `Tuning`.

    Returns:
        The selection (`out` where given).

    Raises:
        ValueError: as in the reference; what `refusal` says; tensors of other types or not contiguous.
    """
    check(logits, sizes, starts, cells, p, group)
    batch, kv_heads, heads, width = logits.shape
    reason = refusal(logits.device, heads, width, group=group, run=run, align=align)
    if reason:
        raise ValueError(f"{reason}; use triton_impl.select")
    for name, tensor, dtype in (
        ("logits", logits, torch.float32),
        ("sizes", sizes, torch.int32),
        ("starts", starts, torch.int32),
        ("cells", cells, torch.int32),
        ("p", p, torch.float32),
    ):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype}, strides {tensor.stride()}: expected contiguous {dtype}")
    out = out or Selection.empty(batch, kv_heads, width, logits.device, run, align)
    check_buffers(out, run, align)
    if batch == 0:
        return out
    index = logits.device.index if logits.device.index is not None else torch.cuda.current_device()
    kernel = _kernel(index, heads, width, by_count, run, align, tuning)
    tensors = (logits, sizes, starts, cells, p, out.counts, out.exact, out.prefix, out.shift, out.approx)
    kernel((heads, batch * kv_heads), *(x.data_ptr() for x in tensors), ctypes.c_int32(kv_heads), ctypes.c_int32(width))
    return out
