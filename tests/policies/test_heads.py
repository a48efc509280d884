"""Files of retrieval heads: what is written is read, and another model's is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ext.launch.serve import REFERENCE_MODEL
from sglang_ext.policies import heads
from sglang_ext.policies.heads import FORMAT, Heads, shipped, weights_hash

SCORES = ((0.0, 0.1), (0.25, 0.5), (0.3, 0.3))
FOUND = Heads("model", "f" * 64, SCORES, {"lengths": [1024], "seeds": [0]})


def test_a_layer_s_best_head_votes_if_it_is_one(tmp_path: Path) -> None:
    assert FOUND.voters == {1: (1, 0.5), 2: (0, 0.3)}, "0.1 is not above 0.1; of equals the first"
    FOUND.save(tmp_path / "heads.json")
    assert Heads.load(tmp_path / "heads.json") == FOUND
    FOUND.check(tmp_path, "f" * 64, layers=3, heads=2)
    Heads("chosen", "", SCORES, {}).check(tmp_path, "0" * 64, layers=3, heads=2)


@pytest.mark.parametrize(
    ("weights", "layers", "number", "message"),
    [
        ("0" * 64, 3, 2, "is of model .weights ffffffffffff., and the server.s model has the weights 000000000000"),
        ("f" * 64, 4, 2, "has 3 layers of 2 heads; the model has 4 layers of 2 heads"),
        ("f" * 64, 3, 8, "has 3 layers of 2 heads; the model has 3 layers of 8 heads"),
    ],
)
def test_another_model_is_refused(weights: str, layers: int, number: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FOUND.check(Path("heads.json"), weights, layers, number)


def test_no_retrieval_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the best head scores 0.1, and a retrieval head scores above 0.1"):
        Heads("model", "", ((0.1, 0.0),), {}).check(Path("heads.json"), "", layers=1, heads=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; sglang-ext heads MODEL writes one"),
        ("{", "expected JSON"),
        ("[]", "expected a file of sglang-ext heads"),
        (json.dumps({"format": "another"}), "expected a file of sglang-ext heads"),
        (json.dumps({"format": FORMAT, "scores": []}), "expected a list of numbers from 0 to 1 for each layer"),
        (json.dumps({"format": FORMAT, "scores": [[0.5], []]}), "expected a list of numbers"),
        (json.dumps({"format": FORMAT, "scores": [[1.5]]}), "expected a list of numbers"),
        (json.dumps({"format": FORMAT, "scores": [[True]]}), "expected a list of numbers"),
    ],
)
def test_what_is_no_heads_file(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Heads.load(path)


def test_the_hash_is_of_the_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"expected files of weights .* found none"):
        weights_hash(str(folder))
    path = folder / "model.safetensors"
    path.write_bytes(bytes(range(256)) * 1024)
    whole = weights_hash(str(folder))
    (folder / "config.json").write_text("{}")
    assert weights_hash(str(folder)) == weights_hash(str(path)) == whole
    monkeypatch.setattr(heads, "_WHOLE", 1024)
    monkeypatch.setattr(heads, "_PIECE", 64)
    pieces = weights_hash(str(folder))
    assert pieces != whole
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(bytes(changed))
    assert weights_hash(str(folder)) != pieces
    with pytest.raises(ValueError, match="expected a folder with weights, or a model that is downloaded"):
        weights_hash("nobody/has-this-model")


def test_the_embedded_model_has_a_file() -> None:
    weights = weights_hash(str(REFERENCE_MODEL))
    path = shipped(weights)
    assert path is not None
    found, config = Heads.load(path), json.loads((REFERENCE_MODEL / "config.json").read_text())
    found.check(path, weights, config["num_hidden_layers"], config["num_attention_heads"])
    assert found.measured["lengths"] and found.measured["seeds"] and len(found.voters) >= 3
    assert shipped("0" * 64) is None
