"""The study `--suite book`: perplexity along texts that are read from their beginning to their end.

It is Table 1 and Figure 14 of the cascading KV cache's paper, over books that the user names. All methods but the first
see as many tokens: StreamingLLM and cascades their window, InfLLM's index and Ltri-LLM a smaller one and the blocks
that they retrieve. Dense attention reads a text in pieces that fit the model's context, and begins anew with each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_ext.launch.bench._quality_engine import Method, cascade_methods
from sglang_ext.launch.bench._quality_ltri import PAPERS, RETRIEVED
from sglang_ext.launch.bench._quality_tasks import BLOCK
from sglang_ext.launch.bench._record import Curve
from sglang_ext.types import JsonObject

PART = 65_536
"""Tokens of a part whose perplexity is a figure of its own."""
PLOTTED = ("dense", "streaming_llm", "cascade-2", "cascade-4", "cascade-8", "ltri-max")
LEFT_OUT = ("dense-window", *(f"cascade-4-{what}" for what in ("every-2", "every-4", "every-8", "together", "max")))
"""Of the methods of `--suite cascade`."""


def book_methods(window: int, stride: int, sinks: int, context: int, heads: str | None) -> dict[str, Method]:
    """Dense attention in pieces, StreamingLLM, cascades with and without selection, InfLLM's index and Ltri-LLM.

    Args:
        window: tokens that a stream sees beside its sinks.
        stride: of cascades; the chunk of Ltri-LLM.
        sinks: of a stream.
        context: of the model.
        heads: `Ltri.heads`.
    """
    found = {
        name: each for name, each in cascade_methods(window, stride, sinks, context).items() if name not in LEFT_OUT
    }
    local = window - RETRIEVED * BLOCK
    if local < stride:  # too small a window for one that retrieves
        return found
    sizes = {"sinks": sinks, "window": local, "block": BLOCK, "chunk": stride, "retrieved": RETRIEVED}
    found["infllm"] = Method("InfLLM", "infllm", sizes)
    for changed in (PAPERS, {"similarity": "max"}, {"similarity": "mass"}):
        policy = {**sizes, "four_bits": False, **changed, **({"heads": heads} if heads else {})}
        found[f"ltri-{changed['similarity']}"] = Method(f"Ltri-LLM, {changed['similarity']}", "ltri", policy)
    return found


def aim(mine: JsonObject, streaming_llm: JsonObject) -> tuple[str, bool]:
    """What is aimed at for a cascade with selection, in words, and whether it is met."""
    pairs = zip(mine["bins"]["all"], streaming_llm["bins"]["all"], strict=True)
    return "below StreamingLLM in every part", all(ours < theirs for ours, theirs in pairs)


def curves(methods: Mapping[str, Method], measured: Sequence[JsonObject]) -> list[Curve]:
    """Perplexity of each part, a plot for each book."""
    drawn = []
    for task in dict.fromkeys(each["task"] for each in measured):
        found = {each["method"]: each for each in measured if each["task"] == task}
        series = {
            methods[name].title: [
                (float(found[name]["bin"] * (at + 1)), value) for at, value in enumerate(found[name]["bins"]["all"])
            ]
            for name in PLOTTED
            if name in found
        }
        if series:
            drawn.append(Curve(task, "tokens read", "perplexity of a part", series))
    return drawn
