"""Policies that choose single tokens or pages of a long row's middle; without a cache of what they know of the keys.

They are baselines for answers, not for speed: bounds and quantised keys are computed anew in every step.
"""

from __future__ import annotations

from functools import partial

import torch

from sglang_ext.attention.policy import Caches, LayerView, RequestRows
from sglang_ext.attention.sparse import Asked, OptionsT, SparsePolicy, grouped, measure
from sglang_ext.attention.tokens import chosen_tokens
from sglang_ext.kernels.view_attention import View


class TokenPolicy(SparsePolicy[OptionsT]):
    """Base class: sinks and window are read, and what `choose` says of the tokens between them."""

    def choose(self, query: torch.Tensor, keys: torch.Tensor, scale: float, config: OptionsT) -> torch.Tensor:
        """Which middle tokens a step reads.

        Args:
            query: [kv_heads, group, head_dim], float32 or float64.
            keys: [kv_heads, tokens, head_dim], likewise, at least one token.
            scale: factor of the logits.
            config: of the request.

        Returns:
            [kv_heads, tokens] bool.
        """
        raise NotImplementedError

    def step(self, asked: Asked[OptionsT], rows: RequestRows) -> LayerView | None:
        begin, end = self.config.sink, rows.begin - self.config.window
        if begin >= end:
            self.read_all(asked, "no token lies between the sinks and the window yet")
            return None
        return partial(self._attend, asked, rows, begin, end)

    def _attend(
        self,
        asked: Asked[OptionsT],
        rows: RequestRows,
        begin: int,
        end: int,
        caches: Caches,
        query: torch.Tensor,
        query_pos: torch.Tensor,
    ) -> View:
        heads = grouped(query, caches)
        keys = caches.keys[rows.slots[begin:end].long()].transpose(0, 1).to(heads.dtype)
        read = torch.ones(keys.shape[0], rows.end, dtype=torch.bool, device=keys.device)
        read[:, begin:end] = self.choose(heads, keys, caches.scale, asked.config)
        if asked.note is not None:
            measure(asked.note, rows, caches, heads, read)
        return View((chosen_tokens(rows, read),))
