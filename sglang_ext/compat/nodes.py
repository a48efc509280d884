"""Nodes of SGLang's radix tree: the path to one, and the KV slots on it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import TreeNode


def tree_nodes(last: Any) -> tuple[tuple[TreeNode, ...], tuple[TreeNode, ...]]:
    """The nodes of the radix tree that hold the beginning of a scheduler request's row, as it was last stored.

    Args:
        last: the request's `last_node`.

    Returns:
        (nodes of the distinct blocks that it is stitched from, in the order of their first use; nodes of the request's
        own tokens from the root down).
    """
    blocks, node = getattr(last, "members", ()), getattr(last, "tail", last)
    path: list[TreeNode] = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return blocks, tuple(reversed(path))


def node_begin(node: TreeNode) -> int:
    """How many tokens lie before a node on its path from the root."""
    before, parent = 0, node.parent
    while parent is not None and parent.parent is not None:
        before += len(parent.key)
        parent = parent.parent
    return before


def path_slots(node: TreeNode, begin: int, end: int) -> torch.Tensor:
    """[end - begin] KV slots of tokens [begin, end) of the path from the root down to `node`, which has them all."""
    parts: list[torch.Tensor] = []
    first, part = node_begin(node), node
    while True:
        parts.append(part.value[max(0, begin - first) : max(0, end - first)])
        if begin >= first:
            return torch.cat(parts[::-1])
        part = part.parent
        first -= len(part.key)
