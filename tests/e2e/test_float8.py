"""A KV cache in float8 e4m3 in the real engine, against ``transformers`` whose keys and values are rounded likewise.

The engine's float32 and the oracle's differ in their last bits, so that a key that lies between two float8 may be
rounded to either. That moves log-probabilities by far less than `TOLERANCE`, which is far below what rounding itself
does. `test_float8_kernels.py` looks at the kernels, and `test_gpu_float8.py` at a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.exact import Ask, Served
from tests.e2e.test_double_p import POLICY, SPARSE, Run, config, deviation, generated, prompt_of, runs_of
from tests.e2e.test_double_p import Served as ServedByClusters
from tests.oracle import float8, models, oracle
from tests.oracle.double_p import Oracle

TOLERANCE = 2e-3  # on log-probabilities
ROUNDING = 3e-2  # what rounding moves those of an answer by, at least
BLOCKS = 7
ENGINES: dict[str, dict[str, Any]] = {
    "dbsa": {"attention_backend": "dbsa"},
    "double_p": {"attention_backend": "double_p", "policy": POLICY},
    "dbsa+double_p": {"attention_backend": "dbsa+double_p", "policy": POLICY},
}


def start(folder: Path, kernels: str, **options: Any) -> Any:
    from sglang_ext import Engine

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SGLANG_EXT_KERNELS", kernels)
        return Engine(
            model_path=str(folder),
            dtype="float32",
            kv_cache_dtype="fp8_e4m3",
            max_total_tokens=2400,
            max_running_requests=4,
            chunked_prefill_size=80,
            random_seed=0,
            log_level="error",
            **options,
        )


class Running:
    """An engine, and what it must say."""

    def __init__(self, folder: Path, name: str, kernels: str) -> None:
        self.engine = start(folder, kernels, **ENGINES[name])
        model, tokenizer = models.load_model(folder), models.load_tokenizer(folder)
        self.views = Served(self.engine, model, tokenizer, float8, TOLERANCE)
        self.unrounded = Served(self.engine, model, tokenizer)
        self.clusters = ServedByClusters(self.engine, folder)
        self.clusters.oracle = Oracle(folder, answers=float8)

    def create(self, pool: str, **options: Any) -> None:
        self.engine.create_pool(pool, models.demonstrations(3 * BLOCKS - 1), block_size=3, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=512)


def running(folder: Path, name: str, kernels: str = "torch") -> Iterator[Running]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = Running(folder, name, kernels)
    try:
        yield found
    finally:
        found.engine.shutdown()
        torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=sorted(ENGINES))
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    yield from running(folder, request.param)


def check(running: Running, asks: list[Ask]) -> None:
    """Answers are right, and rounding matters in each of them."""
    answers = running.views.generate(asks)
    running.views.assert_exact(answers)
    for answer in answers:
        assert max(running.unrounded.errors(answer)) > ROUNDING, answer.ask


@pytest.mark.parametrize("positions", oracle.POSITIONS)
def test_pools(served: Running, positions: str) -> None:
    """Blocks that are seen where they were written, and elsewhere; a plain request beside them."""
    served.create(positions, positions=positions)
    views = served.views
    own = views.text("77: freeze my card, case 3\nLabel:")
    dense: dict[str, Any] = {} if served.engine.server_args.attention_backend == "dbsa" else {"dense": True}
    chosen = ([0, 1], [0, 6, 4, 3], [0, 1, 5, 2, 6], [*range(BLOCKS)])
    asks = [Ask(positions, own, {"block_ids": ids, **dense}, new_tokens=9) for ids in chosen]
    check(served, [*asks, Ask(None, [views.tokenizer.bos_token_id, *own])])
    views.assert_exact(views.generate(asks[:2]))  # from what the tree holds
    served.engine.delete(positions)


def test_a_step_through_clusters(served: Running) -> None:
    """Clusters are means of rounded keys."""
    if served.engine.server_args.attention_backend == "dbsa":
        pytest.skip("dbsa has no clusters")
    for length in (100, 206):
        check_clusters(served, length)


def test_blocks_through_clusters(served: Running) -> None:
    """A block's clusters are means of keys where these were written; it is seen elsewhere."""
    if served.engine.server_args.attention_backend != "dbsa+double_p":
        pytest.skip("only dbsa+double_p reads blocks through clusters")
    served.create("p")
    clusters, view = served.clusters, served.views
    blocks, model = view.blocks("p"), clusters.oracle.model
    encoded = float8.encode(model, blocks)
    own, ids = prompt_of(12, 13), [0, 5, 2, 3]
    custom = {"pool": "p", "raw": True, "block_ids": ids, **SPARSE}
    (meta,) = clusters.generate([own], custom)
    runs, column = [], 0
    for block in ids:
        begin, end = (POLICY["sink"] if block == 0 else 0), len(blocks[block])
        assert end <= POLICY["segment"]
        keys = [layer[:, begin:end] for layer in clusters.oracle.block_keys(encoded, block)]
        runs.append(Run(begin, end, column + begin, column + end, keys=keys, shift=column))
        column += end
    without_window = replace(config(), window=None)
    pieces, tokens = oracle.whole_blocks(blocks, ids), [*own, *generated(meta)]
    table = clusters.oracle.log_probs(tokens, len(own), runs, without_window, encoded, pieces)
    dense = clusters.oracle.log_probs(tokens, None, (), None, encoded, pieces)
    assert deviation(meta, table[len(own) - 1 :]) < TOLERANCE
    assert deviation(meta, dense[len(own) - 1 :]) > ROUNDING
    served.engine.delete("p")


def check_clusters(running: Running, length: int, new_tokens: int = 5) -> None:
    served, prompt = running.clusters, prompt_of(length, 20 + length % 17)
    (meta,) = served.generate([prompt], SPARSE, new_tokens=new_tokens)
    assert served.plain(prompt, meta, runs_of(length)) < TOLERANCE
    assert served.dense_deviation(prompt, meta) > ROUNDING
    with pytest.MonkeyPatch.context() as monkeypatch:  # transformers know one such oracle at a time
        monkeypatch.setattr(served.oracle, "answers", oracle)
        assert served.plain(prompt, meta, runs_of(length)) > ROUNDING
