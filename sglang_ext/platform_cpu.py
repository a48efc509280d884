"""An out-of-tree SGLang platform that runs the real engine on plain PyTorch, on a machine without a GPU.

SGLang's own CPU mode needs a CPU build of `sgl-kernel` that the package registry lacks. A platform of kind OOT with
dispatch key "native" makes every layer take its `forward_native` path instead, so the scheduler, the radix cache and
the server are SGLang's own. It stands aside as soon as a CUDA device exists.
"""

from __future__ import annotations

import os

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_ext import lines
from sglang_ext.names import ServerArgs
from sglang_ext.quiet import leave_out_gpu_warnings

ATTENTION_BACKEND = "torch_native"
MAX_TOTAL_TOKENS = 65_536


class TorchCpuPlatform(SRTPlatform):
    """Plain PyTorch on the CPU; device memory is the machine's RAM, in bytes."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Settings for a machine that is also used for other things; values the user gave stay."""
        server_args.device = "cpu"
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        if server_args.max_total_tokens is None:
            # SGLang would take nearly all memory for the KV cache, as is right on a GPU of one's own.
            server_args.max_total_tokens = MAX_TOTAL_TOKENS
        # An idle scheduler polls, at the expense of a core that the next request needs.
        server_args.sleep_on_idle = True

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def set_device(self, device: torch.device) -> None:
        """There is one CPU device: nothing to choose."""

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def empty_cache(self) -> None:
        """PyTorch keeps no cache of CPU memory."""

    def synchronize(self) -> None:
        """CPU work is synchronous."""

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    if lines.current() is lines.OLDER:  # the newer line takes its own class, and warns of platforms that name one

        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang_ext.compat.pages import TorchPages

        return TorchPages

    def get_dispatch_key_name(self) -> str:
        return "native"


def activate() -> str | None:
    """Entry point of the group `sglang.srt.platforms`: the platform's qualified name, or None where a GPU exists."""
    if torch.cuda.is_available():
        return None
    # SGLang compiles its penalties with torch.compile at their first use; on a CPU everybody waits minutes for that.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # What convolutions of hybrid linear models have seen of a prompt: SGLang would round it to bfloat16 between passes.
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    leave_out_gpu_warnings()  # SGLang asks for its platform before it imports what warns
    return "sglang_ext.platform_cpu.TorchCpuPlatform"
