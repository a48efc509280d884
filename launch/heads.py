"""sglang-ext heads MODEL: find a model's retrieval heads, by which Ltri-LLM votes.

It hides a needle, a pass key, in filler text of several lengths and at several depths, and has the model repeat the
key. At each token of the key, a head scores if it attends most to that very token in the needle. A head's score is its
share of all tokens of all keys (Wu et al., 2024). The key is forced: a model that would say another one is measured,
too.

It writes one file named by a hash of the weights, with every head's score. A server takes it by
--attention-backend ltri --policy '{"heads": "FILE"}'.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_ext.launch.bench._reference_reader import ModelReader
from sglang_ext.launch.bench.reference import NEEDLE, passkey_prompt
from sglang_ext.launch.output import table
from sglang_ext.policies.heads import LEAST, Heads, weights_hash


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model's folder or name")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="of prompts (default: an eighth, a quarter and half of the model's context, up to 8192)",
    )
    parser.add_argument("--depths", type=int, default=10, help="places of the needle, evenly spread (default: 10)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of keys (default: 0 1 2)")
    parser.add_argument("--device", help="where to compute (default: a GPU where there is one)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the file (default: this one)")


def main(args: argparse.Namespace) -> int:
    if args.depths < 1:
        raise ValueError(f"--depths {args.depths}: expected at least 1")
    if not args.out.is_dir():
        raise ValueError(f"--out {args.out}: expected a folder that is there")
    weights = weights_hash(args.model)
    reader = ModelReader(args.model, args.device)
    lengths = args.lengths or default_lengths(reader.context)
    found = measure(reader, lengths, args.depths, args.seeds)
    prompts = len(lengths) * args.depths * len(args.seeds)
    measured = {"task": "passkey", "lengths": lengths, "depths": args.depths, "seeds": args.seeds, "prompts": prompts}
    scores = tuple(tuple(round(score, 4) for score in row) for row in found.tolist())
    heads = Heads(Path(args.model).name, weights, scores, measured)
    path = args.out / f"{weights[:16]}.json"
    heads.save(path)
    above = int((found > LEAST).sum())
    print(table(["layer", "head", "score"], [[n, head, score] for n, (head, score) in heads.voters.items()]))
    print(f"{above} of {found.numel()} heads score above {LEAST}; {len(heads.voters)} of {len(scores)} layers vote")
    print(f"written: {path}")
    return 0


def default_lengths(context: int) -> list[int]:
    """An eighth, a quarter and half of a context, up to 8,192 tokens."""
    return sorted({min(context // part, 8192) for part in (8, 4, 2)})


def measure(reader: ModelReader, lengths: Sequence[int], depths: int, seeds: Sequence[int]) -> torch.Tensor:
    """[layers, heads] float64: the score of every head.

    Args:
        reader: the model.
        lengths: tokens of the prompts.
        depths: at how many depths each of them has its needle.
        seeds: one prompt for each length, depth and seed.

    Raises:
        ValueError: a length is beyond the model's context, or too short for the needle.
    """
    longest = max(lengths)
    if longest > reader.context:
        raise ValueError(f"prompts of {longest} tokens: the model's context has {reader.context}")
    reader.model.set_attn_implementation("sdpa")
    hits, tokens = torch.zeros(0), 0
    for length in lengths:
        for number in range(depths):
            for seed in seeds:
                rng = random.Random(f"{length} {number} {seed}")
                copied = copies(reader, length, (number + 0.5) / depths, rng)
                hits = copied.sum(-1) if not tokens else hits + copied.sum(-1)
                tokens += copied.shape[-1]
    return hits / tokens


@torch.no_grad()
def copies(reader: ModelReader, length: int, depth: float, rng: random.Random) -> torch.Tensor:
    """Which heads attend most to the token that comes next, in the needle.

    Args:
        reader: the model.
        length: tokens of the prompt with its key.
        depth: of the needle, from 0 to 1.
        rng: chooses the key.

    Returns:
        [layers, heads, tokens of the key] float64, 1 where a head does.
    """
    state = rng.getstate()
    _, key = passkey_prompt(reader, length, depth, rng)
    answer = reader.encode(key)
    rng.setstate(state)
    prompt, _ = passkey_prompt(reader, length - len(answer), depth, rng)
    needle = reader.encode(NEEDLE.format(key=key))
    begin = next(at for at in range(len(prompt)) if prompt[at : at + len(needle)] == needle)
    cache = reader.prefill(prompt[:-1])
    rows = torch.tensor([[prompt[-1], *answer[:-1]]], device=reader.device)
    reader.model.set_attn_implementation("eager")  # the others do not say what they attend to
    try:
        maps = reader.model(rows, past_key_values=cache, output_attentions=True).attentions
    finally:
        reader.model.set_attn_implementation("sdpa")
    first = torch.stack([each[0].argmax(-1) for each in maps]).cpu()  # [layers, heads, tokens]
    tokens = torch.tensor([*prompt, *answer])
    inside = (first >= begin) & (first < begin + len(needle))
    return (inside & (tokens[first] == torch.tensor(answer))).double()
