"""Keys and values in cells (slot, key-value head), each head with a list of its own: gathered, written and attended to.

`reference` is the definition, on any device; `triton_impl` and `decode_impl` are its kernels, `flashinfer_impl` the
attention of a prefill. An attention backend chooses among them.
"""

from sglang_ext.kernels.cells.lists import Rotation, empty_lists

__all__ = ["Rotation", "empty_lists"]
