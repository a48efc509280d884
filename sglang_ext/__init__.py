"""Long, shared, sparse KV caches in SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Engine", "RuntimeEndpoint", "__version__"]

if TYPE_CHECKING:
    from sglang_ext.serving.engine import Engine
    from sglang_ext.serving.frontend import RuntimeEndpoint


def __getattr__(name: str) -> type[Engine] | type[RuntimeEndpoint]:
    # SGLang takes seconds to import: `import sglang_ext` alone must not pay for it.
    if name == "Engine":
        from sglang_ext.serving.engine import Engine

        return Engine
    if name == "RuntimeEndpoint":
        from sglang_ext.serving.frontend import RuntimeEndpoint

        return RuntimeEndpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
