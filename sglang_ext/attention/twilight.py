"""Twilight in the engine: token top-p inside Quest's candidates (algorithm: `policies.twilight`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ext.attention.quest import QuestOptions
from sglang_ext.attention.sparse import ALWAYS
from sglang_ext.attention.token_policy import TokenPolicy
from sglang_ext.policies import twilight


@dataclass(frozen=True)
class TwilightOptions(QuestOptions):
    """What is kept of the candidates, which are Quest's.

    Attributes:
        p: share of the candidates' estimated mass.
        estimate: `int4` quantised keys, or `exact` logits.
        group: one set a group of heads: the `union` of its heads' sets, or the set of their `mean` probability.
    """

    p: float = twilight.Twilight.p
    estimate: str = twilight.Twilight.estimate
    group: str = twilight.Twilight.group

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokens  # noqa: B018  its own checks

    @property
    def tokens(self) -> twilight.Twilight:
        return twilight.Twilight(self.p, self.pages, self.estimate, self.group)


class TwilightPolicy(TokenPolicy[TwilightOptions]):
    """`--attention-backend twilight`: a baseline for Double-P."""

    options = TwilightOptions
    request_options = ALWAYS | {"p", "budget"}

    def choose(self, query: torch.Tensor, keys: torch.Tensor, scale: float, config: TwilightOptions) -> torch.Tensor:
        return twilight.select(query, keys, config.tokens, scale)
