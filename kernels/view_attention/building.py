"""A FlashInfer module that is compiled beside what else a server does at its start.

Where no cache has it, a compiler takes a minute or more, in processes of its own. A thread that waits for them holds
nothing up: meanwhile Triton's kernels are compiled, and SGLang captures its CUDA graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Thread
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class Module(Protocol):
    """What is asked of FlashInfer's `JitSpec`.

    Attributes:
        name: of the module.
        is_compiled: whether a cache has it.
    """

    name: str

    @property
    def is_compiled(self) -> bool: ...

    def build(self, verbose: bool, need_lock: bool) -> None:
        """Compile it, unless a cache has it; with the lock, one process at a time does so."""


class Building:
    """The compilation of a module, which begins at once.

    Args:
        module: what is compiled. It is locked: who asks for it meanwhile, in this process or in another one, waits
            until it is there.
    """

    def __init__(self, module: Module) -> None:
        self._module, self._seconds = module, 0.0
        self._failed: Exception | None = None
        self._thread = Thread(target=self._build, daemon=True, name=f"compile {module.name}")
        self._new = not module.is_compiled
        if self._new:
            logger.info("FlashInfer compiles %s, which no cache has, while the server goes on starting", module.name)
            self._thread.start()

    def _build(self) -> None:
        begin = time.perf_counter()
        try:
            self._module.build(verbose=False, need_lock=True)
        except Exception as error:  # who uses the module meets it, too, and is the one to raise it
            self._failed = error
        self._seconds = time.perf_counter() - begin

    def wait(self) -> None:
        """Return when the module is there, and say how long it took; does nothing the second time."""
        if not self._new:
            return
        begin = time.perf_counter()
        self._thread.join()
        self._new, waited = False, time.perf_counter() - begin
        if self._failed is not None:
            logger.warning("FlashInfer could not compile %s ahead of its use: %s", self._module.name, self._failed)
            return
        words = "FlashInfer compiled %s in %.1f s, of which the start of the server waited %.1f s"
        logger.info(words, self._module.name, self._seconds, waited)


def hopper_module(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> Module | None:
    """The module that `VirtualRequests.plan` asks FlashInfer for with its backend `auto` on a Hopper GPU.

    Args:
        device: a CUDA device.
        dtype: of queries, keys, values and outputs.
        head_dim, value_dim: of the layers.

    Returns:
        None where FlashInfer chooses another kernel family, which makes its modules in another way.
    """
    from flashinfer.jit import gen_batch_prefill_module
    from flashinfer.utils import determine_attention_backend

    sizes = {"head_dim_qk": head_dim, "head_dim_vo": value_dim}
    if determine_attention_backend(device, 0, False, False, dtype, dtype, **sizes) != "fa3":
        return None
    generate: Callable[..., Any] = gen_batch_prefill_module  # FlashInfer 0.7 declares a wider type than it returns
    module: Module = generate(
        "fa3",
        dtype_q=dtype,
        dtype_kv=dtype,
        dtype_o=dtype,
        dtype_idx=torch.int32,
        pos_encoding_mode=0,
        use_sliding_window=False,
        use_logits_soft_cap=False,
        use_fp16_qk_reduction=False,
        **sizes,
    )
    return module
