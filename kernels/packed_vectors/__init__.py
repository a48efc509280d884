"""Index vectors in 4 bits a component: rotated, rounded, and packed two to a byte, with one scale for each span.

`reference` is the definition, on any device; `triton_impl` has its kernel; `dispatch` chooses. `kernels.block_votes`
compares queries with such vectors.
"""

from sglang_ext.kernels.packed_vectors.dispatch import pack, rotate
from sglang_ext.kernels.packed_vectors.types import PackedSpans, hadamard

__all__ = ["PackedSpans", "hadamard", "pack", "rotate"]
