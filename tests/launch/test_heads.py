"""sglang-ext heads: scores against the attention maps of the whole prompt, and the file that it writes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sglang_ext.launch import cli, heads
from sglang_ext.launch.bench._reference_reader import ModelReader
from sglang_ext.launch.serve import REFERENCE_MODEL
from sglang_ext.policies.heads import Heads, weights_hash

LENGTH = 150


@pytest.fixture(scope="module")
def reader() -> ModelReader:
    return ModelReader(REFERENCE_MODEL, "cpu")


def test_scores_are_those_of_the_whole_map(reader: ModelReader) -> None:
    """The key is looked for in the prompt's text, and each of its tokens in the row that comes before it."""
    prompt, key = heads.passkey_prompt(reader, LENGTH - 5, 0.25, random.Random(f"{LENGTH} 0 7"))
    answer = reader.encode(key)
    assert len(answer) == 5
    tokens = [*prompt, *answer]
    text = [str(reader.tokenizer.decode([token])) for token in tokens]
    begin = next(at for at in range(len(text)) if "".join(text[at:]).startswith(" The pass key is " + key))
    end = next(at for at in range(begin, len(text)) if "".join(text[begin:at]).endswith("is the pass key."))
    reader.model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = reader.model(torch.tensor([tokens]), output_attentions=True).attentions
    wanted = torch.zeros(len(maps), maps[0].shape[1], dtype=torch.float64)
    for layer, head in [(n, h) for n in range(wanted.shape[0]) for h in range(wanted.shape[1])]:
        for number, token in enumerate(answer):
            place = int(maps[layer][0, head, len(prompt) - 1 + number].argmax())
            wanted[layer, head] += (begin <= place < end and tokens[place] == token) / len(answer)
    found = heads.measure(reader, [LENGTH], depths=2, seeds=[7])
    second = heads.copies(reader, LENGTH, 0.75, random.Random(f"{LENGTH} 1 7")).mean(-1)
    torch.testing.assert_close(found, (wanted + second) / 2, rtol=0, atol=1e-9)
    assert wanted.max() > 0.3 and not torch.equal(wanted, second)


def test_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["heads", str(REFERENCE_MODEL), "--lengths", str(LENGTH), "--depths", "1", "--seeds", "3"]
    assert cli.main([*words, "--device", "cpu", "--out", str(tmp_path)]) == 0
    weights = weights_hash(str(REFERENCE_MODEL))
    (path,) = tmp_path.iterdir()
    found = Heads.load(path)
    assert path.name == f"{weights[:16]}.json" and found.weights == weights
    assert found.measured == {"task": "passkey", "lengths": [LENGTH], "depths": 1, "seeds": [3], "prompts": 1}
    assert f"written: {path}" in capsys.readouterr().out


def test_what_it_refuses(reader: ModelReader, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompts of 99999 tokens: the model's context has 16384"):
        heads.measure(reader, [99_999], 1, [0])
    with pytest.raises(ValueError, match="a passkey prompt of 20 tokens; expected at least 35"):
        heads.measure(reader, [20], 1, [0])
    for words, message in ((["--depths", "0"], "--depths 0"), (["--out", str(tmp_path / "no")], "expected a folder")):
        assert cli.main(["heads", str(REFERENCE_MODEL), *words]) == cli.BAD_INPUT, message


def test_default_lengths() -> None:
    assert heads.default_lengths(16_384) == [2048, 4096, 8192] and heads.default_lengths(131_072) == [8192]
