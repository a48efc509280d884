"""RetroInfer in the engine: the same clusters as Double-P's, in fixed numbers (algorithm: `policies.retroinfer`)."""

from __future__ import annotations

import torch

from sglang_ext.attention.clustered_policy import ClusteredPolicy
from sglang_ext.attention.sparse import ALWAYS
from sglang_ext.policies import retroinfer
from sglang_ext.policies.double_p import distribution
from sglang_ext.policies.options import RetroInferOptions


class RetroInferPolicy(ClusteredPolicy[RetroInferOptions]):
    """`--attention-backend retroinfer`: a baseline for Double-P."""

    options = RetroInferOptions
    request_options = ALWAYS | {"exact", "approx"}

    def choose(self, log_mass: torch.Tensor, config: RetroInferOptions) -> tuple[torch.Tensor, torch.Tensor]:
        return retroinfer.select(distribution(log_mass), config.budgets)
