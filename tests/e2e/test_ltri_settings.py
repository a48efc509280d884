"""Settings of Ltri-LLM in the real engine, one engine for each, against `tests/oracle/ltri.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.policies.heads import Heads, weights_hash
from tests.e2e.streams import TOLERANCE, deviation, prompt_of, save, sequence, serving
from tests.e2e.test_ltri import SIZES, policy_of
from tests.oracle import models
from tests.oracle.ltri import LtriOracle

VARIANTS: tuple[dict[str, Any], ...] = (
    {"similarity": "max", "persist": False, "far": True},
    {"similarity": "mass", "vote": "preceding", "ratio": "rowcol", "sinks": 0},
    {"similarity": "max", "asking": "spans"},
    {"similarity": "max", "askers": 8},
    {"vote": "off", "ratio": "col", "sinks": 11, "block": 4, "last": 16, "retrieved": 5, "theta": 0.6, "phi": 0.3},
    {"retrieved": 0},
    {"index": "mean", "vote": "preceding"},
    {"similarity": "max", "spans": 1, "vectors": 3, "queries": 5},
    {"similarity": "max", "rate": 0.4, "early_rate": 0.0, "early_layers": 2},
)


def log_probs_of(answer: dict[str, Any]) -> torch.Tensor:
    """[tokens] of the answer, each its logarithmic probability."""
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def different(length: int) -> list[int]:
    """A prompt of different tokens: equal ones have equal keys in the first layer, and of blocks that these stand for,
    `max` would choose by float32's rounding."""
    found: list[int] = (50 + torch.randperm(330, generator=torch.Generator().manual_seed(length))[:length]).tolist()
    return found


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: "-".join(map(str, changes.values())))
def test_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    sizes, folder = replace(SIZES, **changes), save(tmp_path)
    prompts = [different(length) for length in (3, 70, 131)]
    with serving(folder, attention_backend="ltri", policy=policy_of(sizes), chunked_prefill_size=64) as served:
        answers = served.generate(prompts, [{}] * len(prompts), 10)
    oracle = LtriOracle(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        table = oracle.log_probs(sequence(prompt, answer), len(prompt), sizes)
        assert deviation(prompt, answer, table) <= TOLERANCE, len(prompt)


HEADS = ((0.1, 0.4, 0.0, 0.2), (0.1, 0.0, 0.0, 0.1), (0.3, 0.2, 0.5, 0.6))


@pytest.mark.parametrize("changes", [{}, {"vote": "preceding"}, {"four_bits": True}], ids=str)
def test_retrieval_heads_vote(changes: dict[str, Any], tmp_path: Path) -> None:
    """The first and the last layer have one each, the one between has none, and gets what the first voted for."""
    folder = save(tmp_path / "model")
    Heads("tiny", weights_hash(str(folder)), HEADS, {}).save(tmp_path / "heads.json")
    sizes = replace(SIZES, heads={0: (1, 0.4), 2: (3, 0.6)}, similarity="max", **changes)
    prompt, oracle = different(131), LtriOracle(folder)
    policy = {**policy_of(sizes), "heads": str(tmp_path / "heads.json")}
    with serving(folder, attention_backend="ltri", policy=policy) as served:
        answer = served.one(prompt, 10)
    table = oracle.log_probs(sequence(prompt, answer), len(prompt), sizes)
    assert deviation(prompt, answer, table) <= TOLERANCE
    other = replace(sizes, heads={0: (3, 0.4), 2: (3, 0.6)})
    assert deviation(prompt, answer, oracle.log_probs(sequence(prompt, answer), len(prompt), other)) > 10 * TOLERANCE


def test_infllm(tmp_path: Path) -> None:
    """By its name: its index, all heads, and no votes."""
    folder = save(tmp_path / "model")
    sizes = replace(SIZES, index="infllm", vote="off")
    prompt, oracle = different(131), LtriOracle(folder)
    policy = {name: value for name, value in policy_of(SIZES).items() if name not in ("index", "vote")}
    with serving(folder, attention_backend="infllm", policy=policy) as served:
        answer = served.one(prompt, 10)
    assert deviation(prompt, answer, oracle.log_probs(sequence(prompt, answer), len(prompt), sizes)) <= TOLERANCE
    for other in (replace(sizes, index="mean"), replace(sizes, vote="inclusive")):
        table = oracle.log_probs(sequence(prompt, answer), len(prompt), other)
        assert deviation(prompt, answer, table) > 10 * TOLERANCE, other


def test_all_blocks_at_true_distances_are_dense_attention(tmp_path: Path) -> None:
    """Named by the request; other requests, which name some or none, see others."""
    folder = save(tmp_path / "model")
    prompt, blocks = prompt_of(115, 7), [*range(40)]
    policy = {**policy_of(SIZES), "index": "given", "far": True, "retrieved": len(blocks)}
    with serving(folder, attention_backend="ltri", policy=policy) as served:
        options: list[dict[str, Any]] = [{"blocks": blocks}, {"blocks": blocks[3:]}, {"blocks": []}, {}]
        answers = served.generate([prompt] * len(options), options, 10)
        with pytest.raises(ValueError, match="expected a list of different numbers, from 0"):
            served.one(prompt, blocks=[1, 1])
    model = models.load_model(folder, torch.float64)
    far = []
    for answer in answers:
        with torch.no_grad():
            logits = model(torch.tensor([sequence(prompt, answer)])).logits[0]
        far.append(deviation(prompt, answer, torch.log_softmax(logits, -1)))
    assert far[0] <= TOLERANCE < 10 * TOLERANCE < min(far[1:]) and abs(far[2] - far[3]) <= TOLERANCE


@pytest.mark.timeout(900)
def test_answers_do_not_depend_on_the_servers_chunks(tmp_path: Path) -> None:
    """`--chunked-prefill-size` below, at and above what is left of a prompt; the policy's own chunk stays 512."""
    folder, found = models.save_model("llama", tmp_path / "model", max_position_embeddings=4096), []
    prompts = [(different(330) * 8)[:length] for length in (2500, 1100, 511)]
    policy = {"sinks": 32, "window": 1024, "block": 32, "retrieved": 4, "similarity": "max"}
    for size in (512, 1024, 4096):
        arguments: dict[str, Any] = {"chunked_prefill_size": size, "max_total_tokens": 12_000}
        with serving(folder, attention_backend="ltri", policy=policy, **arguments) as served:
            alone = served.generate(prompts[:1], [{}], 6)
            together = served.generate(prompts, [{}] * len(prompts), 6)
            assert served.stats()["host_stored_bytes"] > 0
        found.append([*alone, *together])
    for other in found[1:]:
        for answer, same in zip(other, found[0], strict=True):
            assert answer["output_ids"] == same["output_ids"]
            ours, theirs = (log_probs_of(each) for each in (answer, same))
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)  # float32


def test_blocks_at_random(tmp_path: Path) -> None:
    """The same ones each time, so that an answer can be repeated."""
    folder = save(tmp_path / "model")
    prompt = prompt_of(115, 8)
    policy = {**policy_of(SIZES), "index": "random"}
    with serving(folder, attention_backend="ltri", policy=policy) as served:
        first, second = (served.one(prompt, 10) for _ in range(2))
        with pytest.raises(ValueError, match="a server with index=random, which finds blocks itself"):
            served.one(prompt, blocks=[1])
    assert first["output_ids"] == second["output_ids"]
    table = LtriOracle(folder).log_probs(sequence(prompt, first), len(prompt), SIZES)
    assert deviation(prompt, first, table) > 10 * TOLERANCE
