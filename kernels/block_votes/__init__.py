"""Which memory blocks a layer retrieves: scores by their index vectors, votes of the layers, the best of them.

`reference` is the definition, on any device; `triton_impl` has its kernels, `cuda_impl` faster scores by `max` and
`cuda_election` a faster election; `dispatch` chooses.
"""

from sglang_ext.kernels.block_votes.dispatch import elect, score_blocks
from sglang_ext.kernels.block_votes.types import BlockIndex, QuerySpans

__all__ = ["BlockIndex", "QuerySpans", "elect", "score_blocks"]
