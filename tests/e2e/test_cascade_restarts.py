"""StreamingLLM and a cascade without overlap scheduling, computed anew in the middle of their answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ext.settings import SETTINGS_ENV
from tests.e2e.streams import (
    CASCADES,
    STREAMING,
    TOLERANCE,
    TURNS,
    converse,
    deviation,
    prompt_of,
    retract_often,
    save,
    sequence,
    serving,
)
from tests.oracle.streams import streaming_llm


def test_without_overlap_and_retracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`streaming_llm` by name; SGLang's own test of retraction computes prompt and answer anew, as one prompt.

    Conversations are open to all on this engine: turns bring no keys.
    """
    monkeypatch.setenv(SETTINGS_ENV, json.dumps({"open_conversations": True}))
    retract_often(monkeypatch)
    with serving(save(tmp_path), attention_backend="streaming_llm", disable_overlap_schedule=True) as served:
        prompts = [prompt_of(length, length) for length in (20, 75, 130)]
        variants = [({}, STREAMING), ({"cascades": 4}, CASCADES), ({}, STREAMING)]
        answers = served.generate(prompts, [options for options, _ in variants])
        assert sum(answer["meta_info"].get("num_retractions", 0) for answer in answers) > 0
        for prompt, answer, (_, sizes) in zip(prompts, answers, variants, strict=True):
            tokens = sequence(prompt, answer)
            alone = sizes.cascades == 1
            table = streaming_llm(served.model, tokens, sizes) if alone else served.cascades.log_probs(tokens, sizes)
            assert deviation(prompt, answer, table) <= TOLERANCE
        served.idle()
        assert "conversation_key" not in converse(served, "a", {}, STREAMING, TURNS[:3])
        converse(served, "b", {"cascades": 4}, CASCADES, TURNS[:2])
        # What a turn has changed cannot be taken back: one that is retracted ends, and so does its conversation.
        both = [{"conversation": "a", "continue": True}, {"conversation": "b", "continue": True, "cascades": 4}]
        outcomes = served.together([prompt_of(20, 1), prompt_of(20, 2)], both)
        (error,) = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert "cannot be continued" in str(error)
        served.idle()
        assert served.stats()["conversations"] == 1
