"""The reader in plain PyTorch, on any device: rows see the views of a policy, one after the other.

It serves every policy, and is what the kernels are compared with. Plain requests beside others get what SGLang's own
PyTorch attention computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ext.attention.model import Machine, Model
from sglang_ext.attention.policy import Attended, Caches, LayerView, Policy, RequestRows, RowViews
from sglang_ext.attention.readers.reader import Reader
from sglang_ext.attention.step import Batch, BatchRows, Forward, LayerCall
from sglang_ext.kernels.view_attention import View, merge_states, view_attention


@dataclass(frozen=True)
class PlainRow:
    """A request that sees all of its row; each is [1] int64, on the device.

    Attributes:
        slot: its number in SGLang's request pool.
        end: columns of its row, those of this pass included.
        begin: columns before this pass.
        rows: columns of this pass.
    """

    slot: torch.Tensor
    end: torch.Tensor
    begin: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class ViewStep:
    """A batch, and what its rows see.

    Attributes:
        batch: the requests.
        positions: [rows] int64 of the query rows.
        seen: of each request, the views of its rows, or what SGLang's own attention is told of a plain one.
    """

    batch: Batch
    positions: torch.Tensor
    seen: tuple[RowViews | PlainRow, ...]


class ViewReader(Reader[Batch, ViewStep]):
    """Views of one policy.

    Args:
        model: whose attention it is.
        policy: says what rows see.
        machine: its base is SGLang's PyTorch attention.
    """

    def __init__(self, model: Model, policy: Policy, machine: Machine) -> None:
        self.model, self.policy, self._base = model, policy, machine.base
        self.slot_pos = torch.zeros(model.slots, dtype=torch.int32, device=model.table.device)
        policy.bind(model.caches, model.shape.dtype)

    def step(self, batch: Batch) -> Batch:
        for rows in batch.rows:
            self.policy.before_pass(rows.request, rows.req, rows.begin, rows.end, batch.decode)
        return batch

    def before_layers(self, step: Batch, forward: Forward, graph_rows: int | None) -> ViewStep | None:
        self.slot_pos[forward.slots.long()] = forward.positions.to(torch.int32)
        seen = tuple(self._seen(rows, step.decode) for rows in step.rows)
        return None if all(isinstance(each, PlainRow) for each in seen) else ViewStep(step, forward.positions, seen)

    def _seen(self, rows: BatchRows, decode: bool) -> RowViews | PlainRow:
        slots = self.model.table[rows.request.slot, : rows.end]
        found = RequestRows(rows.request, slots, rows.begin, self.slot_pos, decode)
        views = self.policy.views(found)
        if views is not None:
            return views
        numbers = (rows.request.slot, rows.end, rows.begin, rows.end - rows.begin)
        return PlainRow(*(torch.tensor([number], device=slots.device) for number in numbers))

    def restored(self, slots: torch.Tensor, first: int) -> None:
        end = first + slots.numel()
        self.slot_pos[slots] = torch.arange(first, end, dtype=torch.int32, device=self.slot_pos.device)

    # ---- in every layer ----

    def read(self, call: LayerCall[ViewStep]) -> torch.Tensor:
        out, batch = call.empty(), call.loaded.batch
        out[batch.total :] = 0
        caches = Caches(call.layer, *call.caches, self.slot_pos, self.model.rope, call.scale, call.carry)
        for rows, seen in zip(batch.rows, call.loaded.seen, strict=True):
            if isinstance(seen, PlainRow):
                self._plain(seen, slice(rows.first, rows.first + rows.end - rows.begin), call, out)
            else:
                for begin, end, view in seen:
                    part = slice(rows.first + begin - rows.begin, rows.first + end - rows.begin)
                    out[part] = self._view(view, caches, call.query[part], call.loaded.positions[part])
        return out

    def _view(
        self, view: View | LayerView, caches: Caches, query: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        chosen = view(caches, query, positions) if callable(view) else view
        attended = chosen if isinstance(chosen, Attended) else Attended(chosen)
        out, lse = view_attention(
            query, positions, attended.view, caches.keys, caches.values, self.slot_pos, caches.rope, caches.scale
        )
        if attended.parts:
            outs, lses = zip((out, lse), *attended.parts, strict=True)
            out, _ = merge_states(torch.stack(outs), torch.stack(lses))
        return out

    def _plain(self, row: PlainRow, part: slice, call: LayerCall[ViewStep], out: torch.Tensor) -> None:
        """SGLang's own attention for one plain request of a batch that also has views."""
        keys, values = call.caches
        common = call.query[part], out[part], keys, values, self.model.table, row.slot, row.end
        grouped = call.query.shape[1] != keys.shape[1]
        if call.loaded.batch.decode:
            self._base._run_sdpa_forward_decode(*common, scaling=call.scale, enable_gqa=grouped, causal=False)
        else:
            self._base._run_sdpa_forward_extend(
                *common, row.begin, row.rows, scaling=call.scale, enable_gqa=grouped, causal=True
            )
