"""`sglang-ext bench drafts`: rounds and gains, its rows, what it refuses, and a study in a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_ext.launch import cli
from sglang_ext.launch.bench import drafts as study
from tests.launch.test_ruler import write_sets

READ = {"exact": 0.1, "kept": 0.4, "recovered": 0.97, "steps": 8}


def test_a_draft_is_right_until_its_first_wrong_token() -> None:
    assert study.common([1, 2, 9, 4], [1, 2, 3, 4, 5]) == 2
    assert study.common([1, 2], [1, 2, 3]) == 2 and study.common([9], [1]) == 0 and study.common([], [1]) == 0


def test_a_round_begins_behind_the_last_ones_tokens() -> None:
    # Drafts of 2 behind tokens 0, 3 and 4: 2 accepted and 1 given, none accepted and 1 given, then the last token.
    assert study.rounds([5, 9, 9, 0, 1], 2) == [2, 0, 1]
    assert study.rounds([0, 0, 0], 4) == [0, 0, 0] and study.rounds([8] * 10, 8) == [8, 8]


def test_gains_count_the_drafts_and_one_dense_step() -> None:
    assert study.gain(4, 4, 0.25) == pytest.approx(5 / 2) and study.gain(0, 4, 0.25) == pytest.approx(0.5)
    longest = study.longest_step(3.2, 4, 1.6)
    assert study.gain(3.2, 4, longest) == pytest.approx(1.6)
    assert study.longest_step(0.5, 2, 1.6) < 0, "three tokens of two steps are no 1.6"


def test_rows_have_all_sizes_and_gains_where_steps_are_measured() -> None:
    accepted = ((8,) * 32, (1,) * 32)
    measured = [
        study.Drafts(setting, "a text, 2048 tokens", accepted, READ) for setting in (study.MEASURED, (0.6, 0.2))
    ]
    rows = study.figures(measured, {1: 0.8, 8: 0.4}, 1.6)
    counted = [row for row in rows if "accepted tokens" in row.name]
    assert len(counted) == 2 * len(study.DRAFTED) and len(rows) - len(counted) == 2
    two = next(row for row in counted if "drafts of 2" in row.name)
    assert two.timing.median == 1.5 and two.notes["longest_step"] == pytest.approx(0.5 * (2.5 / 1.6 - 1))
    one, eight = (row for row in rows if row.ratio)
    best = max(study.gain((drafted + 1) / 2, drafted, 0.4) for drafted in study.DRAFTED)
    assert eight.ratio == pytest.approx(best) and eight.met is (best >= 1.6) and one.met is None


def test_the_measured_steps_are_those_of_the_results_file(tmp_path: Path) -> None:
    shares = study.step_shares(study.STEPS)
    assert set(shares) == set(study.BATCHES) and all(0 < share < 1 for share in shares.values())
    (tmp_path / "none.json").write_text(json.dumps({"figures": []}))
    with pytest.raises(ValueError, match="got 0 rows 'time per output token, 1 requests"):
        study.step_shares(tmp_path / "none.json")
    with pytest.raises(ValueError, match="expected a results file"):
        study.step_shares(tmp_path / "missing.json")


@pytest.mark.parametrize("text", ["0.9", "0.5,0.7", "0,0", "a,b", "0.9,0.7,0.1", "1.1,1"])
def test_settings_are_two_shares(text: str) -> None:
    with pytest.raises(ValueError, match="expected P1,P2"):
        study.setting(text)


def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "drafts"]) == cli.BAD_INPUT
    assert "got neither --books nor --data" in capsys.readouterr().err
    assert cli.main(["bench", "drafts", "--prompts", "0"]) == cli.BAD_INPUT
    assert "--prompts 0: expected at least 1" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_engines")
def test_drafts_in_an_engine(tmp_path: Path) -> None:
    out = tmp_path / "drafts.json"
    words = ["bench", "drafts", "--data", write_sets(tmp_path), "--lengths", "1200", "--prompts", "2", "--answer", "3"]
    words += ["--settings", "0.95,0.7", "1,1", "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "sglang_ext.launch.cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record = json.loads(out.read_text())
    assert record["settings"]["lengths"] == [1200] and set(record["settings"]["step_shares"]) == {"1", "8"}
    every = [row for row in record["figures"] if "(1.0, 1.0)" in row["name"]]
    # Whoever reads every token exactly foresees every token: what dense attention writes is what is compared with.
    assert [row["timing"]["low"] for row in every] == [2.0, 4.0, 8.0] and "exact 1.000" in every[0]["name"]
    sparse = next(row for row in record["figures"] if "(0.95, 0.7)" in row["name"])
    assert 0 < sparse["notes"]["attention"]["kept"] < 1 and "accepted tokens" in done.stdout
