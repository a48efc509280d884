"""Pools and questions that are drawn from real classification sets."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.launch.bench.reference import MODEL
from sglang_ext.launch.demo import fill
from sglang_ext.launch.demo_data import DemoTask, Example, take_turns
from sglang_ext.launch.reference.corpus import TRAINING_SETS, held_out_classes, read_rows

if TYPE_CHECKING:
    from sglang_ext.names import Tokenizer

ANALYZED = ("bm25:stem", "bm25:stop_words", "bm25:stem+stop_words")
"""Retrievers that are compared with BM25 over words as they are."""


def draw(name: str, pool_tokens: int, number: int, args: argparse.Namespace, tokenizer: Tokenizer) -> DemoTask:
    """Draw some classes of a set, demonstrations of them that fill a pool, and as many questions as `--queries` says.

    Demonstrations have their classes in turn, so that few of a class are missing, and are shuffled then. The embedded
    model is asked for classes that its training did not see.

    Args:
        name: of the set, a folder of `args.data`.
        pool_tokens: of the pool, at most.
        number: of the draw.
        args: `data`, `seed`, `labels` (0: all classes), `queries`, and `model`, or None where no model is asked.
        tokenizer: counts the pool's tokens.

    Raises:
        ValueError: the set has fewer classes than `--labels`.
    """
    dice = random.Random(f"{args.seed} {name} {pool_tokens} {number}")
    train, test = read_rows(args.data, name, "train"), read_rows(args.data, name, "test")
    labels = sorted({label for _, label in train})
    if args.model is not None and Path(args.model) == MODEL and name in TRAINING_SETS:
        labels = sorted(held_out_classes(labels))
    if args.labels > len(labels):
        raise ValueError(f"--labels {args.labels}: {name} has {len(labels)} classes; expected at most so many, or 0")
    chosen = set(dice.sample(labels, args.labels or len(labels)))

    def examples(rows: Sequence[tuple[str, str]]) -> list[Example]:
        kept = [{"input": text, "output": label.replace("_", " ")} for text, label in rows if label in chosen]
        return dice.sample(kept, len(kept))

    pool = fill(take_turns(examples(train)), tokenizer, pool_tokens)
    dice.shuffle(pool)
    shown = {each["output"] for each in pool}
    asked = examples(test)
    possible = [each for each in asked if each["output"] in shown]
    return DemoTask(name, pool, possible[: args.queries], len(asked) - len(possible))
