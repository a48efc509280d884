"""RetroInfer in the engine: the same clusters as Double-P's, in fixed numbers (algorithm: `policies.retroinfer`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ext.attention.clustered_policy import ClusteredPolicy
from sglang_ext.attention.sparse import ALWAYS
from sglang_ext.policies import retroinfer
from sglang_ext.policies.clustering import Clustering
from sglang_ext.policies.double_p import distribution


@dataclass(frozen=True)
class RetroInferOptions(Clustering):
    """How many clusters are exact and approximated, beside how keys are clustered.

    Attributes:
        exact: share of the clusters computed token by token.
        approx: share of the clusters computed by their centroid.
    """

    exact: float = retroinfer.RetroInfer.exact
    approx: float = retroinfer.RetroInfer.approx

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budgets  # noqa: B018  its own checks

    @property
    def budgets(self) -> retroinfer.RetroInfer:
        return retroinfer.RetroInfer(self.exact, self.approx)


class RetroInferPolicy(ClusteredPolicy[RetroInferOptions]):
    """`--attention-backend retroinfer`: a baseline for Double-P."""

    options = RetroInferOptions
    request_options = ALWAYS | {"exact", "approx"}

    def choose(self, log_mass: torch.Tensor, config: RetroInferOptions) -> tuple[torch.Tensor, torch.Tensor]:
        return retroinfer.select(distribution(log_mass), config.budgets)
