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
class ViewStep:
    """A batch, and what its rows see.

    Attributes:
        batch: the requests.
        positions: [rows] int64 of the query rows.
        seen: of each request, its rows and their views; None for one that SGLang's own attention serves.
    """

    batch: Batch
    positions: torch.Tensor
    seen: tuple[tuple[RequestRows, RowViews] | None, ...]


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
        policy.bind(model.caches)

    def step(self, batch: Batch) -> Batch:
        for rows in batch.rows:
            self.policy.before_pass(rows.request, rows.req, rows.begin, rows.end, batch.decode)
        return batch

    def before_layers(self, step: Batch, forward: Forward, graph_rows: int | None) -> ViewStep | None:
        self.slot_pos[forward.slots.long()] = forward.positions.to(torch.int32)
        seen = tuple(self._seen(rows, step.decode) for rows in step.rows)
        return ViewStep(step, forward.positions, seen) if any(seen) else None

    def _seen(self, rows: BatchRows, decode: bool) -> tuple[RequestRows, RowViews] | None:
        slots = self.model.table[rows.request.slot, : rows.end]
        found = RequestRows(rows.request, slots, rows.begin, self.slot_pos, decode)
        views = self.policy.views(found)
        return None if views is None else (found, views)

    # ---- in every layer ----

    def read(self, call: LayerCall[ViewStep]) -> torch.Tensor:
        out = call.empty()
        caches = Caches(call.layer, *call.caches, self.slot_pos, self.model.rope, call.scale, call.carry)
        for rows, seen in zip(call.step.batch.rows, call.step.seen, strict=True):
            if seen is None:
                self._plain(rows, call, out)
            else:
                for begin, end, view in seen[1]:
                    part = slice(rows.first + begin - rows.begin, rows.first + end - rows.begin)
                    out[part] = self._view(seen[0], view, caches, call.query[part], call.step.positions[part])
        return out

    def _view(
        self, rows: RequestRows, view: View | LayerView, caches: Caches, query: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        chosen = view(caches, query, positions) if callable(view) else view
        attended = chosen if isinstance(chosen, Attended) else Attended(chosen)
        out, lse = view_attention(
            query, positions, attended.view, caches.keys, caches.values, self.slot_pos, caches.rope, caches.scale
        )
        if attended.parts:
            outs, lses = zip((out, lse), *attended.parts, strict=True)
            out, lse = merge_states(torch.stack(outs), torch.stack(lses))
        self.policy.observe(caches, rows, query, positions, attended.view, lse)
        return out

    def _plain(self, rows: BatchRows, call: LayerCall[ViewStep], out: torch.Tensor) -> None:
        """SGLang's own attention for one plain request of a batch that also has views."""
        part = slice(rows.first, rows.first + rows.end - rows.begin)
        keys, values = call.caches
        of = lambda number: torch.tensor([number], device=keys.device)  # noqa: E731
        row = keys, values, self.model.table, of(rows.request.slot), of(rows.end)
        grouped, decode = call.query.shape[1] != keys.shape[1], call.step.batch.decode
        if decode:
            self._base._run_sdpa_forward_decode(
                call.query[part], out[part], *row, scaling=call.scale, enable_gqa=grouped, causal=False
            )
        else:
            self._base._run_sdpa_forward_extend(
                call.query[part],
                out[part],
                *row,
                of(rows.begin),
                of(rows.end - rows.begin),
                scaling=call.scale,
                enable_gqa=grouped,
                causal=True,
            )
