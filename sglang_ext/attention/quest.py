"""Quest in the engine: the pages of the highest bounds (algorithm: `policies.quest`)."""

from __future__ import annotations

import torch

from sglang_ext.attention.sparse import ALWAYS
from sglang_ext.attention.token_policy import TokenPolicy
from sglang_ext.policies import quest
from sglang_ext.policies.options import QuestOptions


class QuestPolicy(TokenPolicy[QuestOptions]):
    """`--attention-backend quest`: a baseline for Double-P."""

    options = QuestOptions
    request_options = ALWAYS | {"budget"}

    def choose(self, query: torch.Tensor, keys: torch.Tensor, scale: float, config: QuestOptions) -> torch.Tensor:
        scores = quest.page_scores(query, *quest.page_bounds(keys, config.page))
        return quest.select(scores, keys.shape[1], config.pages)
