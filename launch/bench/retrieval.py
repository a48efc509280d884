"""``sglang-ext bench retrieval``: what retrievers find in real demonstrations, without a model or a server.

A *draw* is some classes of a set, a pool of their training texts that fills so many tokens, and test texts of these
classes, as in `bench quality --suite dbsa`. *Gold* demonstrations of a question are those with its label. For each
retriever there are six rows, beside the first retriever's over the same draws:

- of the 5 best examples, the share that is gold;
- of the gold examples, the share among the best 30% of the examples;
- of the gold examples, the share in the best 30% of the blocks, the sink block among these;
- of the 5 best examples, the share in these blocks;
- the same two of blocks that are scored by their whole texts (`block_score: text`).

Shares are means over the questions of a draw; means and intervals are over draws.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sglang_ext.config import DEFAULT_RATIO, PoolOptions
from sglang_ext.launch.bench._draws import ANALYZED, draw
from sglang_ext.launch.bench._quality_figures import mean_and_error, share
from sglang_ext.launch.bench._record import Figure, json_file, save, table
from sglang_ext.launch.bench.reference import MODEL
from sglang_ext.launch.demo_data import DemoTask
from sglang_ext.launch.reference.corpus import read_rows
from sglang_ext.retrievers.grouping import group
from sglang_ext.retrievers.registry import get
from sglang_ext.retrievers.selection import block_scores, budget, select, starts_of

if TYPE_CHECKING:
    from sglang_ext.names import Tokenizer

NEAREST = 5
MEASURES = (
    f"gold ones among the {NEAREST} best examples",
    f"gold ones found in {DEFAULT_RATIO:.0%} of the examples",
    f"gold ones found in {DEFAULT_RATIO:.0%} of the blocks",
    f"of the {NEAREST} best examples those in {DEFAULT_RATIO:.0%} of the blocks",
    f"gold ones found in {DEFAULT_RATIO:.0%} of the blocks by their whole texts",
    f"of the {NEAREST} best examples those in {DEFAULT_RATIO:.0%} of the blocks by their whole texts",
)
SETS = ("banking77", "clinc150", "nlu", "trec", "trec_fine")
SETTINGS = ("labels", "queries", "draws", "block_size", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, metavar="FOLDER", help="folder of the classification sets")
    parser.add_argument("--sets", nargs="+", default=list(SETS), metavar="NAME", help="folders of --data")
    parser.add_argument(
        "--retrievers",
        nargs="+",
        default=["bm25", *ANALYZED],
        metavar="NAME",
        help=f"names in the registry, the first is compared with (default: bm25 {' '.join(ANALYZED)})",
    )
    parser.add_argument(
        "--pool-tokens", type=int, nargs="+", default=[4000], metavar="N", help="of pools (default: 4000)"
    )
    parser.add_argument("--labels", type=int, default=16, help="classes of a draw at most, 0: all (default: 16)")
    parser.add_argument("--draws", type=int, default=20, help="of each set and size (default: 20)")
    parser.add_argument("--queries", type=int, default=100, help="of a draw at most (default: 100)")
    parser.add_argument("--block-size", type=int, default=10, help="demonstrations a block (default: 10)")
    parser.add_argument("--model", default=str(MODEL), help="folder of the tokenizer (default: the embedded model)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")
    parser.add_argument("--out", type=json_file, help="file for the results (default: none is written)")


def gold_shares(
    task: DemoTask, retrievers: Sequence[str], block_size: int, tokenizer: Tokenizer
) -> dict[str, tuple[float, ...]]:
    """Retriever -> `MEASURES` of a draw.

    Raises:
        ValueError: an unknown retriever, or one that cannot be built.
    """
    options = PoolOptions(block_size=block_size)
    examples = [options.render(each["input"], each["output"]) for each in task.demonstrations]
    lengths = [len(ids) for ids in tokenizer(examples, add_special_tokens=False)["input_ids"]]
    groups = group(examples, lengths, block_size, options.grouping, options.seed)
    blocks = [options.separator.join(examples[at] for at in members) for members in groups]
    numbers, starts = [at for members in groups for at in members], starts_of([len(members) for members in groups])
    sinks = min(options.sink_blocks, len(blocks))
    few = budget(DEFAULT_RATIO, total=len(examples), sinks=0)
    few_blocks = budget(DEFAULT_RATIO, total=len(blocks), sinks=sinks)
    found = {}
    for name in retrievers:
        by_example, by_block = (get(name).build(texts) for texts in (examples, blocks))
        shares = []
        for query in task.queries:
            gold = {at for at, each in enumerate(task.demonstrations) if each["output"] == query["output"]}
            scores = by_example.score(query["input"])
            nearest = select(scores, min(NEAREST, len(examples)), 0)
            own = [len(gold.intersection(nearest)) / len(nearest)]
            own.append(len(gold.intersection(select(scores, few, 0))) / len(gold))
            of_blocks = (block_scores(scores[numbers], starts), by_block.score(query["input"]))
            for each in of_blocks:
                read = {at for block in select(each, few_blocks, sinks) for at in groups[block]}
                own += [len(gold & read) / len(gold), len(read.intersection(nearest)) / len(nearest)]
            shares.append(tuple(own))
        found[name] = tuple(statistics.fmean(each) for each in zip(*shares, strict=True))
    return found


def figures(title: str, draws: Sequence[dict[str, tuple[float, ...]]]) -> list[Figure]:
    """A row for each measure and retriever, beside the first retriever's.

    Args:
        title: what was drawn from.
        draws: `gold_shares` of each draw.
    """
    rows, (first, *others) = [], draws[0]
    for at, measure in enumerate(MEASURES):
        theirs = [each[first][at] for each in draws]
        rows.append(Figure(f"{title}, {measure}, {first}", share(theirs), unit="share"))
        for name in others:
            ours = [each[name][at] for each in draws]
            mean, error = mean_and_error([own - other for own, other in zip(ours, theirs, strict=True)])
            words = f"{title}, {measure}, {name}; {100 * mean:+.1f} points, standard error {100 * error:.1f}"
            notes = {"difference": mean, "difference_error": error}
            ratio = statistics.fmean(ours) / statistics.fmean(theirs) if any(theirs) else None
            rows.append(Figure(words, share(ours), first, share(theirs), ratio, unit="share", notes=notes))
    return rows


def _draws(name: str, size: int, args: argparse.Namespace, tokenizer: Tokenizer) -> Iterable[DemoTask]:
    """Draws of a set that has fewer classes than `--labels` are of all of them; no model is asked that knows some."""
    own = copy.copy(args)
    own.model = None
    if args.labels >= len({label for _, label in read_rows(args.data, name, "train")}):
        own.labels = 0
    return (draw(name, size, number, own, tokenizer) for number in range(args.draws))


def main(args: argparse.Namespace) -> int:
    """Measure, print the table, and write it where `--out` says.

    Raises:
        ValueError: a number below 1, an unknown retriever, or a set that is not there.
    """
    from transformers import AutoTokenizer

    for name in ("draws", "queries", "block_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1")
    for name in args.retrievers:
        get(name)
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = []
    for name in args.sets:
        for size in args.pool_tokens:
            measured = [
                gold_shares(task, args.retrievers, args.block_size, tokenizer)
                for task in _draws(name, size, args, tokenizer)
            ]
            rows += figures(f"{name}, pools of {size} tokens", measured)
    print(table(rows))
    if args.out:
        settings = {name: getattr(args, name) for name in SETTINGS}
        save(args.out, rows, commit=args.commit, settings=settings)
        print(f"written: {args.out}")
    return 0
