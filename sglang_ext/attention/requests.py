"""The requests behind the rows of a forward pass, and what every view backend owes the scheduler hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from sglang_ext import compat
from sglang_ext.attention.policy import Policy, Request
from sglang_ext.cache import carried


class RequestTable:
    """Requests by their number in SGLang's request pool; tells the policy when one starts and ends."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._requests: dict[int, Request] = {}

    def note(self, req: Any) -> Request:
        """The request behind a scheduler's `Req`; a new one starts at the policy."""
        slot, row = req.req_pool_idx, carried.request_row(req)
        known = self._requests.get(slot)
        if known is not None and known.rid == req.rid and known.row is row:
            return known
        if known is not None:
            self.policy.finish(known)
        request = Request(slot, req.rid, row, carried.request_options(req), carried.request_written(req))
        self._requests[slot] = request
        self.policy.start(request)
        return request

    def get(self, slot: int) -> Request:
        """The request in `slot`; SGLang's own dummy batches have none, and get a plain one."""
        return self._requests.get(slot) or Request(slot, "", None, {}, ())

    def find(self, slot: int) -> Request | None:
        """The request in `slot`, or None for one of SGLang's own dummy batches."""
        return self._requests.get(slot)

    def release(self, slot: int) -> None:
        """The request in `slot` ended or was retracted."""
        known = self._requests.pop(slot, None)
        if known is not None:
            self.policy.finish(known)


class ViewBackend(ABC):
    """What the scheduler hooks, the radix cache and the runners of CUDA graphs call, whichever kernels serve the views.

    Attributes:
        viewing: whether the batch at hand has views; where it has none, a base class of SGLang's serves it.
    """

    policy: Policy
    viewing: bool = False

    @abstractmethod
    def prepare(self, batch: Any, forward_batch: Any) -> None:
        """Note the requests of a batch and set their positions. Runs when SGLang builds a ForwardBatch."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """The request in `slot` of SGLang's request pool ended or was retracted."""

    def rewritten(self, slot: int) -> None:
        """The row of the request in `slot` may name other KV slots now: what was copied from it no longer holds."""
        return

    def begin_capture(self, sizes: list[int]) -> list[int]:
        """CUDA graphs of decoding steps with so many rows are about to be captured; returns the sizes of any use."""
        return sizes

    def end_capture(self) -> None:
        """The next batch says itself whether it has views."""
        self.viewing = False

    def fits_graph(self) -> bool:
        """Whether the decoding step at hand, which has views, can run in a CUDA graph."""
        return True


def view_backend(model_runner: Any) -> ViewBackend | None:
    """The view backend among a model runner's attention backends, or None when another one was chosen."""
    backend = getattr(model_runner, "attn_backend", None)
    return backend if isinstance(backend, ViewBackend) else None


def check_cache_type(model_runner: Any, dtype: torch.dtype) -> None:
    """Raise ValueError where the KV cache has another type than the model, as kernels expect one."""
    pool = model_runner.token_to_kv_pool
    kept = pool.get_key_buffer(compat.first_layer(pool)).dtype
    if kept != dtype:
        raise ValueError(
            f"a KV cache of {kept} for a model in {dtype}: expected the model's type; leave out --kv-cache-dtype"
        )


def note_batch(table: RequestTable, batch: Any, forward_batch: Any) -> list[tuple[Request, int, int]]:
    """(request, first column, end column) of every request's new rows; writes positions that are not columns."""
    extend = forward_batch.extend_seq_lens_cpu is not None
    ends = [] if extend else forward_batch.seq_lens_cpu.tolist()
    rows: list[tuple[Request, int, int]] = []
    offset = 0
    for index, req in enumerate(batch.reqs):
        request = table.note(req)
        if extend:
            length, begin = forward_batch.extend_seq_lens_cpu[index], forward_batch.extend_prefix_lens_cpu[index]
        else:
            length, begin = 1, ends[index] - 1
        positions = table.policy.positions(request, begin, begin + length)
        if positions is not None:
            own = forward_batch.positions[offset : offset + length]
            # From pinned memory: any other copy waits for everything that the GPU has still to do.
            staged = torch.tensor(positions, dtype=own.dtype, device="cpu", pin_memory=own.is_cuda)
            own.copy_(staged, non_blocking=True)
        rows.append((request, begin, begin + length))
        offset += length
    return rows
