"""A pool and its versions: what is served under one name, without any server."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sglang_ext.cache.rows import POOL_OWNER
from sglang_ext.config import PoolOptions, RequestOptions
from sglang_ext.retrievers import registry
from sglang_ext.retrievers.base import Retriever
from sglang_ext.serving.label_tree import LabelTokens
from sglang_ext.serving.layout import Demonstration, Layout, parse_demonstrations
from sglang_ext.types import JsonObject, Options

COMPLETION, CHAT = "completion", "chat"

MAX_RETRIEVERS = 8
"""Retrievers of one version beside the default one, at most; the oldest of them gives way."""
DEFAULT_RETRIEVER = (RequestOptions("").retriever, RequestOptions("").scores_blocks)

_owners = itertools.count(1)


@dataclass(frozen=True)
class Definition:
    """What users wrote: everything that is needed to build the pool again.

    Attributes:
        demonstrations: by id, in order of arrival.
        groups: ids of the demonstrations of each block. A tuple of them is made once, with its demonstrations: where it
            is the same object, they are, too.
        deleted: ids that retrieval and views leave out, though the blocks they stand in were encoded with them.
    """

    options: PoolOptions
    demonstrations: Mapping[str, Demonstration]
    groups: tuple[tuple[str, ...], ...]
    deleted: frozenset[str] = frozenset()

    def without(self, id: str) -> Definition:
        """The same with demonstration `id` left out of retrieval and of every view."""
        return replace(self, deleted=self.deleted | {id})

    def purged(self) -> Definition:
        """The same with deleted demonstrations gone from their blocks; a block that is left empty goes too."""
        groups = [tuple(id for id in group if id not in self.deleted) for group in self.groups]
        kept = {id: item for id, item in self.demonstrations.items() if id not in self.deleted}
        return replace(self, demonstrations=kept, groups=tuple(group for group in groups if group), deleted=frozenset())

    def grown(self, items: Sequence[Demonstration], groups: Sequence[Sequence[str]]) -> Definition:
        """The same with more demonstrations (under new ids) in blocks of their own behind the others."""
        found = replace(
            self,
            demonstrations={**self.demonstrations, **{item.id: item for item in items}},
            groups=(*self.groups, *(tuple(group) for group in groups)),
        )
        # Not found again from all of them: an append must not become slower as a pool grows.
        vars(found)["labels"] = tuple(dict.fromkeys((*self.labels, *(item.output for item in items))))
        return found

    def extends(self, other: Definition) -> bool:
        """Whether it is `other` with blocks behind it: what is known of `other`'s blocks holds here too."""
        return (
            (self.options, self.deleted) == (other.options, other.deleted)
            and len(self.groups) >= len(other.groups)
            and all(map(operator.is_, self.groups, other.groups))
        )

    def live(self) -> list[Demonstration]:
        """Demonstrations that were not deleted."""
        return [item for id, item in self.demonstrations.items() if id not in self.deleted]

    @cached_property
    def gone(self) -> NDArray[np.bool_]:
        """[demonstrations] whether each was deleted, in the order of the blocks."""
        return np.array([id in self.deleted for group in self.groups for id in group], dtype=np.bool_)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Different outputs of the live demonstrations, in order of first appearance."""
        return tuple(dict.fromkeys(item.output for item in self.live()))

    def block_text(self, group: Sequence[str]) -> str:
        """What retrievers index of a block."""
        return self.options.separator.join(self.example_text(id) for id in group if id not in self.deleted)

    def example_text(self, id: str) -> str:
        """What retrievers index of a demonstration."""
        item = self.demonstrations[id]
        return self.options.render(item.input, item.output)

    def dump(self) -> JsonObject:
        """JSON-like; `load` reads it back."""
        return {
            "options": vars(self.options).copy(),
            "demonstrations": [
                {"id": item.id, "input": item.input, "output": item.output} for item in self.demonstrations.values()
            ],
            "groups": [list(group) for group in self.groups],
            "deleted": sorted(self.deleted),
        }

    @classmethod
    def load(cls, data: Options) -> Definition:
        """What `dump` gave.

        Raises:
            ValueError: (KeyError and TypeError where something is missing or of another type) it is something else.
        """
        items = {item.id: item for item in parse_demonstrations(data["demonstrations"])}
        groups = tuple(tuple(group) for group in data["groups"])
        grouped = [id for group in groups for id in group]
        if len(grouped) != len(set(grouped)) or set(grouped) != set(items) or not all(groups):
            raise ValueError("groups: expected every demonstration's id in one block")
        deleted = frozenset(data["deleted"])
        if not deleted < set(items):
            raise ValueError("deleted: expected ids of demonstrations, not of all of them")
        return cls(PoolOptions.parse(data["options"]), items, groups, deleted)


@dataclass(eq=False)
class HeaderUse:
    """How often a header of requests' own is used.

    Attributes:
        users: requests in flight on it.
        requests: those that began on it, the ones in flight among them.
    """

    users: int = 0
    requests: int = 0


@dataclass(eq=False)
class Version:
    """One state of a pool that requests can be served from. It lives until the last request on it has ended.

    Attributes:
        number: counts up with every change of the pool.
        definition: what it serves.
        layouts: blocks by variant: `completion`, `chat` once a chat request came, and one for each header of requests'
            own.
        headers: how often each variant behind a header of requests' own is used, the one longest not used first.
        users: requests in flight on it.
        requests: those that began on it, the ones in flight among them.
        retired: a newer version took its place, or the pool was deleted.
        tenant: whose pool it is; "" where it is no tenant's.
        resident: variants whose blocks are known to be held in the KV cache; others are looked up before use.
        label_tokens: tokens of the labels, by what stands before and behind each (`serving.labels`).
    """

    name: str
    number: int
    definition: Definition
    layouts: dict[str, Layout] = field(default_factory=dict)
    headers: dict[str, HeaderUse] = field(default_factory=dict)
    users: int = 0
    requests: int = 0
    retired: bool = False
    resident: set[str] = field(default_factory=set)
    label_tokens: dict[tuple[str, str], LabelTokens] = field(default_factory=dict)
    tenant: str = ""
    owner: str = field(default_factory=lambda: f"{POOL_OWNER}{next(_owners)}")
    _retrievers: dict[tuple[str, bool], Retriever] = field(default_factory=dict)

    def pinned(self, variant: str) -> bool:
        """Whether the version holds the blocks of a variant; those behind requests' own headers, requests hold."""
        return self.definition.options.pinned and variant not in self.headers

    @property
    def tokens(self) -> int:
        """Of its blocks, as questions that are no chats read them."""
        return self.layouts[COMPLETION].tokens

    @property
    def sinks(self) -> int:
        """How many first blocks every selection holds."""
        return min(self.definition.options.sink_blocks, len(self.definition.groups))

    def has_retriever(self, options: RequestOptions) -> bool:
        """Whether `retriever` would answer at once."""
        return (options.retriever, options.scores_blocks) in self._retrievers

    def retriever(self, options: RequestOptions, base: Version | None = None) -> Retriever:
        """The retriever a request asks for, built over blocks or examples at its first use.

        Args:
            base: a version that this one extends: its retriever is extended, where there is one that can be.
        """
        key = (options.retriever, options.scores_blocks)
        found = self._retrievers.get(key)
        if found is None:
            definition = self.definition
            before = base._retrievers.get(key) if base is not None and definition.extends(base.definition) else None
            extended = getattr(before, "extended", None)
            groups = definition.groups
            if base is not None and extended is not None:
                groups = groups[len(base.definition.groups) :]
            if options.scores_blocks:
                texts = [definition.block_text(group) for group in groups]
            else:
                ids = (id for group in groups for id in group)
                texts = ["" if id in definition.deleted else definition.example_text(id) for id in ids]
            found = extended(texts) if extended else registry.get(options.retriever).build(texts)
            others = [each for each in list(self._retrievers) if each != DEFAULT_RETRIEVER]
            while key != DEFAULT_RETRIEVER and len(others) >= MAX_RETRIEVERS:
                self._retrievers.pop(others.pop(0), None)  # clients choose the names: "random:1", "random:2", ...
            self._retrievers[key] = found
        return found
