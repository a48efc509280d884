"""Retrievers by name. Adding one is one file and one line here."""

from __future__ import annotations

from importlib import import_module

from sglang_ext.retrievers.base import Retriever

# "module:Class", imported when first asked for, so that a retriever's dependencies cost nothing unused.
RETRIEVERS: dict[str, str] = {
    "bm25": "sglang_ext.retrievers.bm25:BM25",
    "dense": "sglang_ext.retrievers.dense:Dense",
    "random": "sglang_ext.retrievers.random_order:RandomOrder",
    "all": "sglang_ext.retrievers.all_blocks:AllBlocks",
}


SLOW = ("dense",)
"""Those that run a model for each query: whoever must not wait asks them in a thread."""


TEXTLESS = ("random", "all")
"""Those that give their scores whatever the texts are."""


def reads_text(name: str) -> bool:
    """Whether the scores of the retriever of that name depend on texts."""
    return name.partition(":")[0] not in TEXTLESS


def is_slow(name: str) -> bool:
    """Whether the retriever of that name takes more than a moment for a short query."""
    return name.partition(":")[0] in SLOW


def get(name: str) -> type[Retriever]:
    """The retriever class of that name.

    "NAME:ARGUMENT" gives the class configured by its argument ("bm25:stem", "dense:MODEL", "random:SEED"), for classes
    with a `configured(argument)` class method. Raises ValueError, listing the names, for an unknown one, and
    for an argument that the retriever does not take. Nothing heavy is loaded before `build`.
    """
    if not isinstance(name, str):
        raise ValueError(f"retriever is of type {type(name).__name__}; expected one of {', '.join(RETRIEVERS)}")
    base, colon, argument = name.partition(":")
    if base not in RETRIEVERS:
        raise ValueError(f"unknown retriever {name!r}; expected one of {', '.join(RETRIEVERS)}")
    module, _, attribute = RETRIEVERS[base].partition(":")
    found: type[Retriever] = getattr(import_module(module), attribute)
    if not colon:
        return found
    configured = getattr(found, "configured", None)
    if configured is None:
        raise ValueError(f"retriever {name!r}: {base} takes no argument; use {base!r}")
    chosen: type[Retriever] = configured(argument)
    return chosen
