"""`--page-size` above 1 with Double-P: KV slots come in pages, prefixes are found in whole pages, answers stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.settings import POOL_DIR_ENV
from tests.e2e import test_double_p as double_p
from tests.e2e.test_double_p import DENSE, SPARSE, TOLERANCE, Served, generated, prompt_of, runs_of
from tests.oracle import models

PAGE, TOTAL = 16, 1360
PROMPTS = ((49, 0), (100, 4), (206, 2))
"""(tokens, seed): no multiples of a page; the last one is cut into chunks."""

pytestmark = pytest.mark.timeout(600)


@contextmanager
def serving(folder: Path, page_size: int) -> Iterator[Served]:
    """An engine whose accounting of KV slots SGLang checks all the time. One at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")
        patch.delenv(POOL_DIR_ENV, raising=False)
        retracts = {"max_total_tokens": TOTAL, "schedule_conservativeness": 0.1}
        with double_p.serving(folder, attention_backend="double_p", page_size=page_size, **retracts) as running:
            yield running


def sparse(served: Served) -> list[dict[str, Any]]:
    """Answers that read through clusters, one after the other, none of which finds another's prompt."""
    return [served.generate([prompt_of(*each)], SPARSE)[0] for each in PROMPTS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def by_slot(model: Path) -> list[list[int]]:
    """The tokens of `sparse` where each KV slot is given out alone."""
    with serving(model, 1) as served:
        return [generated(meta) for meta in sparse(served)]


@pytest.fixture(scope="module")
def paged(model: Path, by_slot: list[list[int]]) -> Iterator[Served]:
    with serving(model, PAGE) as served:
        yield served


def test_sparse_answers_are_the_paper_s_and_those_of_single_slots(paged: Served, by_slot: list[list[int]]) -> None:
    answers = sparse(paged)
    assert [generated(meta) for meta in answers] == by_slot
    for (length, seed), meta in zip(PROMPTS, answers, strict=True):
        assert paged.plain(prompt_of(length, seed), meta, runs_of(length)) < TOLERANCE
    assert paged.dense_deviation(prompt_of(*PROMPTS[-1]), answers[-1]) > 100 * TOLERANCE


def test_prefixes_are_found_in_whole_pages_with_their_clusters(paged: Served) -> None:
    """A cut through a page, and through a run of clusters: what lies behind the last whole page is computed anew."""
    prompt, other = prompt_of(170, 6), prompt_of(60, 7)
    paged.generate([prompt], SPARSE)
    for kept in (169, 150, 128, 70):
        longer = [*prompt[:kept], *other]
        (meta,) = paged.generate([longer], {"p1": 1, "p2": 1})
        assert meta["cached_tokens"] == kept // PAGE * PAGE
        assert paged.dense_deviation(longer, meta) < DENSE


def test_plain_requests_are_dense(paged: Served) -> None:
    prompts = [prompt_of(length, 8 + seed) for length, seed in PROMPTS]
    for prompt, meta in zip(prompts, paged.generate(prompts, {"dense": True}), strict=True):
        assert paged.dense_deviation(prompt, meta) < DENSE


def test_retracted_requests_are_clustered_again(paged: Served) -> None:
    prompts = [prompt_of(150, 20 + seed) for seed in range(8)]
    answers = paged.generate(prompts, {"p1": 1, "p2": 1}, new_tokens=60, fixed=False)
    assert sum(meta["num_retractions"] for meta in answers) > 0, "nothing was retracted"
    whole = [len(meta["output_token_logprobs"]) == meta["completion_tokens"] for meta in answers]
    for prompt, meta, is_whole in zip(prompts, answers, whole, strict=True):
        if is_whole:
            assert paged.dense_deviation(prompt, meta) < TOLERANCE
    assert any(whole) and paged.stats()["cluster_tokens_loose"] == 0


def test_pools_are_refused(paged: Served) -> None:
    with pytest.raises(ValueError, match=f"--page-size {PAGE}.*set --page-size 1"):
        paged.engine.create_pool("p", models.demonstrations(4))
