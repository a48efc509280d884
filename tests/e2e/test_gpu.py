"""Planned views on a GPU, in float16, inside CUDA graphs, against ``transformers`` in float32.

Half precision rounds. How far plain requests on the same engine, which stock SGLang's FlashInfer serves, stray from the
oracle is measured first; answers over views may stray twice as far. An oracle that is wrong on purpose strays further.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.e2e.exact import Answer, Ask, Served
from tests.e2e.test_gpu_double_p import BACKEND
from tests.oracle import models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

POOLS: dict[str, dict[str, Any]] = {
    "short": {"block_size": 3},  # blocks of 45 tokens: encoded by the work list
    "long": {"block_size": 24},  # of 360: encoded as FlashInfer's virtual requests
    "local": {"block_size": 24, "positions": "local"},  # keys are rotated while blocks are encoded
    "self": {"block_size": 24, "pattern": "self"},
}
DEMONSTRATIONS = 96
PREFILL_GRAPHS: dict[str, Any] = {
    "cuda_graph_backend_prefill": "breakable",
    "cuda_graph_bs_prefill": [16, 32, 64, 128, 256, 384, 700],
}
ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"disable_cuda_graph": True},
    "no overlap, small chunks": {"disable_overlap_schedule": True, "chunked_prefill_size": 100},
    "prefill graphs": PREFILL_GRAPHS,
    "mixed chunks": {"enable_mixed_chunk": True, "chunked_prefill_size": 200},
    "two GPUs": {"tp_size": 2},
    "two GPUs, prefill graphs": {"tp_size": 2, **PREFILL_GRAPHS},
}


def start(folder: Any, kernels: str, **options: Any) -> Served:
    """An engine with all pools over `kernels`, and the oracle's copy of its weights, which have 16 bits."""
    from sglang_ext import Engine

    arguments: dict[str, Any] = {
        "dtype": "float16",
        "max_total_tokens": 20_000,
        "max_running_requests": 12,
        "cuda_graph_max_bs_decode": 8,
        "cuda_graph_backend_prefill": "disabled",
        "chunked_prefill_size": 700,
        "log_level": "error",
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SGLANG_EXT_KERNELS", kernels)
        engine = Engine(model_path=str(folder), **(arguments := {**arguments, **options}))
    model = models.load_model(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, arguments["dtype"])).float()
    for name, chosen in POOLS.items():
        engine.create_pool(name, models.demonstrations(DEMONSTRATIONS), **chosen)
    return Served(engine, model, models.load_tokenizer(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.save_model("llama", tmp_path_factory.mktemp("llama"), head_dim=64, max_position_embeddings=4096)


def asks(served: Served, seed: int = 0) -> list[Ask]:
    """Views of every pool in different orders, among plain requests; more than the largest graph."""
    own = [served.text(f"{77 + seed + i}: freeze my card, case {i}\nLabel:") for i in range(6)]
    return [
        Ask("short", own[0], {"block_ids": [0, 3, 1, 7]}),
        Ask("short", own[1], {"block_ids": [0, 1, 3, 30, 7, 2, 9]}, new_tokens=9),
        Ask(None, own[2] * 5, new_tokens=3),
        Ask("long", own[3], {"block_ids": [0, 3, 1]}),
        Ask("long", own[4] * 6, {"block_ids": [0, 1, 2, 3]}, new_tokens=12),
        Ask("local", own[5], {"block_ids": [0, 2, 1]}),
        Ask("self", own[0], {"block_ids": [0, 2, 3]}),
        Ask("long", own[1], {"retriever": "all"}, new_tokens=4),
        Ask("short", own[2], {"retriever": "all"}, new_tokens=7),
        Ask("self", own[3], {"block_ids": [0, 1]}, new_tokens=8),
    ]


def equal_where_clear(a: Answer, b: Answer, margin: float) -> bool:
    """Equal tokens up to the first whose two best candidates lie within `margin`, in natural log."""
    for step, (mine, theirs) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        best, second = (lp for lp, *_ in a.meta["output_top_logprobs"][step][:2])
        if best - second <= margin:
            return True
        if mine != theirs:
            return False
    return True


def test_graphs_and_ranks_change_no_token(folder: Any) -> None:
    """Eager, in graphs (where rows are padded), over two GPUs: the same tokens, but for ties in half precision.

    The first test here: two engines in one process must not overlap, and those of `served` live long.
    """
    answers: dict[str, list[Answer]] = {}
    for name in ("graphs", "eager", "prefill graphs", "two GPUs", "two GPUs, prefill graphs"):
        if ENGINES[name].get("tp_size", 1) > torch.cuda.device_count():
            continue
        running = start(folder, "flashinfer", **ENGINES[name])
        try:
            answers[name] = [a for size in (1, 3, 10) for a in running.generate(asks(running)[:size])]
        finally:
            running.engine.shutdown()
    for name in set(answers) - {"graphs"}:
        pairs = zip(answers["graphs"], answers[name], strict=True)
        different = [a.ask for a, b in pairs if not equal_where_clear(a, b, 0.02)]
        assert not different, f"{name}: {different}"


def test_many_questions_over_small_blocks(folder: Any) -> None:
    """Their runs fill more than one work list, so that each question reads its own blocks one by one."""
    running = start(folder, "flashinfer", max_running_requests=40)
    try:
        (plain,) = running.generate([Ask(None, running.text("Label: freeze my card. " * 40), new_tokens=8)])
        own = [running.text(f"{n}: freeze my card, case {n}; " * 3 + "\nLabel:") for n in range(32)]
        answers = running.generate([Ask("short", text, {"retriever": "all"}, new_tokens=6) for text in own])
        assert not strays(running, answers, 2 * max(running.errors(plain)))
        state = running.engine.get_server_info()["internal_states"][0]["sglang_ext"]
        assert state["view_prefills"]["by_request"] > 0, state["view_prefills"]
    finally:
        running.engine.shutdown()


@pytest.fixture(scope="module", params=[("flashinfer", name) for name in ENGINES] + [("triton", "graphs")], ids=str)
def served(request: pytest.FixtureRequest, folder: Any) -> Iterator[Served]:
    kernels, name = request.param
    if ENGINES[name].get("tp_size", 1) > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    running = start(folder, kernels, **ENGINES[name])
    try:
        yield running
    finally:
        running.engine.shutdown()


@pytest.fixture(scope="module")
def noise(served: Served) -> float:
    """The worst error of plain requests as long as the stitched ones."""
    shots = "".join(f"{d['input']}\nLabel: {d['output']}\n\n" for d in models.demonstrations(DEMONSTRATIONS, 5))
    ids = served.text(shots)
    plain = [Ask(None, ids[first : first + size], new_tokens=8) for first, size in ((0, 1200), (40, 500), (9, 150))]
    worst = max(max(served.errors(answer)) for answer in served.generate(plain))
    assert 0 < worst < 0.1, f"plain requests stray by {worst}: nothing can be said about views"
    return worst


def strays(served: Served, answers: Sequence[Answer], limit: float) -> list[str]:
    found = []
    for answer in answers:
        worst = max(served.errors(answer))
        if not worst <= limit:
            found.append(f"{answer.ask.pool} {answer.ask.select}: {worst:.3g}")
    return found


def test_alone(served: Served, noise: float) -> None:
    answers = [served.generate([ask])[0] for ask in asks(served)]
    assert not strays(served, answers, 2 * noise)


@pytest.mark.parametrize("number", [2, 5, 10])
def test_in_a_batch(served: Served, noise: float, number: int) -> None:
    answers = served.generate(asks(served, seed=number)[-number:])
    assert not strays(served, answers, 2 * noise)


def test_a_wrong_view_strays_further(served: Served, noise: float) -> None:
    """The comparison can fail: blocks in another order are another answer."""
    (answer,) = served.generate([asks(served)[4]])
    pieces = served.pieces(answer)
    assert max(served.errors(answer, [pieces[0], *pieces[:0:-1]])) > 4 * noise


def test_the_kernels_ran(served: Served, request: pytest.FixtureRequest) -> None:
    state = served.engine.get_server_info()["internal_states"][0]["sglang_ext"]
    assert (state["attention_backend"], state["reader"]) == (BACKEND, "PlannedReader")
    asked = asks(served, seed=40)
    for number in (1, 2, 5):
        served.generate(asked[:number])
    before, state = state, served.engine.get_server_info()["internal_states"][0]["sglang_ext"]
    graphs = state["view_prefills"]["graph"] - before["view_prefills"]["graph"]
    _, name = request.node.callspec.params["served"]
    assert (graphs > 0) == name.endswith("prefill graphs"), state["view_prefills"]
