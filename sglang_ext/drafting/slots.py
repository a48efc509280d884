"""KV slots of drafts: room at the end of a row, and what SGLang does with Triton where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.runtime_context import get_server_args

from sglang_ext import compat
from sglang_ext.config import DRAFTING
from sglang_ext.names import KVPool, Passed


def around_assign_slots(
    original: Callable[..., None],
    requests: torch.Tensor,
    table: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    batch_size: int,
) -> None:
    """AROUND assign_req_to_token_pool_func: SGLang writes slots into rows with Triton, or a build of its own for CPUs.

    Args:
        requests: [batch_size] integer, rows of the table.
        table: [rows, columns] int32, KV slot of each column.
        begins, ends: [batch_size] integer, columns [begin, end) of each request get slots.
        slots: [all of these columns] integer, those of one request after the other.
    """
    if table.device.type != "cpu":
        return original(requests, table, begins, ends, slots, batch_size)
    counts = ends - begins
    for row, begin, end, own in zip(requests, begins, ends, slots.split(counts.tolist()), strict=True):
        table[row, begin:end] = own.to(table.dtype)


def around_init_copies(original: Callable[[KVPool], None], pool: KVPool) -> None:
    """AROUND MHATokenToKVPool._init_kv_copy_and_warmup: SGLang would try to move keys and values with Triton.

    It moves those of drafts that hold where the drafts form a tree. Ours form a chain, and stay where they are.
    """
    if torch.device(pool.device).type != "cpu":
        return original(pool)
    pool._kv_copy_config = None


def around_row_headroom(original: Callable[..., int], *args: Passed) -> int:
    """AROUND get_req_to_token_extra_context_len: columns of a row beyond the context, for what is drafted at its end.

    SGLang reserves slots for two verifications and widens rows by one, so that its rows end before its slots do.
    """
    server_args = compat.resolved(get_server_args())
    if server_args.speculative_algorithm != DRAFTING:
        return original(*args)
    return max(original(*args), compat.slots_ahead(server_args) + (server_args.page_size or 1))
