"""What the radix tree of blocks is made with: a path of stitched nodes, hooks of nodes, and what may be missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sglang_ext.compat import TreeNode


class NodeHooks(Protocol):
    """What may be attached to tree nodes by a policy (cluster summaries, host copies, ...)."""

    def on_insert(self, node: TreeNode) -> None:
        """`node` is new in the tree."""

    def on_split(self, head: TreeNode, tail: TreeNode) -> None:
        """A node was cut in two; `head` is new and holds the first `len(head.key)` tokens."""

    def on_evict(self, node: TreeNode) -> None:
        """`node` leaves the tree; its slots are free."""

    def on_reset(self) -> None:
        """The whole tree was emptied."""


class StitchNode:
    """Stands for the nodes a stitched prefix is made of, wherever SGLang keeps one `last_node`."""

    __slots__ = ("members", "tail")

    def __init__(self, members: Iterable[TreeNode], tail: TreeNode) -> None:
        self.members = tuple(members)
        self.tail = tail

    @property
    def backuped(self) -> bool:
        return False


class MissingBlocks(RuntimeError):
    """Blocks a request needs are not in the tree."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(f"{len(keys)} demonstration blocks are not in the KV cache: {', '.join(keys[:4])}")
        self.keys = keys


class StitchTooShort(RuntimeError):
    """A request's cached prefix would have to end inside its stitched blocks."""
