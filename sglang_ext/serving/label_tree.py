"""The tree of labels' tokens, and rows of branches that compute it. Pure functions, no server.

A row of branches (`cache.rows.Row.own`) holds the tree in depth-first order. A branch is a run of the tree without a
fork. Its first column repeats the token before it, because SGLang gives the log-probability of each token of a prompt
with the column before it. So the last token of a branch that forks stands only at the beginning of each branch below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from sglang_ext.cache.rows import NewBlock


@dataclass(frozen=True)
class LabelTokens:
    """Tokens of each label with what ends it, in the order of the labels, and of their tree."""

    token_ids: tuple[tuple[int, ...], ...]
    tree_tokens: int

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]]) -> LabelTokens:
        found = tuple(map(tuple, token_ids))
        return cls(found, tree_tokens(sorted(found)))

    @cached_property
    def tree(self) -> Tree:
        """Of all labels; some seconds for a million tokens."""
        return Tree.of(sorted(set(self.token_ids)))


@dataclass
class Tree:
    """Token sequences, with what several of them begin with once. Node 0 is the root, which stands before them all.

    Attributes:
        tokens: of each node; the root has none (-1).
        parents: of each node, the number of the one before it, which is lower; the root is its own.
        children: of each node, token -> number of the node that follows with it.
        ends: sequence -> the node it ends at.
    """

    tokens: list[int] = field(default_factory=lambda: [-1])
    parents: list[int] = field(default_factory=lambda: [0])
    children: list[dict[int, int]] = field(default_factory=lambda: [{}])
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, ...]]) -> Tree:
        found = cls()
        for sequence in sequences:
            node = 0
            for token in sequence:
                known = found.children[node].get(token)
                if known is None:
                    known = found.children[node][token] = len(found.tokens)
                    found.tokens.append(token)
                    found.parents.append(node)
                    found.children.append({})
                node = known
            found.ends[sequence] = node
        return found

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Nodes that others follow, the root among them."""
        return tuple(node for node, children in enumerate(self.children) if children)


def tree_tokens(ordered: Sequence[Sequence[int]]) -> int:
    """Tokens of the tree of sorted sequences: a beginning that several share counts once."""
    if not ordered:
        return 0
    return len(ordered[0]) + sum(len(after) - _common(before, after) for before, after in pairwise(ordered))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        shared += 1
    return shared


@dataclass
class Branches:
    """A row's branches behind a prompt.

    Attributes:
        token_ids: of the branches' columns, one branch after the other.
        blocks: the branches.
        columns: of each token of the tree, the column whose log-probability is its own; the root has none (0).
        parents: of each token of the tree, the number of the one before it; the root is its own.
        ends: sequence -> the tree's token it ends at.
    """

    token_ids: list[int] = field(default_factory=list)
    blocks: list[NewBlock] = field(default_factory=list)
    columns: list[int] = field(default_factory=lambda: [0])
    parents: list[int] = field(default_factory=lambda: [0])
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)

    def scores(self, values: Sequence[float]) -> dict[tuple[int, ...], float]:
        """Sum of the log-probabilities of each sequence.

        Args:
            values: of each column, the log-probability of its token given those before it in the row.
        """
        sums = [0.0] * len(self.columns)
        for number in range(1, len(sums)):  # a token comes after its parent
            sums[number] = sums[self.parents[number]] + values[self.columns[number]]
        return {sequence: sums[end] for sequence, end in self.ends.items()}


def branches(sequences: Sequence[tuple[int, ...]], last: int, position: int) -> Branches:
    """The branches of a tree of token sequences.

    Args:
        last: the prompt's last token, which the first branches begin with.
        position: its position.
    """
    tree = Tree.of(sequences)
    tokens, children = [last, *tree.tokens[1:]], tree.children
    found = Branches(columns=[0] * len(tokens), parents=tree.parents, ends=tree.ends)
    # (the token before the branch, its first token, the branches above with their positions, position)
    waiting: list[tuple[int, int, tuple[tuple[int, int], ...], int]] = [
        (0, child, (), position) for child in reversed(children[0].values())
    ]
    while waiting:
        before, node, above, at = waiting.pop()
        begin, chain = len(found.token_ids), [node]
        while len(children[chain[-1]]) == 1:
            chain.extend(children[chain[-1]].values())
        forks = list(children[chain[-1]].values())
        for place, each in enumerate(chain, 1):
            found.columns[each] = begin + place
        written = [tokens[before], *(tokens[each] for each in (chain[:-1] if forks else chain))]
        found.blocks.append(NewBlock(f"branch:{len(found.blocks)}", len(written), at, above))
        found.token_ids.extend(written)
        below = (*above, (len(found.blocks) - 1, at))
        waiting.extend((chain[-1], child, below, at + len(written)) for child in reversed(forks))
    return found


def cut(sequences: Sequence[tuple[int, ...]], limit: int) -> Iterator[list[tuple[int, ...]]]:
    """Sorted sequences in groups whose trees have at most `limit` tokens, and at least one sequence each."""
    group: list[tuple[int, ...]] = []
    tokens = 0
    for sequence in sequences:
        added = len(sequence) - (_common(group[-1], sequence) if group else 0)
        if group and tokens + added > limit:
            yield group
            group, tokens, added = [], 0, len(sequence)
        group.append(sequence)
        tokens += added
    if group:
        yield group
