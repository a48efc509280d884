"""Keys and values in cells (slot, key-value head), each head with a list of its own: gathered, written and attended to.

`reference` is the definition, on any device; `triton_impl` and `decode_impl` are its kernels, `cuda_impl` decodes in
CUDA, `dense_impl` is the attention of a prefill. `dispatch` chooses who decodes, an attention backend the rest.
"""

from sglang_ext.kernels.cells.lists import Rotation, empty_lists
from sglang_ext.kernels.cells.types import Cells, CountedScores, DecodeWorkspace, NewTokens

__all__ = ["Cells", "CountedScores", "DecodeWorkspace", "NewTokens", "Rotation", "empty_lists"]
