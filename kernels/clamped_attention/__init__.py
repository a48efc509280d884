"""Attention of a chunk whose keys are seen at their distance, but never farther than at a largest one.

`reference` is the definition in plain PyTorch, on any device; `dense_impl` makes it of dense attention on NVIDIA GPUs.
"""

from sglang_ext.kernels.clamped_attention.types import ChunkQuery, FarKeys, LayerRows, Part, SeenKeys

__all__ = ["ChunkQuery", "FarKeys", "LayerRows", "Part", "SeenKeys"]
