"""The engine's half of `sglang-ext bench double_p`: planted prompts and weights, the rows, and what is not compared."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.launch.bench import _double_p_engine as engine
from sglang_ext.launch.bench import _double_p_planted as planted
from sglang_ext.launch.bench import _double_p_rows as rows_of
from sglang_ext.launch.bench import double_p
from sglang_ext.launch.bench._record import Timing, at_most, table
from sglang_ext.launch.bench._shapes import SHAPES, write_model
from sglang_ext.launch.bench._turns import Process
from sglang_ext.policies.double_p import DoubleP


def test_prompts_have_a_kind_of_token_for_each_cluster() -> None:
    config = DoubleP(segment=1024, append=256)
    ids = planted.prompt_ids(2500, 100_000, config, 3)
    assert len(ids) == 2500 and ids == planted.prompt_ids(2500, 100_000, config, 3)
    assert ids != planted.prompt_ids(2500, 100_000, config, 4)
    for low, high in [(4, 1024), (1024, 2048), (2048, 2436)]:
        part = ids[low:high]
        count = math.ceil(len(part) / 16)
        assert len(set(part)) == count
        assert len({part[n * len(part) // count] for n in range(count)}) == count, "k-means begins with each kind once"
        assert {part.count(kind) for kind in part} <= {15, 16}


@pytest.mark.parametrize("name", list(rows_of.LEVELS))
def test_planted_weights_make_the_level(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `transformers`' Llama with SGLang's kind of random weights: keys of one size, logits as the level says."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], **sizes, "vocab_size": 2000})
    write_model(tmp_path, "tiny", 4096)
    level = rows_of.LEVELS[name]
    planted.planted_weights(tmp_path, level)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-planted.DUMMY, planted.DUMMY)
        names = load_file(tmp_path / "model.safetensors")
        assert not model.load_state_dict(names, strict=False).unexpected_keys
        seen: dict[str, torch.Tensor] = {}
        for which in ("q_proj", "k_proj"):
            module = getattr(model.model.layers[1].self_attn, which)
            module.register_forward_hook(lambda *x, which=which: seen.update({which: x[2][0]}))
        ids = torch.arange(2000).unsqueeze(0)
        model(ids)
    query, key = (seen[which].unflatten(-1, (-1, 64)).transpose(0, 1) for which in ("q_proj", "k_proj"))
    still = torch.zeros(64, dtype=torch.bool)
    still[22:32] = still[54:64] = True
    assert not key[..., ~still].any() and not query[..., ~still].any()
    assert float(key[..., still].std()) == pytest.approx(1, rel=0.1)
    x = torch.einsum("hgqd,hkd->hgqk", query.unflatten(0, (2, 4)), key) * 64**-0.5
    assert float(x.std()) == pytest.approx(level.deviation, rel=0.1)
    one, other = x[:, 0].flatten(), x[:, 1].flatten()
    assert float(torch.corrcoef(torch.stack([one, other]))[0, 1]) == pytest.approx(level.shared, abs=0.1)


def test_later_levels_keep_the_keys(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found = []
    for keys in (True, False):
        write_model(tmp_path / str(keys), "tiny", 512)
        planted.planted_weights(tmp_path / str(keys), rows_of.LEVELS["flat"], keys=keys)
        found.append(load_file(tmp_path / str(keys) / "model.safetensors"))
    first, later = found
    assert {name for name in first if name not in later} == {name for name in first if "k_proj" in name}
    assert all(torch.equal(first[name], weight) for name, weight in later.items())


def turn(seconds: float, cached: int = 999) -> dict[str, Any]:
    return {"seconds": seconds, "short": {"cached": [cached] * 8}, "long": {"cached": [999] * 8}}


RAW: dict[str, Any] = {
    "rows": 8,
    "length": 1000,
    "tokens": 256,
    "together": False,
    "stock backend": "flashinfer",
    "stock": {"decode": [turn(0.0195)], "prefill": [9.0, 4.0, 4.0]},
    "ours": {
        "decode": {"peaked": [turn(0.0078)]},
        "selected": {"peaked": [{"rows": 8.0, "exact_tokens": 0.06, "approximated_clusters": 0.33}]},
        "prefill": [9.0, 4.1, 4.1],
    },
    "clustering": {
        "seconds": [0.1], "layers": 32, "tokens": 900, "summary_bytes": 7, "allocated_bytes": 8, "kv_bytes": 100,
    },
}  # fmt: skip


def test_rows() -> None:
    token, prefill, clusters, memory = engine.compare(RAW)
    assert (token.ratio, token.aim, token.met) == (pytest.approx(2.5), "at least 2.4x", True)
    assert "peaked planted keys, 0.06 exact, 0.33 by centroid" in token.name and "8 requests" in token.name
    assert token.notes["order"] == "one engine after the other"
    assert prefill.ratio == pytest.approx(4 / 4.1), "the first prompt is not counted"
    assert (clusters.ratio, clusters.met) == (pytest.approx(0.025), True)
    assert (memory.ratio, memory.met, memory.unit) == (pytest.approx(0.07), True, "MiB")
    assert memory.notes["allocated_share"] == 0.08


def test_a_server_that_drafts_has_rows_of_rounds() -> None:
    whole, *_ = engine.compare({**RAW, "drafted": 8})
    words = "a round of 8 drafts and their verification, which gives 1 to 9 tokens, 8 requests of 1000 tokens"
    assert whole.name.startswith(words) and whole.floor_of == "a step, which gives one, stock SGLang on flashinfer"
    assert whole.aim == "" and whole.ratio == pytest.approx(0.0078 / 0.0195), "so many tokens must hold"


@pytest.mark.parametrize(("rounds", "seconds"), [((2, 12), 0.05), ((0, 0), 0.025)])
def test_a_turn_is_per_round_where_there_are_rounds(rounds: tuple[int, int], seconds: float) -> None:
    answers = iter({"seconds": each, "rounds": rounds[n], "cached": [9]} for n, each in enumerate((1.0, 1.5)))
    process: Any = SimpleNamespace(name="ours", ask=lambda *_, **__: next(answers))
    assert engine._turn(process, 20, 8)["seconds"] == pytest.approx(seconds)


def test_batches_have_rows_of_their_own() -> None:
    raw = copy.deepcopy(RAW)
    raw["stock"]["decode"].append({**turn(0.006), "rows": 1})
    raw["ours"]["decode"]["peaked"].append({**turn(0.005), "rows": 1})
    raw["ours"]["selected"]["peaked"].append({"rows": 1.0, "exact_tokens": 0.1, "approximated_clusters": 0.2})
    eight, one, *_ = engine.compare(raw)
    assert (eight.ratio, eight.aim) == (pytest.approx(2.5), "at least 2.4x")
    assert (one.ratio, one.aim) == (pytest.approx(1.2), "") and "1 requests of 1000" in one.name
    assert one.notes["exact"] == 0.1 and one.timing.samples == 1


def test_each_row_has_the_fastest_of_the_stock_engines() -> None:
    one = RAW["stock"]
    other = {"decode": [turn(0.0156)], "prefill": [9.0, 5.0, 5.0]}
    raw = {name: value for name, value in RAW.items() if name != "stock backend"}
    token, prefill, *_ = engine.compare({**raw, "stock": {"flashinfer": one, "fa3": other}})
    assert token.ratio == pytest.approx(2) and token.baseline == "stock SGLang on fa3"
    assert token.notes["seconds of others"] == {"flashinfer": 0.0195}
    assert prefill.ratio == pytest.approx(4 / 4.1) and prefill.baseline == "stock SGLang on flashinfer"


def test_nothing_is_compared_that_was_prefilled_again() -> None:
    raw = copy.deepcopy(RAW)
    raw["stock"]["decode"].append(turn(0.0195, cached=0))
    with pytest.raises(ValueError, match="expected all but the last token"):
        engine.compare(raw)


@pytest.mark.parametrize("selected", [{}, {"rows": 7.0, "exact_tokens": 0.06, "approximated_clusters": 0.33}])
def test_nothing_is_compared_that_did_not_read_clusters(selected: dict[str, float]) -> None:
    raw = copy.deepcopy(RAW)
    raw["ours"]["decode"]["peaked"].append(turn(0.0078))
    raw["ours"]["selected"]["peaked"].append(selected)
    with pytest.raises(ValueError, match="level peaked"):
        engine.compare(raw)


def test_an_engine_that_fails_is_said_to() -> None:
    with pytest.raises(RuntimeError, match="the stock engine failed"):
        Process("stock", engine.__name__, ["--options", "{}"], {}).wait()


def test_levels_of_the_command_line_are_those_of_the_kernels() -> None:
    assert tuple(rows_of.LEVELS) == double_p.LEVELS == tuple(engine.TIME_AIM)


def test_sizes_are_shown_in_their_unit() -> None:
    row = at_most("clusters", Timing.of([2.0**20]), 2.0**24, "keys", 0.08, unit="MiB")
    assert "| clusters | 1 MiB (1 run) | floor, keys: 16 MiB | 0.0625x | at most 0.08x | yes |" in table([row])
