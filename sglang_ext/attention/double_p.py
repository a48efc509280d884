"""Double-P in the engine: clusters by two-stage top-p (algorithm: `policies.double_p`)."""

from __future__ import annotations

import torch

from sglang_ext.attention.clustered_policy import ClusteredPolicy
from sglang_ext.attention.sparse import ALWAYS
from sglang_ext.policies import double_p
from sglang_ext.policies.double_p import DoubleP


class DoublePPolicy(ClusteredPolicy[DoubleP]):
    """`--attention-backend double_p`: plain requests through their clusters, pools as DBSA serves them."""

    options = DoubleP
    request_options = ALWAYS | {"p1", "p2"}

    def choose(self, log_mass: torch.Tensor, config: DoubleP) -> tuple[torch.Tensor, torch.Tensor]:
        share = double_p.distribution(log_mass)
        # A share may round to 0 where there are tokens, and p = 1 means all of them.
        share = torch.where(log_mass > float("-inf"), share.clamp(min=torch.finfo(share.dtype).tiny), share)
        return double_p.select(share, config)

    def stages(self, slot: int) -> tuple[float, float]:
        """(p1, p2) of the request in `slot`; everything for one that is dense."""
        asked = self._asked.get(slot)
        return (1.0, 1.0) if asked is None else asked.config.stages


class DbsaDoublePPolicy(DoublePPolicy):
    """`--attention-backend dbsa+double_p`: answers over pools read the blocks through their clusters, too.

    A block's clusters belong to its node and serve every request that selects it, wherever it stands in the request's
    row. The question is prefilled as DBSA does it. The window lies in the request's own tokens, all of which are exact
    until `append` of them wait.
    """

    over_pools = True
