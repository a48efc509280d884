"""Priority scheduling: SGLang lets requests of a higher priority run first, and has others give way to them."""

from __future__ import annotations

import sys
from typing import Any

from sglang_ext.compat.line import resolved


def preempts(server_args: Any) -> bool:
    """Whether running requests give way to waiting ones of a higher priority, and begin again later."""
    return bool(getattr(server_args, "enable_priority_scheduling", False)) and not getattr(
        server_args, "disable_priority_preemption", False
    )


def first_priority(manager: Any) -> int | None:
    """The priority that no request comes before; None where the server does not go by priorities.

    Args:
        manager: SGLang's TokenizerManager.
    """
    server_args = resolved(manager.server_args)
    if not server_args.enable_priority_scheduling:
        return None
    return -sys.maxsize - 1 if server_args.schedule_low_priority_values_first else sys.maxsize


def sort_waiting(scheduler: Any, running_batch: Any) -> None:
    """Put the waiting queue in the order of priorities, where the server goes by them.

    SGLang sorts what it is shown each time it chooses a batch.
    """
    if scheduler.enable_priority_scheduling:
        scheduler.policy.calc_priority(scheduler.waiting_queue, running_batch)
