"""Decoding steps of streams that see sinks, a window and blocks that came back, keys rotated as they are read.

`reference` is the definition, on any device; `triton_impl` has its kernels; `dispatch` chooses between them.
"""

from sglang_ext.kernels.stream_decode.types import (
    MapState,
    NewToken,
    StepNumbers,
    StreamCaches,
    StreamSizes,
    StreamWorkspace,
)

__all__ = ["MapState", "NewToken", "StepNumbers", "StreamCaches", "StreamSizes", "StreamWorkspace"]
