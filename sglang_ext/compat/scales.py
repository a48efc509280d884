"""What SGLang divides keys and values by before it stores them in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_ext.compat.models import FLOAT8


@dataclass(frozen=True)
class KVScales:
    """Factors of one layer: a key is what is stored times `keys`, a value what is stored times `values`."""

    keys: float
    values: float


UNSCALED = KVScales(1.0, 1.0)
"""Those of a layer that stores keys and values as they are."""


def kv_scales(pool: Any, layer: Any) -> KVScales:
    """The scales of a layer, which some checkpoints have beside their weights.

    They count where keys and values are stored in float8 alone (`MHATokenToKVPool.set_kv_buffer`).

    Args:
        pool: SGLang's KV cache.
        layer: SGLang's attention layer.
    """
    if pool.dtype != FLOAT8 or layer.k_scale is None:
        return UNSCALED
    return KVScales(layer.k_scale_float, layer.v_scale_float)
