"""The requests behind the rows of a forward pass."""

from __future__ import annotations

import torch

from sglang_ext import compat
from sglang_ext.attention.policy import Policy, Request
from sglang_ext.attention.step import BatchRows
from sglang_ext.cache import carried
from sglang_ext.kernels.shared import sent
from sglang_ext.names import ForwardBatch, Req, ScheduleBatch


class RequestTable:
    """Requests by their number in SGLang's request pool; tells the policy when one starts and ends."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._requests: dict[int, Request] = {}

    def note(self, req: Req) -> Request:
        """The request behind a scheduler's `Req`; a new one starts at the policy."""
        slot, row = compat.request_slot(req), carried.request_row(req)
        known = self._requests.get(slot)
        if known is not None and known.rid == req.rid and known.row is row:
            return known
        if known is not None:
            self.policy.finish(known)
        request = Request(
            slot,
            req.rid,
            row,
            carried.request_options(req),
            carried.request_written(req),
            prompt=len(req.origin_input_ids),
        )
        self._requests[slot] = request
        self.policy.start(request)
        return request

    def release(self, slot: int) -> None:
        """The request in `slot` ended or was retracted."""
        known = self._requests.pop(slot, None)
        if known is not None:
            self.policy.finish(known)


def note_batch(table: RequestTable, batch: ScheduleBatch, forward_batch: ForwardBatch) -> list[BatchRows]:
    """The new rows of every request of a batch; writes positions that are not columns."""
    rows: list[BatchRows] = []
    places: list[int] = []
    written: list[int] = []
    offset = 0
    for req, (begin, length) in zip(batch.reqs, compat.new_rows(forward_batch), strict=True):
        request = table.note(req)
        positions = table.policy.positions(request, begin, begin + length)
        if positions is not None:
            places.extend(range(offset, offset + length))
            written.extend(positions)
        rows.append(BatchRows(request, req, offset, begin, begin + length))
        offset += length
    if places:  # one copy for the whole batch
        into = forward_batch.positions
        at, values = sent(torch.tensor([places, written], dtype=torch.int64, device="cpu"), into.device)
        into[at] = values.to(into.dtype)
    return rows
