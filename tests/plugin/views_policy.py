"""Test policies of every kind a view can be, served by a real engine: `test_policies.py` installs this as a package.

What the engine's views are is read from a file before every forward pass, so that one engine serves them all. The rules
are written out again, on logits, in `test_policies.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_ext.attention.dbsa import DbsaPolicy
from sglang_ext.attention.policy import Caches, RequestRows, RowViews
from sglang_ext.cache.budget import KVShape
from sglang_ext.kernels.view_attention import Consecutive, Ranks, Segment, SharedDistance, View, Written
from sglang_ext.systems.registry import System

FOLDER_ENV, BYTES_ENV = "VIEWS_POLICY_FOLDER", "VIEWS_POLICY_BYTES"
SINKS, WINDOW, TOP = 4, 12, 10
PLAIN_BELOW = 12  # tokens of a request, its answer included


class ViewsPolicy(DbsaPolicy):
    """Pools are encoded as DBSA does; what a question sees is what the file `kind` says."""

    def __init__(self) -> None:
        self.folder = Path(os.environ[FOLDER_ENV])

    def extra_bytes_per_token(self, shape: KVShape, kernels: bool) -> int:
        self._log("budget", layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        return int(os.environ[BYTES_ENV])

    def views(self, rows: RequestRows) -> RowViews | None:
        kind = (self.folder / "kind").read_text()
        if rows.row is not None and (rows.row.new or kind != "written"):
            return super().views(rows)
        if kind == "plain" or rows.end < PLAIN_BELOW:
            return None
        return getattr(self, "_" + kind)(rows)

    # ---- before the layers run

    def _dense(self, rows: RequestRows) -> RowViews:
        return [(rows.begin, rows.end, View((Segment(rows.slots, Consecutive(0), causal=True),)))]

    def _written(self, rows: RequestRows) -> RowViews:
        """Blocks where they were encoded: positions from the slot table. The own tokens follow at their columns."""
        cut = rows.row.prefix_tokens if rows.row is not None else 0
        own = Segment(rows.slots[cut:], Written(), causal=True)
        return [(rows.begin, rows.end, View((Segment(rows.slots[:cut], Written()), own)))]

    def _rank(self, rows: RequestRows) -> RowViews:
        """StreamingLLM: sinks and a window, positions consecutive up to the query's own."""
        views = []
        for column in range(rows.begin, rows.end):
            kept = [t for t in range(column + 1) if t < SINKS or t > column - WINDOW]
            ranks = torch.arange(column + 1 - len(kept), column + 1)
            views.append((column, column + 1, View((Segment(rows.slots[kept], Ranks(ranks), causal=True),))))
        return views

    def _distance(self, rows: RequestRows) -> RowViews:
        """Everything before the window is seen at the window's far end."""
        views = []
        for column in range(rows.begin, rows.end):
            cut = max(0, column + 1 - WINDOW)
            far = Segment(rows.slots[:cut], SharedDistance(WINDOW))
            near = Segment(rows.slots[cut:], Written(), causal=True)
            views.append((column, column + 1, View((far, near))))
        return views

    # ---- in every layer

    def _layer(self, rows: RequestRows) -> RowViews:
        """Layer 0 sees a window, the others all."""

        def view_of(column: int):
            def view(caches: Caches, query: torch.Tensor, query_pos: torch.Tensor) -> View:
                first = max(0, column + 1 - WINDOW) if caches.layer == 0 else 0
                return View((Segment(rows.slots[first:], Consecutive(first), causal=True),))

            return view

        return [(column, column + 1, view_of(column)) for column in range(rows.begin, rows.end)]

    def _head(self, rows: RequestRows) -> RowViews:
        """Every key-value head keeps cells of its own: the sinks, and each some of the others."""

        def view(caches: Caches, query: torch.Tensor, query_pos: torch.Tensor) -> View:
            heads = caches.keys.shape[1]
            kept = [[t for t in range(rows.end) if t < SINKS or t % (heads + 1) == h] for h in range(heads)]
            longest = max(map(len, kept))
            columns = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in kept])
            padding = torch.tensor([[t >= len(tokens) for t in range(longest)] for tokens in kept])
            cells = rows.slots.long()[columns].masked_fill(padding, -1)
            return View((Segment(cells, Ranks(columns), causal=True),))

        return [(rows.begin, rows.end, view)]

    def _chosen(self, rows: RequestRows) -> RowViews:
        """While decoding, the `TOP` tokens with the highest logits (mean over the heads), and the query's own."""
        if rows.end - rows.begin > 1:
            return self._dense(rows)

        def view(caches: Caches, query: torch.Tensor, query_pos: torch.Tensor) -> View:
            keys = caches.keys[rows.slots[:-1].long()]  # [tokens, kv_heads, head_dim]
            grouped = query[0].view(keys.shape[1], -1, keys.shape[2])
            scores = torch.einsum("hgd,thd->thg", grouped, keys).mean((1, 2))
            chosen = scores.topk(min(TOP, len(scores))).indices
            tokens = torch.cat([chosen, chosen.new_tensor([rows.end - 1])])
            return View((Segment(rows.slots[tokens], Written()),))

        return [(rows.begin, rows.end, view)]

    # ---- tree nodes

    def node_hooks(self) -> Sequence[object]:
        return [self]

    def on_insert(self, node) -> None:
        self._log("insert", node=node.id, tokens=len(node.key))

    def on_split(self, head, tail) -> None:
        self._log("split", head=head.id, tail=tail.id, tokens=[len(head.key), len(tail.key)])

    def on_evict(self, node) -> None:
        self._log("evict", node=node.id, tokens=len(node.key))

    def on_reset(self) -> None:
        self._log("reset")

    def _log(self, event: str, **what) -> None:
        with (self.folder / "log").open("a") as log:
            log.write(json.dumps({"event": event, **what}) + "\n")


SYSTEM = System("Whatever the file `kind` says.", "views_policy:ViewsPolicy")
