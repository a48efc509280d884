"""The search for the most likely of a pool's labels, down the tree of their tokens. Pure functions, no server.

The log-probability of a label is the sum of those of its tokens, none of which is above 0: no label is more likely than
its beginning. So a beginning that is no more likely than the best whole label so far is not followed any further, and
what is found is the most likely label of all.

A pass computes some beginnings as branches behind the prompt (`cache.rows.Row.own`), a column for each token, and says
how likely every token is that may follow each. So the last tokens of labels are never computed, and where few labels
remain, one pass is all it takes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_ext.cache.rows import NewBlock
from sglang_ext.serving.label_tree import Tree

COMPUTED_AT_ONCE = 64
"""Tokens of labels in one pass. So few hardly lengthen it: a pass over a question has as many."""
WORTH_A_LOOK = 4.0
"""Nats below the likeliest beginning: one that is less likely waits for the next pass, and hardly ever needs it."""
MOST_VALUES = 1 << 14
"""Log-probabilities that one pass returns: they are Python objects on their way through SGLang's processes."""


@dataclass
class SearchPass:
    """What one pass computes and returns.

    Attributes:
        nodes: of the tree, whose next tokens' log-probabilities it is to find; parents come first.
        columns: of each node of the row, its column behind the prompt, counted from 1; the root is the prompt's last
            token (0).
        token_ids: of the columns from 1 on.
        blocks: the branches that these are.
        asked: the tokens whose log-probability is to be returned of what follows each column.
    """

    nodes: list[int]
    columns: dict[int, int] = field(default_factory=lambda: {0: 0})
    token_ids: list[int] = field(default_factory=list)
    blocks: list[NewBlock] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)


class Search:
    """Which nodes of a tree are computed next, and the best sequence so far.

    Args:
        tree: of the labels' tokens.

    Attributes:
        best: the node at which the most likely sequence so far ends, or None.
        score: its log-probability, in nats.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._ends = set(tree.ends.values())
        self._sums = {0: 0.0}
        self._open = {0} if tree.children[0] else set()
        self.best: int | None = None
        self.score = float("-inf")
        self._found(0)

    def level(self, position: int, most: int) -> SearchPass | None:
        """What to compute next; None when the best sequence is known.

        Args:
            position: of the first token behind the prompt.
            most: columns of the row; one sequence of the tree may need more.
        """
        self._open = {node for node in self._open if self._sums[node] > self.score}
        if not self._open:
            return None
        chosen = self._whole(most) if self._open == {0} else self._likely(most)
        return _row(self._tree, chosen, position)

    def learn(self, level: SearchPass, own: Sequence[float], asked: Sequence[Mapping[int, float]]) -> None:
        """Take in what a pass has found.

        Args:
            own: of each column, the log-probability of its token behind the column before it; the first says nothing.
            asked: of each column, the log-probabilities of `level.asked` behind it.

        Raises:
            RuntimeError: one of them is no finite number: nothing could be said of what is likely.
        """
        for node in level.nodes:
            column = level.columns[node]
            for token, child in self._tree.children[node].items():
                value = own[column + 1] if level.columns.get(child) == column + 1 else asked[column][token]
                if not math.isfinite(value):
                    raise RuntimeError(f"the model gives token {token} of a label the log-probability {value}")
                self._sums[child] = self._sums[node] + value
                if self._tree.children[child]:
                    self._open.add(child)
                self._found(child)
        self._open.difference_update(level.nodes)

    def _found(self, node: int) -> None:
        if node in self._ends and (self.best is None or self._sums[node] > self.score):
            self.best, self.score = node, self._sums[node]

    def _whole(self, most: int) -> list[int]:
        """All of a small tree; else the root, for nothing says yet where to look."""
        inner = self._tree.inner
        if len(inner) > most + 1:  # the root is there already
            return [0]
        following = {token for node in inner for token in self._tree.children[node]}
        return [*inner] if len(inner) * len(following) <= MOST_VALUES else [0]

    def _likely(self, most: int) -> list[int]:
        """The likeliest beginnings, each with what follows it, as many as there is room for; one at least."""
        chosen: list[int] = []
        row: set[int] = {0}
        following: set[int] = set()
        for node in self._downwards():
            added = [each for each in _path(self._tree, node) if each not in row]
            values = (len(row) + len(added)) * len(following.union(self._tree.children[node]))
            if chosen and (len(row) + len(added) > most + 1 or values > MOST_VALUES):
                break
            chosen.append(node)
            row.update(added)
            following.update(self._tree.children[node])
        return chosen

    def _downwards(self) -> Iterator[int]:
        """Nodes that others follow: the likeliest open one and all below it, level by level, then the next one."""
        least = max(self._sums[node] for node in self._open) - WORTH_A_LOOK
        worth = [node for node in self._open if self._sums[node] >= least]
        for first in sorted(worth, key=lambda node: (-self._sums[node], node)):
            waiting = deque([first])
            while waiting:
                node = waiting.popleft()
                yield node
                waiting.extend(child for child in self._tree.children[node].values() if self._tree.children[child])


def _path(tree: Tree, node: int) -> list[int]:
    """The nodes from below the root to `node`."""
    found = []
    while node:
        found.append(node)
        node = tree.parents[node]
    return found[::-1]


def _row(tree: Tree, nodes: Iterable[int], position: int) -> SearchPass:
    """Branches for nodes and what they follow: each is a run of the row's nodes without a fork."""
    level = SearchPass(sorted(nodes))
    below: dict[int, list[int]] = {}
    known = {0}
    for node in level.nodes:
        for each in _path(tree, node):
            if each not in known:
                known.add(each)
                below.setdefault(tree.parents[each], []).append(each)
    # (first node of the branch, the branches above with their positions, position)
    waiting: list[tuple[int, tuple[tuple[int, int], ...], int]] = [
        (child, (), position) for child in reversed(below.get(0, []))
    ]
    while waiting:
        first, above, at = waiting.pop()
        chain = [first]
        while len(following := below.get(chain[-1], [])) == 1:
            chain.extend(following)
        for node in chain:
            level.token_ids.append(tree.tokens[node])
            level.columns[node] = len(level.token_ids)
        level.blocks.append(NewBlock(f"branch:{len(level.blocks)}", len(chain), at, above))
        further = (*above, (len(level.blocks) - 1, at))
        waiting.extend((child, further, at + len(chain)) for child in reversed(following))
    asked = {
        token
        for node in level.nodes
        for token, child in tree.children[node].items()
        if level.columns.get(child) != level.columns[node] + 1
    }
    level.asked = sorted(asked)
    return level
