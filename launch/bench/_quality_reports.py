"""What `attention_report` says of the answers to a task, in a few figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_ext.attention.sparse import DENSE
from sglang_ext.types import JsonObject

REPORT = "attention_report"  # of `sglang_ext.attention.sparse`
SHARES = ("exact", "kept", "approximated_clusters", "recovered")


def attention(reports: Sequence[Sequence[Mapping[str, Sequence[float]] | None]]) -> JsonObject:
    """Means over answers, decoding steps and layers of what `attention_report` says.

    Args:
        reports: of each answer, of each token: name -> a figure a layer; of a dense step its reason (`DENSE`), or
            nothing. The first token of an answer comes from the prompt's pass and is left out.

    Returns:
        Means of `SHARES`, `kept_by_layer`, `recovered_p5` (5th percentile over steps and layers) and
        `recovered_least` (of any head). All 1 where every step was dense.
    """
    steps = [step for report in reports for step in report[1:] if step and DENSE not in step]
    dense = sum(len(report[1:]) for report in reports) - len(steps)
    if not steps:
        return {**dict.fromkeys(SHARES, 1.0), "recovered_p5": 1.0, "recovered_least": 1.0, "dense_steps": dense}
    found: JsonObject = {}
    for name in SHARES:
        values = [value for step in steps for value in step.get(name, ())]
        if values:
            found[name] = sum(values) / len(values)
    layers = range(len(steps[0]["kept"]))
    found["kept_by_layer"] = [sum(step["kept"][layer] for step in steps) / len(steps) for layer in layers]
    recovered = sorted(value for step in steps for value in step["recovered"])
    found["recovered_p5"] = recovered[int(0.05 * len(recovered))]
    found["recovered_least"] = min(value for step in steps for value in step["recovered_least"])
    return {**found, "steps": len(steps), "dense_steps": dense}


def recall(
    reports: Sequence[Sequence[Mapping[str, Sequence[Sequence[int]]] | None]],
    evidence: Sequence[Sequence[int]],
    stored: Sequence[int],
) -> JsonObject:
    """How much of what a question asks for each layer got back.

    Args:
        reports: `attention_report` of each answer; the first entry says which blocks each layer got back.
        evidence: of each answer, the blocks that hold what its question asks for.
        stored: of each answer, how many blocks had left the window; those of the evidence that had not are seen anyway.

    Returns:
        `layers`: mean over answers of the share of the evidence's blocks, a figure a layer; `answers`: how many, with
        evidence that had left the window. No layers where there are none.
    """
    shares = []
    for report, blocks, count in zip(reports, evidence, stored, strict=True):
        gone, first = {block for block in blocks if block < count}, report[0] if report else None
        if gone and first:
            shares.append([len(gone.intersection(found)) / len(gone) for found in first["blocks"]])
    layers = [sum(each) / len(shares) for each in zip(*shares, strict=True)]
    return {"layers": [round(share, 4) for share in layers], "answers": len(shares)}
