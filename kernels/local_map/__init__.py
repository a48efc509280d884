"""What a chunk's attention to its window says of tokens and blocks (Ltri-LLM, section 3), from the log-sum-exp.

`reference` is the definition in plain PyTorch, on any device; `triton_impl` has its kernels. `dispatch` chooses.
"""

from sglang_ext.kernels.local_map.dispatch import fill_tiles, received
from sglang_ext.kernels.local_map.types import BlockTiles, LocalMap, Received

__all__ = ["BlockTiles", "LocalMap", "Received", "fill_tiles", "received"]
