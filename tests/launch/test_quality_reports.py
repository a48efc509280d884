"""What `attention_report` says of the answers to a task, in the figures of the quality studies."""

from __future__ import annotations

import pytest

from sglang_ext.launch.bench import _quality_reports as reports


def test_what_was_read_is_averaged_over_steps_and_layers() -> None:
    def step(kept: float, least: float) -> dict[str, list[float]]:
        return {"exact": [0.1, 0.3], "kept": [kept, 0.5], "recovered": [0.8, 1.0], "recovered_least": [least, 0.9]}

    found = reports.attention([[None, step(0.2, 0.3), step(0.4, 0.6)], [None, {}, step(0.6, 0.7)]])
    assert found["exact"] == pytest.approx(0.2) and found["kept"] == pytest.approx(0.45)
    assert found["kept_by_layer"] == pytest.approx([0.4, 0.5])
    assert (found["recovered_least"], found["steps"], found["dense_steps"]) == (0.3, 3, 1)
    assert reports.attention([[None, {}]])["kept"] == 1.0
    said = reports.attention([[{"dense": "of the prompt"}, {"dense": "no clusters yet"}, step(0.2, 0.3)]])
    assert (said["steps"], said["dense_steps"], said["kept_by_layer"]) == (1, 1, [0.2, 0.5])


def test_recall_is_a_share_of_the_evidence_that_has_left_the_window() -> None:
    said = [
        [{"blocks": [[3, 4], [9], []]}],
        [{"blocks": [[5], [6, 5], [1]]}],
        [{"blocks": [[8], [8], [8]]}],
        [None],
        [],
    ]
    evidence = [[3, 9], [5, 6, 7], [8], [1], [1]]
    found = reports.recall(said, evidence, [10, 7, 8, 9, 9])
    assert found == {"layers": [0.5, 0.75, 0.0], "answers": 2}, (
        "block 7 of the second is in the window, and all of the third"
    )
