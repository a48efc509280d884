"""Servers as users start them on a machine without a GPU: Triton is there, and nothing may ask it for a kernel.

All other tests run in Triton's interpreter, which hides where SGLang launches a kernel of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.config import DRAFTING
from tests.e2e import commands
from tests.models.architectures import HYBRID
from tests.oracle import models

PROMPTS = (20, 90, 150)
POLICY = {"window": 12, "min_tokens": 32, "cluster": 4, "segment": 64, "append": 16}
PROGRAM = """
import json, sys

def main():
    from sglang_ext import Engine

    engine = Engine(**json.loads(sys.argv[1]))
    params = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    prompts = [[10 + 7 * i % 300 for i in range(length)] for length in json.loads(sys.argv[2])]
    print("ANSWERS", json.dumps([engine.generate(input_ids=each, sampling_params=params)["output_ids"]
                                 for each in prompts]), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    main()
"""

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a server on a GPU has kernels"),
]


def answers(folder: Path, **options: Any) -> list[list[int]]:
    """What an engine of our own process, without the interpreter, answers to `PROMPTS`."""
    options = {"dtype": "float32", "max_total_tokens": 2000, "max_running_requests": 4, "log_level": "error"} | options
    given = {"model_path": str(folder), "attention_backend": "double_p", "policy": POLICY, **options}
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", PROGRAM, json.dumps(given), json.dumps(PROMPTS)]
    done = subprocess.run(words, env=env | commands.forking(), capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    assert lines, done.stdout + done.stderr
    found: list[list[int]] = json.loads(lines[0].removeprefix("ANSWERS"))
    return found


def dense(folder: Path) -> list[list[int]]:
    """What `transformers` answers."""
    model, found = models.load_model(folder), []
    for length in PROMPTS:
        tokens = [10 + 7 * i % 300 for i in range(length)]
        for _ in range(20):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        found.append(tokens[length:])
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.mark.parametrize("page_size", [1, 16])
def test_drafting(llama: Path, page_size: int) -> None:
    drafts = {"speculative_algorithm": DRAFTING, "page_size": page_size}
    assert answers(llama, **drafts) == dense(llama)


def test_pages(llama: Path) -> None:
    everything = {**POLICY, "p1": 1, "p2": 1}
    assert answers(llama, page_size=16, policy=everything) == dense(llama)


def test_a_model_whose_layers_keep_a_state(tmp_path: Path) -> None:
    folder = HYBRID[0].save(tmp_path)
    assert answers(folder, policy={**POLICY, "p1": 1, "p2": 1}) == dense(folder)
