"""A baseline of Double-P as attention backend of a real server: chosen by name, set by request, refused with 400."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_ext.config import POLICY_ENV
from tests.e2e.server import Server, answer_logprobs, answer_tokens, error_of, model
from tests.oracle import models

POLICY = {"sink": 2, "window": 6, "min_tokens": 48, "page": 4}
PROMPT = torch.randint(50, 380, (150,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.timeout(300)
def test_a_baseline_serves() -> None:
    """Twilight stands for those that choose tokens; those that choose clusters share Double-P's code."""
    env = {POLICY_ENV: json.dumps(POLICY)}
    everything, little, nonsense = {"budget": 1, "p": 1}, {"p": 0.5}, {"p": 7}
    folder = model("llama")
    with Server(
        folder, env=env, attention_backend="twilight", max_total_tokens=2000, chunked_prefill_size=80
    ) as server:
        all_read = server.generate(PROMPT, **everything, attention_report=True)
        some_read = server.generate(PROMPT, **little, attention_report=True)
        oracle = models.load_model(folder)
        with torch.no_grad():
            logits = oracle(torch.tensor([PROMPT + answer_tokens(all_read)])).logits[0, len(PROMPT) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer_tokens(all_read))[:, None])[:, 0]
        assert torch.allclose(torch.tensor(answer_logprobs(all_read)), expected, rtol=0, atol=1e-5)
        assert answer_logprobs(server.generate(PROMPT, dense=True)) == pytest.approx(expected.tolist(), abs=1e-5)

        steps = [answer["meta_info"]["attention_report"][1:] for answer in (all_read, some_read)]
        assert all(step["kept"] == [1.0] * 3 for step in steps[0])
        assert all(max(step["kept"]) < 0.7 and max(step["recovered"]) < 1 for step in steps[1])
        assert answer_logprobs(some_read) != pytest.approx(expected.tolist(), abs=1e-3)

        body = server.payload(PROMPT, **nonsense)
        refused = server.call("POST", "/generate", json=body)
        assert refused.status_code == 400 and "p=7: expected 0 < p <= 1" in error_of(refused)
        openai = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "custom_params": nonsense}
        refused = server.call("POST", "/v1/completions", json=openai)
        assert refused.status_code == 400 and "p=7: expected 0 < p <= 1" in error_of(refused)
        assert not server.faults()
