"""Quest in the engine: the pages of the highest bounds (algorithm: `policies.quest`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ext.attention.sparse import ALWAYS
from sglang_ext.attention.token_policy import TokenPolicy
from sglang_ext.policies import quest
from sglang_ext.policies.clustering import Middle


@dataclass(frozen=True)
class QuestOptions(Middle):
    """How pages are cut and how many are read; pages begin behind the sinks.

    Attributes:
        page: tokens of a page.
        budget: share of the middle tokens that is read.
    """

    page: int = quest.Quest.page
    budget: float = quest.Quest.budget

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pages  # noqa: B018  its own checks

    @property
    def pages(self) -> quest.Quest:
        return quest.Quest(self.page, self.budget)


class QuestPolicy(TokenPolicy[QuestOptions]):
    """`--attention-backend quest`: a baseline for Double-P."""

    options = QuestOptions
    request_options = ALWAYS | {"budget"}

    def choose(self, query: torch.Tensor, keys: torch.Tensor, scale: float, config: QuestOptions) -> torch.Tensor:
        scores = quest.page_scores(query, *quest.page_bounds(keys, config.page))
        return quest.select(scores, keys.shape[1], config.pages)
