"""Double-P in the real engine on the CPU, against `tests/oracle/double_p.py` in float64; clusters that live and die."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.server import until
from tests.oracle import models, oracle
from tests.oracle.double_p import Config, Oracle, Run

TOLERANCE = 1e-4  # on log-probabilities, float32 beside float64; dense attention is off by more than 100 times that
DENSE = 1e-5
NEW_TOKENS = 7
SINK, WINDOW, CLUSTER, SEGMENT, APPEND, MIN_TOKENS, ITERATIONS = 2, 6, 4, 64, 16, 48, 4
POLICY = {
    "sink": SINK,
    "window": WINDOW,
    "cluster": CLUSTER,
    "segment": SEGMENT,
    "append": APPEND,
    "min_tokens": MIN_TOKENS,
    "iterations": ITERATIONS,
}
SPARSE = {"p1": 0.8, "p2": 0.4}
TOTAL = 2500


class Served:
    """The engine, and its model in `transformers`."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine = engine
        self.oracle, self.dense = Oracle(folder), models.load_model(folder)
        self.tokenizer = models.load_tokenizer(folder)

    def generate(
        self, prompts: Sequence[Sequence[int]], options: Any = None, new_tokens: int = NEW_TOKENS, *, fixed: bool = True
    ) -> list[dict[str, Any]]:
        """meta_info of each answer; `options` is custom_params, one for all or one each.

        SGLang 0.5.23 never takes more requests of a `fixed` length than it has room for.
        """
        listed = options if isinstance(options, list) else [options] * len(prompts)
        params = [
            {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": fixed, "custom_params": each or None}
            for each in listed
        ]
        out = self.engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=params,
            return_logprob=True,
            top_logprobs_num=5,
        )
        return [answer["meta_info"] for answer in out]

    def stats(self) -> dict[str, int]:
        return self.engine.get_server_info()["internal_states"][0]["sglang_ext"]

    def empty(self) -> None:
        until(lambda: self.engine.flush_cache().success)

    def clustered(self) -> int:
        """Tokens that were ever clustered."""
        return self.stats()["cluster_tokens_computed"]

    def plain(self, prompt: Sequence[int], meta: dict[str, Any], runs: Sequence[Run], **p: float) -> float:
        """Deviation of an answer to a plain prompt from the oracle's with these runs."""
        tokens = [*prompt, *generated(meta)]
        table = self.oracle.log_probs(tokens, len(prompt), runs, config(**p))
        return deviation(meta, table[len(prompt) - 1 :])

    def dense_deviation(self, prompt: Sequence[int], meta: dict[str, Any]) -> float:
        with torch.no_grad():
            logits = self.dense(torch.tensor([[*prompt, *generated(meta)]]), use_cache=False).logits[0]
        return deviation(meta, torch.log_softmax(logits, -1)[len(prompt) - 1 :])


def config(p1: float = SPARSE["p1"], p2: float = SPARSE["p2"]) -> Config:
    return Config(CLUSTER, ITERATIONS, p1, p2, WINDOW)


def generated(meta: dict[str, Any]) -> list[int]:
    return [token for _, token, *_ in meta["output_token_logprobs"]]


def deviation(meta: dict[str, Any], table: torch.Tensor) -> float:
    """Largest difference in log-probability over the generated tokens and the five best at each step."""
    worst = 0.0
    for step, (logprob, token, *_) in enumerate(meta["output_token_logprobs"]):
        known = [(logprob, token), *((lp, t) for lp, t, *_ in meta["output_top_logprobs"][step])]
        worst = max(worst, *(abs(lp - table[step, t].item()) for lp, t in known))
    return worst


def prompt_of(length: int, seed: int) -> list[int]:
    """Tokens; different seeds share not even the first."""
    gen = torch.Generator().manual_seed(seed)
    return [10 + seed, *torch.randint(50, 380, (length - 1,), generator=gen).tolist()]


def whole(begin: int, end: int, **more: Any) -> Run:
    """A run of the row's own tokens, all of which are there."""
    return Run(begin, end, begin, end, **more)


def runs_of(length: int, begin: int = SINK) -> list[Run]:
    """What is clustered of a prompt when its first step is decoded."""
    end = length - WINDOW
    cuts = [begin, *range((begin // SEGMENT + 1) * SEGMENT, end, SEGMENT), end]
    return [whole(a, b) for a, b in itertools.pairwise(cuts) if end - a >= APPEND]


def check_everything(served: Served, cached: int) -> None:
    """With p of one the model's own attention; of a prompt that goes on behind another, `cached` tokens are found."""
    prompts = [prompt_of(n, seed) for seed, n in enumerate((60, 206, 120, 30))]
    kinds: list[Any] = [{"p1": 1, "p2": 1}, {"p1": 1, "p2": 1}, {"dense": True}, None]
    for prompt, meta in zip(prompts, served.generate(prompts, kinds), strict=True):
        assert served.dense_deviation(prompt, meta) < TOLERANCE
    longer = [*prompts[1], *prompt_of(40, 8)]
    (meta,) = served.generate([longer], kinds[0])
    assert meta["cached_tokens"] == cached and served.dense_deviation(longer, meta) < TOLERANCE


def check_steps(served: Served) -> None:
    """Prompts of one chunk and of several, read through their clusters, and through these alone."""
    prompts = [prompt_of(n, seed) for seed, n in enumerate((100, 206), 20)]
    before = served.clustered()
    for prompt, meta in zip(prompts, served.generate(prompts, SPARSE), strict=True):
        runs = runs_of(len(prompt))
        assert served.plain(prompt, meta, runs, **SPARSE) < TOLERANCE
        assert served.dense_deviation(prompt, meta) > 100 * TOLERANCE
        assert served.plain(prompt, meta, runs_of(len(prompt) - 30), **SPARSE) > 10 * TOLERANCE, "the clusters matter"
    assert served.clustered() - before == sum(run.end - run.begin for p in prompts for run in runs_of(len(p)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@contextmanager
def serving(folder: Path, policy: dict[str, Any] = POLICY, **options: Any) -> Iterator[Served]:
    """An engine with a policy over the model in a folder."""
    from sglang_ext import Engine

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = Engine(
        model_path=str(folder),
        policy=policy,
        dtype="float32",
        max_running_requests=8,
        chunked_prefill_size=80,  # cuts the longer prompts, not where segments end
        random_seed=0,
        log_level="error",
        **options,
    )
    try:
        yield Served(engine, folder)
    finally:
        engine.shutdown()
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    retracts = {"max_total_tokens": TOTAL, "schedule_conservativeness": 0.1}
    with serving(model, attention_backend="dbsa+double_p", **retracts) as running:
        yield running


# ---- answers -----------------------------------------------------------------------------------------------------


def test_p_of_one_is_dense_attention(served: Served) -> None:
    prompts = [prompt_of(n, seed) for seed, n in enumerate((49, 150, 206))]
    before = served.clustered()
    for prompt, meta in zip(prompts, served.generate(prompts, {"p1": 1, "p2": 1}), strict=True):
        assert served.dense_deviation(prompt, meta) < DENSE
    assert served.clustered() - before == sum(run.end - run.begin for p in prompts for run in runs_of(len(p)))


@pytest.mark.parametrize("length", [100, 136, 206])
def test_a_step_is_the_paper_s(served: Served, length: int) -> None:
    """136: the last segment is too short to be clustered. 206: the prompt is cut into chunks."""
    prompt = prompt_of(length, 20 + length % 17)
    (meta,) = served.generate([prompt], SPARSE)
    runs = runs_of(length)
    assert served.plain(prompt, meta, runs) < TOLERANCE
    assert served.dense_deviation(prompt, meta) > 100 * TOLERANCE
    assert served.plain(prompt, meta, runs_of(length - 30)) > 10 * TOLERANCE, "the clusters matter"


def test_generated_tokens_are_clustered_in_their_turn(served: Served) -> None:
    prompt = prompt_of(120, 4)
    (meta,) = served.generate([prompt], SPARSE, new_tokens=APPEND * 2 + 3)
    first = 120 - WINDOW
    cut = SEGMENT * 2
    # [first, 130) is due once `APPEND` tokens wait behind its beginning, and reaches a segment's end before that.
    late = [
        whole(first, cut, since=first + APPEND + WINDOW),
        whole(cut, cut + APPEND, since=cut + APPEND + WINDOW),
    ]
    assert served.plain(prompt, meta, [*runs_of(120), *late]) < TOLERANCE
    assert served.plain(prompt, meta, runs_of(120)) > 100 * TOLERANCE


def test_short_rows_are_dense_until_they_are_long(served: Served) -> None:
    prompt = prompt_of(MIN_TOKENS - 4, 5)
    (meta,) = served.generate([prompt], SPARSE, new_tokens=4)
    assert served.dense_deviation(prompt, meta) < DENSE
    (meta,) = served.generate([prompt], SPARSE)
    run = whole(SINK, MIN_TOKENS - WINDOW, since=MIN_TOKENS)
    assert served.plain(prompt, meta, [run]) < TOLERANCE
    assert served.dense_deviation(prompt, meta) > 100 * TOLERANCE


def test_a_batch_of_many_kinds(served: Served) -> None:
    kinds: list[Any] = [SPARSE, {"p1": 1, "p2": 1}, {"dense": True}, {"p1": 0.5, "p2": 0}, None]
    prompts = [prompt_of(n, 30 + n % 7) for n in (90, 101, 120, 133, 30)]
    answers = served.generate(prompts, kinds)
    for prompt, meta, kind in zip(prompts, answers, kinds, strict=True):
        if kind in (SPARSE, kinds[3]):
            assert served.plain(prompt, meta, runs_of(len(prompt)), **kind) < TOLERANCE
            assert served.dense_deviation(prompt, meta) > 100 * TOLERANCE
        else:
            assert served.dense_deviation(prompt, meta) < DENSE


def test_what_a_step_kept_is_reported(served: Served) -> None:
    prompt = prompt_of(140, 6)
    everything, some = served.generate(
        [prompt, prompt], [{"p1": p, "p2": p, "attention_report": True} for p in (1, 0.3)]
    )
    for meta in (everything, some):
        assert "prompt" in meta["attention_report"][0]["dense"] and len(meta["attention_report"]) == NEW_TOKENS
    for step in everything["attention_report"][1:]:
        assert all(len(figures) == 3 for figures in step.values())  # layers
        assert step["exact"] == step["kept"] == [1.0] * 3 and step["approximated_clusters"] == [0.0] * 3
        assert min(step["recovered_least"]) > 1 - 1e-6
    for step in some["attention_report"][1:]:
        assert all(
            0 < least <= mean < 1 for least, mean in zip(step["recovered_least"], step["recovered"], strict=True)
        )
        assert all(a == b < 1 for a, b in zip(step["exact"], step["kept"], strict=True)), "p1 = p2: none approximated"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"p1": 1.5}, "p1=1.5, p2=0.7: expected 0 < p1 <= 1 and 0 <= p2 <= p1"),
        ({"p1": 0.5}, "p1=0.5, p2=0.7: expected .*what is not given is the server's"),
        ({"p2": "high"}, "p2='high': expected a number"),
        ({"p1": True}, "p1=True: expected a number"),
        ({"dense": 0}, "dense=0: expected true or false"),
    ],
)
def test_what_is_no_option_is_refused(served: Served, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        served.generate([prompt_of(60, 7)], options)


# ---- prefixes ----------------------------------------------------------------------------------------------------


def test_a_prefix_keeps_its_clusters(served: Served) -> None:
    """The same prompt again, and one that goes on behind it: what the tree has is not clustered again."""
    served.empty()
    prompt = prompt_of(150, 8)
    before = served.clustered()
    (first,) = served.generate([prompt], SPARSE)
    assert served.clustered() - before == 150 - WINDOW - SINK
    (second,) = served.generate([prompt], SPARSE)
    assert second["cached_tokens"] == 149 and served.clustered() - before == 150 - WINDOW - SINK
    assert generated(second) == generated(first)
    assert max(served.plain(prompt, meta, runs_of(150)) for meta in (first, second)) < TOLERANCE

    longer = [*prompt, *prompt_of(52, 9)]
    (third,) = served.generate([longer], SPARSE)
    assert third["cached_tokens"] == 150
    runs = [*runs_of(150), *runs_of(202, begin=150 - WINDOW)]
    assert served.clustered() - before == sum(run.end - run.begin for run in runs)
    assert served.plain(longer, third, runs) < TOLERANCE
    assert served.plain(longer, third, runs_of(202)) > 100 * TOLERANCE


def test_a_request_leaves_what_it_clustered(served: Served) -> None:
    """Also one that ends before the tree has its prompt, and what was clustered of an answer."""
    served.empty()
    prompt = prompt_of(150, 18)
    everything = {"p1": 1, "p2": 1}  # in every turn: an answer's keys are what its own request could see
    served.generate([prompt], everything, new_tokens=1)
    (first,) = served.generate([prompt], everything, new_tokens=40)
    stats = served.stats()
    # The answer: up to 160 and 176, segments of `APPEND` behind [2, 64), [64, 128) and [128, 144).
    assert stats["cluster_tokens"] == 176 - SINK and stats["cluster_tokens_loose"] == 0
    before = served.clustered()
    longer = [*prompt, *generated(first), 77, 78]
    (second,) = served.generate([longer], everything, new_tokens=3)
    assert second["cached_tokens"] >= 189 and served.clustered() == before
    assert served.dense_deviation(longer, second) < DENSE


def test_equal_prompts_at_once(served: Served) -> None:
    """Each clusters what it computed; the tree keeps one of them."""
    served.empty()
    prompt = prompt_of(150, 17)
    for meta in served.generate([prompt] * 3, SPARSE):
        assert served.plain(prompt, meta, runs_of(150)) < TOLERANCE
    stats = served.stats()
    assert stats["cluster_tokens"] == 150 - WINDOW - SINK and stats["cluster_tokens_loose"] == 0


def test_a_prefix_cut_inside_a_cluster(served: Served) -> None:
    """Of a run that the shared prefix cuts, the clusters wholly inside serve; their other tokens are exact."""
    served.empty()
    other, cut = prompt_of(180, 10), 126
    served.generate([other], SPARSE)
    before = served.clustered()
    prompt = [*other[:cut], *prompt_of(75, 11)]
    (meta,) = served.generate([prompt], SPARSE)
    assert meta["cached_tokens"] == cut
    own = runs_of(len(prompt), begin=cut)
    assert served.clustered() - before == sum(run.end - run.begin for run in own)
    keys = [layer[:, SEGMENT : 2 * SEGMENT] for layer in served.oracle.keys(other)]
    straddling = Run(SEGMENT, 2 * SEGMENT, SEGMENT, cut, keys=keys)
    runs = [whole(SINK, SEGMENT), straddling, *own]
    assert served.plain(prompt, meta, runs) < TOLERANCE
    assert served.plain(prompt, meta, [runs[0], *own]) > 10 * TOLERANCE, "some clusters lie wholly inside"
    assert served.plain(prompt, meta, [runs[0], whole(SEGMENT, cut), *own]) > 10 * TOLERANCE
    # The other prompt's clusters are what they were.
    (again,) = served.generate([other], SPARSE)
    assert served.plain(other, again, runs_of(180)) < TOLERANCE
    assert served.clustered() - before == sum(run.end - run.begin for run in own)


def test_a_prefix_that_cuts_much_of_a_run(served: Served) -> None:
    """What the shared prefix has of the run is clustered anew, once for all who share it."""
    served.empty()
    other, cut = prompt_of(180, 10), 100
    served.generate([other], SPARSE)
    before = served.clustered()
    expected = 0
    for seed, anew in ((11, cut - SEGMENT), (12, 0)):
        prompt = [*other[:cut], *prompt_of(75, seed)]
        (meta,) = served.generate([prompt], SPARSE)
        assert meta["cached_tokens"] == cut
        own = runs_of(len(prompt), begin=cut)
        expected += anew + sum(run.end - run.begin for run in own)
        assert served.clustered() - before == expected
        assert served.plain(prompt, meta, [whole(SINK, SEGMENT), whole(SEGMENT, cut), *own]) < TOLERANCE
        assert served.plain(prompt, meta, [whole(SINK, SEGMENT), *own]) > 10 * TOLERANCE
    (again,) = served.generate([other], SPARSE)
    assert served.plain(other, again, runs_of(180)) < TOLERANCE
    assert served.clustered() - before == expected and served.stats()["cluster_tokens_loose"] == 0


def test_a_prompt_that_ends_inside_a_known_one(served: Served) -> None:
    """What is its window, or behind it, is exact although the tree has clusters of it."""
    served.empty()
    long = prompt_of(190, 12)
    served.generate([long], SPARSE)
    before = served.clustered()
    prompt = long[:127]
    (meta,) = served.generate([prompt], SPARSE)
    assert served.clustered() == before and meta["cached_tokens"] == 126
    keys = [layer[:, SEGMENT : 2 * SEGMENT] for layer in served.oracle.keys(long)]
    runs = [whole(SINK, SEGMENT), Run(SEGMENT, 2 * SEGMENT, SEGMENT, 126, keys=keys)]
    assert served.plain(prompt, meta, runs) < TOLERANCE


# ---- pools -------------------------------------------------------------------------------------------------------


def test_blocks_are_clustered_once_and_serve_every_request(served: Served) -> None:
    """The blocks are longer than a segment, which ends inside them where it does in a prompt."""
    served.empty()
    served.engine.create_pool("p", models.demonstrations(30), block_size=6)
    try:
        info = served.engine.pool("p", tokens=True)
        blocks = [list(block["token_ids"]) for block in info["blocks"]]
        assert max(map(len, blocks)) > SEGMENT
        options = {key: info["options"][key] for key in ("pattern", "sink_blocks", "previous_blocks", "positions")}
        encoded = oracle.encode(served.oracle.model, blocks, **options)
        own = prompt_of(12, 13)
        before, used = served.clustered(), set()
        for ids in ([0, 2, 4], [0, 4, 1], [4, 2]):
            pieces = oracle.whole_blocks(blocks, ids)
            custom = {"pool": "p", "raw": True, "block_ids": ids, **SPARSE}
            (meta,) = served.generate([own], custom)
            used |= set(ids)
            runs, column = [], 0
            for place, block in enumerate(ids):
                begin = SINK if block == 0 else 0
                end = len(blocks[block])
                for first, last in pairwise([begin, *range(SEGMENT, end, SEGMENT), end]):
                    keys = [layer[:, first:last] for layer in served.oracle.block_keys(encoded, block)]
                    low = max(column + first, SINK if place == 0 else 0)  # the row's sinks are exact, whosever they are
                    runs.append(Run(first, last, low, column + last, keys=keys, shift=column))
                column += end
            assert served.clustered() - before == sum(len(blocks[b]) - (SINK if b == 0 else 0) for b in used)
            tokens = [*own, *generated(meta)]
            no_window = Config(CLUSTER, ITERATIONS, **SPARSE)
            table = served.oracle.log_probs(tokens, len(own), runs, no_window, encoded, pieces)
            dense = served.oracle.log_probs(tokens, None, (), None, encoded, pieces)
            assert deviation(meta, table[len(own) - 1 :]) < TOLERANCE
            assert deviation(meta, dense[len(own) - 1 :]) > 100 * TOLERANCE
            (exact,) = served.generate([own], {**custom, "p1": 1, "p2": 1})
            tokens = [*own, *generated(exact)]
            dense = served.oracle.log_probs(tokens, None, (), None, encoded, pieces)
            assert deviation(exact, dense[len(own) - 1 :]) < TOLERANCE
    finally:
        served.engine.delete("p")
    served.empty()
    assert served.stats()["cluster_runs"] == 0


def test_single_demonstrations_use_the_clusters_inside_them(served: Served) -> None:
    served.engine.create_pool("e", models.demonstrations(20), block_size=4)
    try:
        custom = {"pool": "e", "granularity": "example", "ratio": 0.6}
        (exact,) = served.generate([prompt_of(12, 14)], {**custom, "raw": True, "query": "card", "p1": 1, "p2": 1})
        (dense,) = served.generate([prompt_of(12, 14)], {**custom, "raw": True, "query": "card", "dense": True})
        assert exact["sglang_ext"]["stitched_tokens"] > MIN_TOKENS
        assert generated(exact) == generated(dense)
        pairs = zip(exact["output_token_logprobs"], dense["output_token_logprobs"], strict=True)
        assert max(abs(a[0] - b[0]) for a, b in pairs) < DENSE
    finally:
        served.engine.delete("e")


# ---- life --------------------------------------------------------------------------------------------------------


def test_clusters_go_with_their_nodes(served: Served) -> None:
    served.empty()
    served.generate([prompt_of(150, 15)], SPARSE)
    assert served.stats()["cluster_tokens"] == 150 - WINDOW - SINK
    for seed in range(TOTAL // 200 + 1):  # more than fits: the old nodes must go
        served.generate([prompt_of(200, 60 + seed)], {"dense": True}, new_tokens=1)
    assert served.stats()["cluster_tokens"] == served.stats()["cluster_bytes"] == 0
    served.generate([prompt_of(150, 15)], SPARSE)
    assert served.stats()["cluster_tokens"] == 150 - WINDOW - SINK
    served.empty()
    assert served.stats()["cluster_runs"] == 0


def test_an_aborted_request_leaves_nothing(served: Served) -> None:
    """Nothing but what belongs to the tree's nodes."""
    served.empty()
    prompt, before = prompt_of(150, 16), served.clustered()

    async def begin() -> None:
        params = {"max_new_tokens": 600, "temperature": 0, "ignore_eos": True, "custom_params": SPARSE}
        answer = await served.engine.async_generate(input_ids=prompt, sampling_params=params, stream=True)
        async for out in answer:
            if out["meta_info"]["completion_tokens"] == 60:
                served.engine.tokenizer_manager.abort_request(abort_all=True)

    served.engine.loop.run_until_complete(begin())
    stats = until(lambda: (stats := served.stats())["cluster_tokens_loose"] == 0 and stats)
    assert stats["cluster_tokens_computed"] - before >= 150 - WINDOW - SINK + 3 * APPEND
    assert stats["cluster_tokens"] == served.clustered() - before
    served.empty()
    assert served.stats()["cluster_runs"] == 0


def test_retracted_requests_are_clustered_again(served: Served) -> None:
    """Under p = 1 a retraction changes no token; afterwards nothing is held that the tree does not have."""
    served.empty()
    prompts = [prompt_of(150, 80 + seed) for seed in range(12)]
    answers = served.generate(prompts, {"p1": 1, "p2": 1}, new_tokens=600, fixed=False)
    assert sum(meta["num_retractions"] for meta in answers) > 0, "nothing was retracted"
    compared = 0
    for prompt, meta in zip(prompts, answers, strict=True):
        if len(meta["output_token_logprobs"]) == meta["completion_tokens"]:
            assert served.dense_deviation(prompt, meta) < TOLERANCE
            compared += meta["num_retractions"] > 0
    assert compared, "no answer that was retracted has all of its log-probabilities"
    stats = served.stats()
    assert stats["cluster_tokens"] <= TOTAL and stats["cluster_tokens_loose"] == 0
    served.empty()
    assert served.stats()["cluster_runs"] == 0
