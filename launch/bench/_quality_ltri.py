"""The methods of the study `--suite ltri`, what is aimed at, and which of them stand together in a plot."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_ext.launch.bench._quality_engine import ANSWERED, Method
from sglang_ext.launch.bench._quality_tasks import BLOCK, DIGITS, HIDDEN
from sglang_ext.types import JsonObject

RETRIEVED = 16  # blocks that a layer gets back
BEST = ("ltri-max", "ltri-max-four-bits", "ltri-max-4-spans", "ltri-max-4-spans-32-ask")
"""What the aims of the best Ltri-LLM hold for."""
PAPERS: JsonObject = {"similarity": "sum", "asking": "spans", "spans": 4, "vectors": 12}
"""How blocks are found in the paper, where the defaults differ."""
CHANGES: dict[str, JsonObject] = {
    "sum": PAPERS,
    "max": {"similarity": "max"},
    "max, four bits": {"similarity": "max", "four_bits": True},
    "mass": {"similarity": "mass"},
    "mass, 2 queries": {"similarity": "mass", "queries": 2},
    "max, spans ask": {"similarity": "max", "asking": "spans"},
    "max, 32 ask": {"similarity": "max", "askers": 32},
    "max, 4 spans": {"similarity": "max", "spans": 4},
    "max, 4 spans, 32 ask": {"similarity": "max", "spans": 4, "askers": 32},
    **{f"max, {vectors} vectors": {"similarity": "max", "vectors": vectors} for vectors in (12, 24, 48)},
    "max, 4 spans, 12 vectors": {"similarity": "max", "spans": 4, "vectors": 12},
    "sum, all heads": {**PAPERS, "heads": "all"},
    "max, all heads": {"similarity": "max", "heads": "all"},
    "max, preceding votes": {"similarity": "max", "vote": "preceding"},
    "max, no votes": {"similarity": "max", "vote": "off"},
    "max, each token retrieves": {"similarity": "max", "persist": False},
    "max, true distances": {"similarity": "max", "far": True},
    **{f"max, neighbours {ratio}": {"similarity": "max", "ratio": ratio} for ratio in ("col", "rowcol")},
    **{f"max, lambda {rate:g}": {"similarity": "max", "rate": rate, "early_rate": rate} for rate in (0.0, 1.0, 10.0)},
    **{f"max, last {last}": {"similarity": "max", "last": last} for last in (8, 16, 64, 128)},
}
"""What a method is called -> how its settings differ from the defaults; `sum` is the paper's.

All but one keep index vectors in the dtype of the keys, as when most rows were measured; the default is four bits.
"""

PLOTS: dict[str, tuple[str, ...]] = {
    "": ("dense", "streaming_llm", "infllm", "ltri-sum", "ltri-max", "given"),
    "what asks, and votes": (
        "ltri-sum",
        "ltri-max-spans-ask",
        "ltri-max",
        "ltri-max-32-ask",
        "ltri-max-all-heads",
        "ltri-max-no-votes",
    ),
    "what is remembered of a block": ("infllm", "ltri-max", "ltri-max-4-spans", "ltri-max-24-vectors"),
    "lambda and Q": (
        "ltri-max",
        "ltri-max-lambda-0",
        "ltri-max-lambda-10",
        "ltri-max-last-8",
        "ltri-max-last-128",
        "ltri-max-each-token-retrieves",
    ),
}
"""What a plot is about, beside where its keys are hidden -> its lines, six at most."""

RECALLED = ("random", "infllm", "ltri-sum", "ltri-max-4-spans-32-ask", "ltri-max-4-spans", "ltri-max")
"""What is compared by the blocks that its layers get back, six at most."""

LEAST = {
    ("plain", 16_384): 0.95,
    ("plain", 131_072): 0.90,
    ("plain", 1_048_576): 0.80,
    ("named", 16_384): 0.80,
}
"""(where the key is hidden, tokens of the row) -> share of keys that the best Ltri-LLM is to say."""
GIVEN, OF_DENSE, ABOVE = 0.98, 0.70, 0.30


def ltri_methods(
    window: int, chunk: int, sinks: int, context: int, heads: str | None = None, block: int = BLOCK
) -> dict[str, Method]:
    """Dense attention, StreamingLLM with as many visible tokens, InfLLM's index, and Ltri-LLM with its switches.

    All of them but the first see a window, and what they retrieve: 16 blocks. Two say between what retrieval lies:
    blocks at random, and those that hold the evidence, which the request names.

    Args:
        window: tokens that a stream sees beside its sinks.
        chunk: of Ltri-LLM.
        sinks: of a stream.
        context: of the model.
        heads: `Ltri.heads` of Ltri-LLM, but where a method names its own.
        block: tokens of a memory block.
    """
    voting = {"heads": heads} if heads else {}
    sizes = {"sinks": sinks, "window": window, "block": block, "chunk": chunk, "retrieved": RETRIEVED}
    wide = {"sinks": sinks, "window": window + block * RETRIEVED, "stride": chunk}
    found = {
        "dense": Method("dense", "dbsa", reads=context - ANSWERED),
        "streaming_llm": Method("StreamingLLM, as many tokens", "streaming_llm", wide),
        "infllm": Method("InfLLM", "infllm", sizes),
        "mean": Method("mean keys of blocks", "infllm", {**sizes, "index": "mean"}),
        "random": Method("random blocks", "ltri", {**sizes, **voting, "index": "random"}),
        "given": Method("the blocks with the evidence", "ltri", {**sizes, **voting, "index": "given"}),
    }
    for words, changed in CHANGES.items():
        if heads == "all" and changed.get("four_bits"):
            continue  # one head must vote
        name = "ltri-" + words.replace(",", "").replace(" ", "-")
        found[name] = Method(f"Ltri-LLM, {words}", "ltri", {**sizes, **voting, "four_bits": False, **changed})
    return found


def kind_of(task: str) -> str:
    """The one of `HIDDEN` that a task's name says."""
    return next(kind for kind, hidden in HIDDEN.items() if task.startswith(f"{hidden.title}, "))


def aim(
    name: str, measured: Mapping[str, JsonObject], intervals: Mapping[str, tuple[float, float]]
) -> tuple[str, bool | None]:
    """What is aimed at for a method on a task, in words, and whether it is met; empty words where nothing is.

    Args:
        name: of the method.
        measured: method -> its measurement on the task.
        intervals: method -> the ends of its share's 95% interval.
    """
    mine = measured[name]
    kind, length, right = kind_of(mine["task"]), mine["tokens"] + DIGITS, mine["accuracy"]
    if name == "given":
        return f"at least {GIVEN}", right >= GIVEN
    if name == "ltri-sum" and kind == "plain" and "infllm" in measured:
        return "above InfLLM, 95% intervals apart", intervals[name][0] > intervals["infllm"][1]
    if name not in BEST:
        return "", None
    if kind == "texts" and "dense" in measured:
        least = OF_DENSE * measured["dense"]["accuracy"]
        return f"at least {OF_DENSE:.2f} of dense attention's share", right >= least
    if (kind, length) not in LEAST:
        return "", None
    least = LEAST[kind, length]
    if kind == "named" and "infllm" in measured:
        words = f"at least {least:.2f}, and {ABOVE:.2f} above InfLLM"
        return words, right >= least and right - measured["infllm"]["accuracy"] >= ABOVE - 1e-9
    return f"at least {least:.2f}", right >= least
