"""Test policies of every kind in the real engine on the CPU path, against `transformers` with the same rule on logits.

`views_policy.py` is installed as another package would be: a module and an entry point of the group
`sglang_ext.systems`. The oracle computes each policy anew as a rule on attention logits inside `transformers`' own
model, in float32; it imports nothing of this project.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AttentionInterface

from tests.e2e.server import until
from tests.e2e.warm import SPAWN
from tests.oracle import models, oracle

TOLERANCE = 1e-4  # on log-probabilities; the kinds differ from each other by more than 1e-2
NEW_TOKENS = 7
SINKS, WINDOW, TOP, PLAIN_BELOW = 4, 12, 10, 12  # as views_policy.py has them
BUDGET_TOKENS = 2000  # about how many tokens the memory budget is to hold

Rule = Callable[[int, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(layer, queries and keys [heads, tokens, head_dim] rotated at their columns, prompt tokens) -> unscaled logits."""


# ---- the oracle --------------------------------------------------------------------------------------------------


class Oracle:
    """The model in `transformers`, with an attention whose logits follow a rule."""

    def __init__(self, folder: Path) -> None:
        self.model = oracle_model = models.load_model(folder)
        self.rule: Rule = dense
        self.prompt = 0

        def attention(module, query, key, value, attention_mask, scaling, **kwargs):
            groups = query.shape[1] // key.shape[1]
            keys, values = key[0].repeat_interleave(groups, 0), value[0].repeat_interleave(groups, 0)
            logits = self.rule(module.layer_idx, query[0], keys, self.prompt) * scaling
            weights = torch.softmax(logits, -1)
            return (weights @ values).transpose(0, 1)[None], None

        AttentionInterface.register("by_rule", attention)
        oracle_model.set_attn_implementation("by_rule")

    def log_probs(self, rule: Rule, prompt: int, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary] log-probabilities of the next token."""
        self.rule, self.prompt = rule, prompt
        with torch.no_grad():
            return torch.log_softmax(self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0], -1)

    def rotate(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """[heads, tokens, head_dim] rotated further by delta [tokens], with the model's own functions."""
        return oracle.rotate(self.model, x, delta)


def columns(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and key columns, [tokens, 1] and [1, tokens]."""
    tokens = torch.arange(q.shape[1])
    return tokens[:, None], tokens[None]


def keep(logits: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    row, key = columns(logits)
    return logits.masked_fill(~(kept & (key <= row)), -math.inf)


def dense(layer: int, q: torch.Tensor, k: torch.Tensor, prompt: int) -> torch.Tensor:
    row, key = columns(q)
    return keep(q @ k.mT, key <= row)


def rule_layer(layer: int, q: torch.Tensor, k: torch.Tensor, prompt: int) -> torch.Tensor:
    row, key = columns(q)
    return keep(q @ k.mT, (key > row - WINDOW) | torch.tensor(layer != 0))


def rule_head(layer: int, q: torch.Tensor, k: torch.Tensor, prompt: int) -> torch.Tensor:
    _, key = columns(q)
    kv_head = torch.arange(q.shape[0])[:, None, None] // 2  # two query heads a key-value head
    return keep(q @ k.mT, (key < SINKS) | (key % 3 == kv_head))


def rule_chosen(layer: int, q: torch.Tensor, k: torch.Tensor, prompt: int) -> torch.Tensor:
    logits = dense(layer, q, k, prompt)
    kept = torch.ones(logits.shape[1:], dtype=torch.bool)
    for row in range(prompt, q.shape[1]):  # generated tokens were decoded, one at a time
        best = logits[:, row, :row].mean(0).topk(min(TOP, row)).indices
        kept[row] = False
        kept[row, best] = kept[row, row] = True
    return keep(logits, kept)


def moving(served: Served, kind: str) -> Rule:
    """Rules under which keys are seen elsewhere than where they were written."""

    def rank(layer: int, q: torch.Tensor, k: torch.Tensor, prompt: int) -> torch.Tensor:
        logits = dense(layer, q, k, prompt)
        for row in range(SINKS + WINDOW, q.shape[1]):
            # The window's keys stay; the sinks come to stand right before it.
            sinks = served.oracle.rotate(k[:, :SINKS], torch.full((SINKS,), row + 1 - WINDOW - SINKS))
            logits[:, row, :SINKS] = (q[:, row : row + 1] @ sinks.mT)[:, 0]
            logits[:, row, SINKS : row + 1 - WINDOW] = -math.inf
        return logits

    def distance(layer: int, q: torch.Tensor, k: torch.Tensor, prompt: int) -> torch.Tensor:
        logits = dense(layer, q, k, prompt)
        tokens = torch.arange(q.shape[1])
        origin = served.oracle.rotate(k, -tokens)
        far = served.oracle.rotate(q, WINDOW - tokens) @ origin.mT
        row, key = columns(q)
        return torch.where(key <= row - WINDOW, far, logits)

    return {"rank": rank, "distance": distance}[kind]


# ---- the engine --------------------------------------------------------------------------------------------------


class Served:
    """The engine with the test policies, and the oracle of its model."""

    def __init__(self, engine: Any, folder: Path, model: Path, pool_bytes: int) -> None:
        self.engine, self.folder, self.pool_bytes = engine, folder, pool_bytes
        self.oracle, self.dense_model = Oracle(model), models.load_model(model)

    def kind(self, kind: str) -> None:
        (self.folder / "kind").write_text(kind)

    def log(self, event: str) -> list[dict[str, Any]]:
        lines = (self.folder / "log").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def generate(self, prompts: Sequence[Sequence[int]], **params: Any) -> list[dict[str, Any]]:
        return generate(self.engine, prompts, **params)


def generate(engine: Any, prompts: Sequence[Sequence[int]], **params: Any) -> list[dict[str, Any]]:
    out = engine.generate(
        input_ids=[list(prompt) for prompt in prompts],
        sampling_params={"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **params},
        return_logprob=True,
        top_logprobs_num=5,
    )
    return [answer["meta_info"] for answer in out]


def prompts(seed: int) -> list[list[int]]:
    """Prompts of uneven length; different seeds share no first token, so that no kind reads another's states."""
    gen = torch.Generator().manual_seed(seed)
    return [[10 + seed, *torch.randint(50, 380, (n - 1,), generator=gen).tolist()] for n in (45, 17, 70)]


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 4 * BUDGET_TOKENS,
    "max_running_requests": 8,
    "chunked_prefill_size": 32,  # cuts the longer prompts
    "random_seed": 0,
    "log_level": "error",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[pytest.MonkeyPatch]:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield monkeypatch
    torch.set_num_threads(threads)
    monkeypatch.undo()


@pytest.fixture(scope="module")
def served(model, one_thread, stock_answers, tmp_path_factory) -> Iterator[Served]:
    """An engine on the policy of another package, in whose memory budget a token takes many bytes.

    It starts when the stock engine is gone: an engine's shutdown ends all children of its process.
    """
    from sglang_ext import Engine
    from sglang_ext.systems.registry import systems

    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("policy")
    shutil.copy(Path(__file__).with_name("views_policy.py"), site / "views_policy.py")
    info = site / "views_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: views-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang_ext.systems]\ntest_views = views_policy:SYSTEM\n")
    (folder / "log").touch()

    pool_bytes = psutil.virtual_memory().available // 2
    one_thread.setenv("VIEWS_POLICY_FOLDER", str(folder))
    one_thread.setenv("VIEWS_POLICY_BYTES", str(pool_bytes // BUDGET_TOKENS))
    one_thread.setenv(SPAWN, "1")  # a process that has read the entry points does not see new ones
    one_thread.syspath_prepend(str(site))  # this process and those it spawns
    systems.cache_clear()  # a package is not installed in a process that has begun
    engine = Engine(model_path=str(model), attention_backend="test_views", mem_fraction_static=0.5, **OPTIONS)
    try:
        yield Served(engine, folder, model, pool_bytes)
    finally:
        engine.shutdown()
        systems.cache_clear()


@pytest.fixture(scope="module")
def stock_answers(model, one_thread) -> dict[int, list[dict[str, Any]]]:
    """What stock SGLang answers on the same platform."""
    from sglang import Engine

    engine = Engine(
        model_path=str(model),
        attention_backend="torch_native",
        sampling_backend="pytorch",
        device="cpu",
        page_size=1,
        disable_cuda_graph=True,
        sleep_on_idle=True,
        **OPTIONS,
    )
    try:
        return {seed: generate(engine, prompts(seed)) for seed in (0, 1)}
    finally:
        engine.shutdown()


def deviation(served: Served, rule: Rule, prompt: Sequence[int], meta: dict[str, Any]) -> float:
    """Largest difference in log-probability over all generated tokens and the five best at each step."""
    tokens = [token for _, token, *_ in meta["output_token_logprobs"]]
    assert len(tokens) == NEW_TOKENS
    table = served.oracle.log_probs(rule, len(prompt), [*prompt, *tokens])[len(prompt) - 1 :]
    worst = 0.0
    for step, (logprob, token, *_) in enumerate(meta["output_token_logprobs"]):
        known = [(logprob, token), *((lp, t) for lp, t, *_ in meta["output_top_logprobs"][step])]
        worst = max(worst, *(abs(lp - table[step, t].item()) for lp, t in known))
    return worst


# ---- tests -------------------------------------------------------------------------------------------------------


def same(got: list[Any], wanted: list[Any]) -> None:
    """Equal tokens, and log-probabilities but for what a product's rounding owes to the rows that are computed with it.

    Requests come into a batch as they arrive; on some CPUs that changes the last bit.
    """
    assert [each[1:] for each in got] == [each[1:] for each in wanted]
    assert [each[0] for each in got] == pytest.approx([each[0] for each in wanted], abs=2e-6)


def test_a_policy_that_returns_none_is_stock_sglang(served, stock_answers) -> None:
    served.kind("plain")
    for seed, expected in stock_answers.items():
        for answer, stock in zip(served.generate(prompts(seed)), expected, strict=True):
            same(answer["output_token_logprobs"], stock["output_token_logprobs"])
            for got, wanted in zip(answer["output_top_logprobs"], stock["output_top_logprobs"], strict=True):
                same(got, wanted)
            assert answer["cached_tokens"] == stock["cached_tokens"]


KINDS: dict[str, tuple[int, Callable[[Served], Rule]]] = {
    "dense": (2, lambda served: dense),
    "layer": (3, lambda served: rule_layer),
    "head": (4, lambda served: rule_head),
    "chosen": (5, lambda served: rule_chosen),
    "rank": (6, lambda served: moving(served, "rank")),
    "distance": (7, lambda served: moving(served, "distance")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_every_kind(served, kind: str) -> None:
    seed, rule_of = KINDS[kind]
    served.kind(kind)
    asked = prompts(seed)
    for prompt, meta in zip(asked, served.generate(asked), strict=True):
        assert deviation(served, rule_of(served), prompt, meta) < TOLERANCE
        if kind != "dense":  # the rule matters
            assert deviation(served, dense, prompt, meta) > 100 * TOLERANCE


def test_plain_requests_and_views_in_one_batch(served) -> None:
    served.kind("head")
    long, short = prompts(8)[0], [29, 60, 70, 80]
    answers = served.generate([short, long, short[::-1]], max_new_tokens=NEW_TOKENS)
    assert len(short) + NEW_TOKENS <= PLAIN_BELOW
    for prompt, rule, meta in zip((short, long, short[::-1]), (dense, rule_head, dense), answers, strict=True):
        assert deviation(served, rule, prompt, meta) < TOLERANCE


def test_a_second_turn_reuses_the_states_a_policy_wrote(served) -> None:
    served.kind("layer")
    prompt = prompts(9)[0]
    first = served.generate([prompt])[0]
    longer = [*prompt, *(token for _, token, *_ in first["output_token_logprobs"]), 99, 98]
    second = served.generate([longer])[0]
    # All but the last token, or all: overlap scheduling computes one step more than it needs.
    assert second["cached_tokens"] - len(prompt) in (NEW_TOKENS - 1, NEW_TOKENS)
    assert deviation(served, rule_layer, longer, second) < TOLERANCE


def test_positions_from_the_slot_table(served) -> None:
    """Blocks seen where they were encoded (`Written`) instead of next to each other."""
    served.kind("written")
    info = served.engine.create_pool("p", models.demonstrations(12), block_size=3)
    own = [33, 60, 61, 62, 63, 64, 65, 66]
    try:
        blocks = [block["token_ids"] for block in served.engine.pool("p", tokens=True)["blocks"]]
        options = {key: info["options"][key] for key in ("pattern", "sink_blocks", "previous_blocks", "positions")}
        encoded = oracle.encode(served.dense_model, blocks, **options)
        pieces = oracle.whole_blocks(blocks, [0, 2, 3])
        custom = {"pool": "p", "raw": True, "block_ids": [0, 2, 3]}
        meta = served.generate([own], custom_params=custom)[0]
        tokens = [token for _, token, *_ in meta["output_token_logprobs"]]

        def worst(rebase: bool) -> float:
            # The policy has the question at its column, which is nearer than behind the last block's position.
            columns = sum(end - start for _, start, end in pieces)
            last = int(encoded.positions[pieces[-1][0]][-1])
            offset = 0 if rebase else columns - (last + 1)
            table = oracle.log_probs(
                served.dense_model, encoded, pieces, [*own, *tokens], rebase=rebase, own_offset=offset
            )
            rows = table[len(own) - 1 :]
            return max(abs(lp - rows[step, t].item()) for step, (lp, t, *_) in enumerate(meta["output_token_logprobs"]))

        assert worst(rebase=False) < TOLERANCE < 0.01 < worst(rebase=True)
    finally:
        served.engine.delete("p")


def test_a_policys_bytes_count_in_the_memory_budget(served) -> None:
    """The pool is the budget over (keys and values + the policy's bytes); without them it would reach the cap."""
    total = served.engine.get_server_info()["max_total_num_tokens"]
    budget = served.log("budget")
    assert budget and all(line == {"event": "budget", "layers": 3, "kv_heads": 2, "head_dim": 32} for line in budget)
    # Free memory moves between this process's reading and the engine's.
    assert BUDGET_TOKENS / 3 < total < 2 * BUDGET_TOKENS < OPTIONS["max_total_tokens"]


def test_hooks_of_a_policy_are_told_of_every_node(served) -> None:
    served.kind("dense")
    until(lambda: served.engine.flush_cache().success)
    shared, tails = [47, *range(100, 130)], ([201, 202, 203], [211, 212, 213])
    events = len((served.folder / "log").read_text().splitlines())
    for tail in tails:
        served.generate([[*shared, *tail]])
    filler = torch.Generator().manual_seed(3)
    total = served.engine.get_server_info()["max_total_num_tokens"]
    for n in range(2 * total // 400):  # more than fits: the old nodes must go
        served.generate([[300 + n, *torch.randint(50, 380, (399,), generator=filler).tolist()]], max_new_tokens=1)
    nodes: dict[int, int] = {}
    seen: dict[str, int] = {}
    for line in map(json.loads, (served.folder / "log").read_text().splitlines()[events:]):
        seen[line["event"]] = seen.get(line["event"], 0) + 1
        if line["event"] == "insert":
            assert line["node"] not in nodes
            nodes[line["node"]] = line["tokens"]
        elif line["event"] == "split":
            assert nodes[line["tail"]] == sum(line["tokens"]) and line["head"] not in nodes
            nodes[line["head"]], nodes[line["tail"]] = line["tokens"]
        elif line["event"] == "evict":
            assert nodes.pop(line["node"]) == line["tokens"]
    assert min(seen.get(event, 0) for event in ("insert", "split", "evict")) > 0, seen
    assert sum(nodes.values()) <= total


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("dbsa", "json:loads", "entry point dbsa of sglang_ext\\.systems: the name is sglang_ext's own"),
        ("other", "json:loads", "entry point other of sglang_ext\\.systems: got a function, expected a"),
    ],
)
def test_wrong_entry_points(monkeypatch, name: str, value: str, wrong: str) -> None:
    from importlib.metadata import EntryPoint

    from sglang_ext.systems import registry

    entry = EntryPoint(name, value, registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    registry.systems.cache_clear()  # an error is not kept
    with pytest.raises(ValueError, match=wrong):
        registry.systems()


def test_entry_points_are_read_once(monkeypatch) -> None:
    """SGLang asks a hook of ours by name in every prefill."""
    from sglang_ext.systems import registry

    known = registry.systems()
    monkeypatch.setattr(registry, "entry_points", lambda group: pytest.fail("read again"))
    assert registry.systems() is known and "dbsa" in known
