"""Twilight in the engine: token top-p inside Quest's candidates (algorithm: `policies.twilight`)."""

from __future__ import annotations

import torch

from sglang_ext.attention.sparse import ALWAYS
from sglang_ext.attention.token_policy import TokenPolicy
from sglang_ext.policies import twilight
from sglang_ext.policies.options import TwilightOptions


class TwilightPolicy(TokenPolicy[TwilightOptions]):
    """`--attention-backend twilight`: a baseline for Double-P."""

    options = TwilightOptions
    request_options = ALWAYS | {"p", "budget"}

    def choose(self, query: torch.Tensor, keys: torch.Tensor, scale: float, config: TwilightOptions) -> torch.Tensor:
        return twilight.select(query, keys, config.tokens, scale)
