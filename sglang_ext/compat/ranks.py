"""Figures of all tensor-parallel ranks together, each of which has some of the heads.

Every rank has to ask at the same moment, as each does what all do: run a layer, answer a message.
"""

from __future__ import annotations

import torch
from sglang.srt.distributed import parallel_state
from torch.distributed import ReduceOp, all_reduce


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The mean of each value over the ranks, as float64 on the CPU; waits for the device."""
    found, ranks = _reduced(values, ReduceOp.SUM)
    return found / ranks


def least_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The least of each value over the ranks, as float64 on the CPU; waits for the device."""
    return _reduced(values, ReduceOp.MIN)[0]


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of each value over the ranks, the same to the last bit on all of them, on the device and in the dtype.

    Values on the CPU wait for all ranks; those on a GPU are added there, in the order of its stream.
    """
    group = parallel_state._ATTN_TP
    if group is None or group.world_size == 1:
        return values
    found = values.detach().clone(memory_format=torch.contiguous_format)
    all_reduce(found, ReduceOp.SUM, group=group.cpu_group if found.device.type == "cpu" else group.device_group)
    return found


def this_rank() -> int:
    """The number of this process among the ranks; 0 where there is one."""
    group = parallel_state._ATTN_TP
    return 0 if group is None else int(group.rank_in_group)


def _reduced(values: torch.Tensor, how: ReduceOp.RedOpType) -> tuple[torch.Tensor, int]:
    found, group = values.detach().double().cpu(), parallel_state._ATTN_TP
    if group is None or group.world_size == 1:
        return found, 1
    found = found.clone()
    all_reduce(found, how, group=group.cpu_group)
    return found, int(group.world_size)
