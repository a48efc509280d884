"""The mode of a server, by the class of its cache."""

from __future__ import annotations

from types import MappingProxyType

from sglang_ext.cache.radix import BlockRadixCache
from sglang_ext.cache.streams import StreamCache
from sglang_ext.names import PrefixCache
from sglang_ext.serving.mode import Mode
from sglang_ext.serving.streams import StreamMode
from sglang_ext.serving.tree import TreeMode

_MODES = MappingProxyType({BlockRadixCache: TreeMode(), StreamCache: StreamMode()})
_STOCK = Mode()


def mode_of(cache: PrefixCache) -> Mode:
    """How a server with this cache holds requests; SGLang's own way for a cache that is not ours."""
    return _MODES.get(type(cache), _STOCK)
