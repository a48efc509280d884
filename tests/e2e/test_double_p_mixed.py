"""Double-P on a model most of whose layers have a sliding window (Gemma 3), in the real engine on the CPU.

The oracle is that of `test_double_p.py`: clusters in the layers that attend to the whole context, windows in the
others. Windows are shorter than what is clustered, so that an answer which took a layer for one of the other kind
shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext import lines
from tests.e2e.test_double_p import (
    POLICY,
    SPARSE,
    TOLERANCE,
    WINDOW,
    Served,
    check_everything,
    check_steps,
    prompt_of,
    runs_of,
    serving,
)
from tests.models.architectures import MIXED
from tests.oracle import models

pytestmark = pytest.mark.skipif(
    not lines.at_least("0.5.17"), reason="SGLang 0.5.16 builds this model to attend in both directions: refused by name"
)

SLIDING, LAYERS = 24, 3
GEMMA = next(each for each in MIXED if each.name == "Gemma 3, text")


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Served]:
    fields = {**GEMMA.fields, "sliding_window": SLIDING}
    folder: Path = replace(GEMMA, fields=fields).save(tmp_path_factory.mktemp("model"))
    with serving(folder, attention_backend="double_p", max_total_tokens=1500) as running:
        yield running


def test_p_of_one_is_the_model_s_own_attention(served: Served) -> None:
    """Beside a dense request and a short one; prompts of one chunk, of several, and behind a known prefix."""
    check_everything(served, cached=206)


def test_a_step_is_the_paper_s_in_layers_without_a_window(served: Served) -> None:
    served.empty()
    check_steps(served)


def test_a_prefix_keeps_its_clusters(served: Served) -> None:
    served.empty()
    prompt = prompt_of(150, 30)
    served.generate([prompt], SPARSE)
    longer = [*prompt, *prompt_of(52, 31)]
    (meta,) = served.generate([longer], SPARSE)
    assert meta["cached_tokens"] == 150
    runs = [*runs_of(150), *runs_of(202, begin=150 - WINDOW)]
    assert served.plain(longer, meta, runs, **SPARSE) < TOLERANCE
    assert served.plain(longer, meta, runs_of(202), **SPARSE) > 10 * TOLERANCE


def test_clusters_and_reports_are_those_of_the_layers_that_are_read(served: Served) -> None:
    served.empty()
    (meta,) = served.generate([prompt_of(140, 6)], {**SPARSE, "attention_report": True})
    for step in meta["attention_report"][1:]:
        assert {len(figures) for figures in step.values()} == {1}, f"one of {LAYERS} layers has no window"
        assert 0 < step["recovered_least"][0] < 1
    stats = served.stats()
    heads, width, runs = 2, GEMMA.fields["head_dim"], [run.end - run.begin for run in runs_of(140)]
    clusters = sum(-(-tokens // POLICY["cluster"]) for tokens in runs)
    # Of one layer: centroids and mean values in float32, sizes in 4 bytes, labels in 2.
    assert stats["cluster_bytes"] == heads * (clusters * (2 * width * 4 + 4) + sum(runs) * 2)


def test_there_are_no_pools(served: Served) -> None:
    words = "2 of 3 layers of this server's model have sliding windows.*--attention-backend double_p"
    with pytest.raises(ValueError, match=words):
        served.engine.create_pool("p", models.demonstrations(8))
    with pytest.raises(ValueError, match=words):
        served.engine.plan_pool(models.demonstrations(8))
    with pytest.raises(ValueError, match="'p'"):
        served.generate([prompt_of(20, 1)], {"pool": "p"})
    assert served.engine.pools() == []
