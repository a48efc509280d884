"""The search for the most likely label: it finds what scoring every label finds, and computes less."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from sglang_ext.attention.branches import _visible, branch_positions
from sglang_ext.cache.rows import Row
from sglang_ext.serving.label_search import MOST_VALUES, Search, SearchPass
from sglang_ext.serving.label_tree import Tree
from sglang_ext.serving.likely import Whole

PROMPT = (90, 91, 92)


class Model:
    """A model over a few tokens that looks at everything before a token, at its place.

    ``spread`` is how far logits lie apart: with none, every token is as likely as every other.
    """

    def __init__(self, seed: int, alphabet: int, spread: float) -> None:
        self.seed, self.alphabet, self.spread = seed, alphabet, spread

    def behind(self, path: Sequence[int]) -> list[float]:
        dice = random.Random(f"{self.seed} {list(path)}")
        logits = [dice.random() * self.spread for _ in range(self.alphabet)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    def score(self, sequence: Sequence[int]) -> float:
        return sum(self.behind([*PROMPT, *sequence[:at]])[token] for at, token in enumerate(sequence))

    def computed(self, level: SearchPass) -> tuple[list[float], list[Mapping[int, float]]]:
        """What a pass returns, from what its branches say they see and where they stand."""
        row = Row((), tuple(level.blocks), own=len(PROMPT))
        count = len(level.token_ids)
        assert sum(block.tokens for block in level.blocks) == count
        mask, positions = _visible(row), branch_positions(row, len(PROMPT), len(PROMPT) + count)
        paths = [list(PROMPT)]
        for column in range(count):
            seen = sorted(np.flatnonzero(mask[column]), key=lambda place: positions[place])
            assert [positions[place] for place in seen] == list(range(len(PROMPT), positions[column] + 1))
            paths.append([*PROMPT, *(level.token_ids[place] for place in seen)])
        tables = [self.behind(path) for path in paths]
        own = [0.0, *(tables[at][token] for at, token in enumerate(level.token_ids))]
        return own, [{token: table[token] for token in level.asked} for table in tables]


def run(
    sequences: Sequence[tuple[int, ...]], model: Model, most: int
) -> tuple[Search, tuple[int, ...], list[SearchPass]]:
    tree = Tree.of(sorted(set(sequences)))
    search, levels = Search(tree), []
    while (level := search.level(len(PROMPT), most)) is not None:
        search.learn(level, *model.computed(level))
        levels.append(level)
    (best,) = [sequence for sequence, end in tree.ends.items() if end == search.best]
    return search, best, levels


def labels(seed: int, count: int, alphabet: int, longest: int, shortest: int = 1) -> list[tuple[int, ...]]:
    dice = random.Random(seed)
    return [tuple(dice.randrange(alphabet) for _ in range(dice.randint(shortest, longest))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most", [1, 3, 16, 1000])
@pytest.mark.parametrize("spread", [0.0, 2.0, 20.0])
def test_it_finds_what_scoring_every_label_finds(seed: int, most: int, spread: float) -> None:
    listed = labels(seed, 2 + 20 * seed, 2 + seed, 7)
    model = Model(seed, 2 + seed, spread)
    search, best, _ = run(listed, model, most)
    highest = max(map(model.score, listed))
    assert best in listed and search.score == pytest.approx(highest) == model.score(best)


def test_no_beginning_is_computed_twice_but_to_go_on_from() -> None:
    listed = labels(3, 120, 4, 6, shortest=5)
    _, _, levels = run(listed, Model(3, 4, 1.0), 8)
    nodes = [node for level in levels for node in level.nodes]
    assert len(nodes) == len(set(nodes)) and len(levels) > 3
    for level in levels:
        assert len(level.token_ids) <= 8 or len(level.nodes) == 1


def test_the_more_certain_a_model_is_the_less_is_computed() -> None:
    listed = [(number // 100, number // 10 % 10, number % 10, 0) for number in range(1000)]
    sure, unsure = (run(listed, Model(1, 10, spread), 16)[2] for spread in (40.0, 0.5))
    computed = [sum(len(level.token_ids) for level in levels) for levels in (sure, unsure)]
    assert len(sure) < len(unsure) and 2 * computed[0] < computed[1]


def test_beginnings_that_are_far_less_likely_are_not_computed_beside_the_likeliest() -> None:
    class Sure(Model):
        def behind(self, path: Sequence[int]) -> list[float]:
            rest = -10.0 if path[-1] == PROMPT[-1] else -1.0
            return [-1e-3, *[rest] * (self.alphabet - 1)]

    listed = [(first, second, third) for first in range(30) for second in range(3) for third in range(2)]
    _, best, (root, likely) = run(listed, Sure(1, 30, 0.0), 64)
    assert best == (0, 0, 0) and root.nodes == [0] and likely.token_ids == [0, 0, 1, 2]


def test_a_small_tree_is_one_pass_without_the_labels_last_tokens() -> None:
    listed = [(1, 2, 0), (1, 3, 0), (2, 0)]
    _, _, levels = run(listed, Model(1, 4, 1.0), 4)
    assert [sorted(level.token_ids) for level in levels] == [[1, 2, 2, 3]]
    _, _, (first, *_) = run(listed, Model(1, 4, 1.0), 3)
    assert first.token_ids == [] and first.blocks == [] and first.asked == [1, 2]


def test_a_pass_returns_no_more_than_may_travel() -> None:
    listed = [(1, 2, number) for number in range(3000)] + [(1, 3, number, 5) for number in range(3000)]
    _, _, levels = run(listed, Model(2, 3000, 3.0), 64)
    assert all(len(level.asked) * (1 + len(level.token_ids)) <= MOST_VALUES for level in levels if len(level.nodes) > 1)


def test_labels_without_tokens_and_one_alone() -> None:
    model = Model(1, 4, 1.0)
    assert run([()], model, 8)[1:] == ((), [])
    assert run([(), (1,)], model, 8)[1:] == ((), [])  # nothing is more likely than what is certain
    assert run([(1, 2, 3)], model, 8)[1] == (1, 2, 3)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_no_number_is_no_likely_label(value: float) -> None:
    class Broken(Model):
        def behind(self, path: Sequence[int]) -> list[float]:
            return [value] * self.alphabet

    with pytest.raises(RuntimeError, match=f"of a label the log-probability {value}"):
        run([(1, 2, 0), (2, 0)], Broken(1, 4, 1.0), 1)


def test_the_label_takes_the_place_of_the_one_token() -> None:
    whole = Whole(" card", (7, 8, 9), "\n\n")
    item = {"text": "x", "output_ids": [5], "meta_info": {"finish_reason": {"type": "length"}, "completion_tokens": 1}}
    whole.put(item)
    assert item == {
        "text": " card",
        "output_ids": [7, 8, 9],
        "meta_info": {"finish_reason": {"type": "stop", "matched": "\n\n"}, "completion_tokens": 3},
    }
    for reason in (None, {"type": "abort", "message": "gone"}):
        left = {"text": "x", "output_ids": [5], "meta_info": {"finish_reason": reason}}
        whole.put(left)
        assert left == {"text": "x", "output_ids": [5], "meta_info": {"finish_reason": reason}}
