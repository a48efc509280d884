"""Warnings that say, on a machine without a GPU, that there is no GPU: they are left out of the log there.

Each is named by its whole message and, where it is logged, by its logger. Everything else is shown.
"""

from __future__ import annotations

import logging
import re
import warnings

WARNED = (
    "Triton is not supported on current platform, roll back to CPU.",
    "Only CUDA, HIP and XPU support AWQ currently.",
    "Only CUDA, MUSA and NPU support GGUF quantization currently.",
)

# logger -> the message as it stands in the source, before its arguments are filled in
LOGGED = {
    "torch.utils.cpp_extension": "No CUDA runtime is found, using CUDA_HOME='%s'",
    "sglang.srt.distributed.bootstrap": (
        "init_cpu_threads_env and shared memory based AllReduce is disabled, only intel amx backend and arm64 are"
        " supported"
    ),
}


class _LeavesOut(logging.Filter):
    """Drops the records of one message."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self.message = message

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != self.message


def leave_out_gpu_warnings() -> None:
    """Filter them in this process; to be called where there is no GPU, before SGLang's models are imported."""
    for message in WARNED:
        warnings.filterwarnings("ignore", message=re.escape(message) + r"\Z", category=UserWarning)
    for name, message in LOGGED.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, _LeavesOut) for each in logger.filters):
            logger.addFilter(_LeavesOut(message))
