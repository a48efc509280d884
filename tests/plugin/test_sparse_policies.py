"""One step of every sparse policy over a KV cache of random keys, against attention over the tokens it must read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_ext.attention import tokens
from sglang_ext.attention.policy import Attended, Caches, Request, RequestRows
from sglang_ext.config import POLICY_ENV
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.view_attention import merge_states, view_attention
from sglang_ext.systems.registry import systems

SLOTS, KV_HEADS, GROUP, DIM, COLUMNS = 200, 2, 2, 8, 90
SINK, WINDOW = 3, 7
SERVER = {"sink": SINK, "window": WINDOW, "min_tokens": 20}
SPARSE = ("quest", "retroinfer", "twilight", "double_p", "dbsa+double_p")

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row here is as long as what is copied at once."""
    monkeypatch.setattr(tokens, "AT_ONCE", 32)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    def made(name: str, **server: Any) -> Any:
        monkeypatch.setenv(POLICY_ENV, json.dumps({**SERVER, **server}))
        return systems()[name].make_policy()

    return made


@pytest.fixture
def caches() -> Caches:
    gen = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(SLOTS, KV_HEADS, DIM, generator=gen, dtype=torch.float64) for _ in range(2))
    rope = Rope(10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
    positions = torch.zeros(SLOTS, dtype=torch.int32)
    positions[order()] = torch.arange(COLUMNS, dtype=torch.int32)
    return Caches(0, keys * 1.5, values, positions, rope, DIM**-0.5)


def order() -> torch.Tensor:
    return torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(2))[:COLUMNS] + 1


def step(policy: Any, caches: Caches, query: torch.Tensor, begin: int = COLUMNS - 1, **options: Any) -> Any:
    """(output [heads, dim] or None for a dense step, the columns each head reads, the report)."""
    request = Request(1, "r", None, options)
    policy.bind(lambda: {0: (caches.keys, caches.values)}, caches.keys.dtype)
    policy.start(request)
    asked = policy._asked[1]
    asked.note = {} if asked.report else None
    slots = order()[: begin + 1]
    views = policy.views(RequestRows(request, slots, begin, caches.slot_pos, decode=True))
    if views is None:
        return None, None, None
    ((_, _, view),) = views
    position = torch.tensor([begin])
    attended = view(caches, query, position)
    attended = attended if isinstance(attended, Attended) else Attended(attended)
    arguments = (caches.keys, caches.values, caches.slot_pos, caches.rope, caches.scale)
    states = (view_attention(query, position, attended.view, *arguments), *attended.parts)
    out, _ = merge_states(*(torch.stack(each) for each in zip(*states, strict=True)))
    (segment,) = attended.view.segments
    column_of = {int(slot): column for column, slot in enumerate(slots)}
    read = [{column_of[slot] for slot in row if slot >= 0} for row in segment.slots.tolist()]
    return out[0], read, asked.note


def dense_over(caches: Caches, query: torch.Tensor, read: list[set[int]]) -> torch.Tensor:
    slots, out = order(), []
    for head in range(KV_HEADS * GROUP):
        columns = sorted(read[head // GROUP])
        keys, values = caches.keys[slots[columns], head // GROUP], caches.values[slots[columns], head // GROUP]
        out.append(torch.softmax(keys @ query[0, head] * caches.scale, 0) @ values)
    return torch.stack(out)


@pytest.fixture
def query() -> torch.Tensor:
    gen = torch.Generator().manual_seed(3)
    return torch.randn(1, KV_HEADS * GROUP, DIM, generator=gen, dtype=torch.float64) * 2


EVERY = [set(range(COLUMNS))] * KV_HEADS
ALWAYS_READ = {*range(SINK), *range(COLUMNS - 1 - WINDOW, COLUMNS)}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("quest", {"budget": 1}),
        ("retroinfer", {"exact": 1, "approx": 0}),
        ("twilight", {"p": 1, "budget": 1}),
        ("double_p", {"p1": 1, "p2": 1}),
        ("dbsa+double_p", {"p1": 1, "p2": 1}),
    ],
)
def test_all_that_there_is_is_dense_attention(
    make: Make, caches: Caches, query: torch.Tensor, name: str, options: Any
) -> None:
    more = {"cluster": 4, "segment": 32, "append": 8} if name in ("retroinfer", "double_p", "dbsa+double_p") else {}
    out, read, note = step(make(name, **more), caches, query, attention_report=True, **options)
    assert read == EVERY
    torch.testing.assert_close(out, dense_over(caches, query, EVERY), rtol=0, atol=1e-12)
    assert note["kept"] == note["exact"] == [1.0] and note["recovered_least"][0] == pytest.approx(1)


def test_quest_reads_the_pages_of_the_highest_bounds(make: Make, caches: Caches, query: torch.Tensor) -> None:
    out, read, _ = step(make("quest", page=4), caches, query, budget=0.3)
    slots, middle = order(), list(range(SINK, COLUMNS - 1 - WINDOW))
    pages = [middle[at : at + 4] for at in range(0, len(middle), 4)]
    for head in range(KV_HEADS):
        bounds = []
        for page in pages:
            keys = caches.keys[slots[page], head]
            heads = query[0, head * GROUP : (head + 1) * GROUP]
            bounds.append(max(float(torch.maximum(q * keys.amin(0), q * keys.amax(0)).sum()) for q in heads))
        best = sorted(range(len(pages)), key=lambda page: -bounds[page])[: math.ceil(0.3 * len(middle) / 4)]
        assert read[head] == ALWAYS_READ | {column for page in best for column in pages[page]}
    torch.testing.assert_close(out, dense_over(caches, query, read), rtol=0, atol=1e-12)


def test_twilight_reads_the_mass_of_its_candidates(make: Make, caches: Caches, query: torch.Tensor) -> None:
    """With every token a candidate and exact estimates: the smallest set of each query head that reaches p."""
    policy = make("twilight", budget=1.0, estimate="exact")
    out, read, note = step(policy, caches, query, p=0.6, attention_report=True)
    slots, middle = order(), list(range(SINK, COLUMNS - 1 - WINDOW))
    for head in range(KV_HEADS):
        chosen = set()
        for q in query[0, head * GROUP : (head + 1) * GROUP]:
            mass = torch.softmax(caches.keys[slots[middle], head] @ q * caches.scale, 0).tolist()
            running = 0.0
            for index in sorted(range(len(middle)), key=lambda i: -mass[i]):
                if running >= 0.6:
                    break
                chosen.add(middle[index])
                running += mass[index]
        assert read[head] == ALWAYS_READ | chosen
    torch.testing.assert_close(out, dense_over(caches, query, read), rtol=0, atol=1e-12)
    share = sum(len(row) for row in read) / (KV_HEADS * COLUMNS)
    assert note["exact"] == note["kept"] == [pytest.approx(share)] and 0.6 < note["recovered_least"][0] < 1


def test_retroinfer_reads_numbers_of_clusters(make: Make, caches: Caches, query: torch.Tensor) -> None:
    policy = make("retroinfer", cluster=4, segment=200, append=1)
    out, read, note = step(policy, caches, query, exact=0.2, approx=0.3, attention_report=True)
    (run,) = policy._rows[1].own
    labels, sizes = run.run.layers[0].labels, run.run.layers[0].sizes
    slots, expected = order(), []
    for head in range(KV_HEADS):
        members = [[SINK + t for t in (labels[head] == c).nonzero().flatten().tolist()] for c in range(sizes.shape[1])]
        filled = [c for c, columns in enumerate(members) if columns]
        keys = {c: caches.keys[slots[members[c]], head].mean(0) for c in filled}
        queries = query[0, head * GROUP : (head + 1) * GROUP]
        masses = [{c: len(members[c]) * math.exp(float(keys[c] @ q) * caches.scale) for c in filled} for q in queries]
        share = {c: sum(mass[c] / sum(mass.values()) for mass in masses) for c in filled}
        ranked = sorted(filled, key=lambda c: -share[c])
        exact = ranked[: math.ceil(0.2 * len(filled))]
        approx = ranked[len(exact) : math.ceil(0.5 * len(filled))]
        assert read[head] == ALWAYS_READ | {column for c in exact for column in members[c]}
        for q, mass in zip(queries, masses, strict=True):
            columns = sorted(read[head])
            terms = [
                (math.exp(float(caches.keys[slots[t], head] @ q) * caches.scale), caches.values[slots[t], head])
                for t in columns
            ]
            terms += [(mass[c], caches.values[slots[members[c]], head].mean(0)) for c in approx]
            expected.append(sum(w * v for w, v in terms) / sum(w for w, _ in terms))
        assert note["approximated_clusters"][0] == pytest.approx(len(approx) / len(filled), abs=0.03)
    torch.testing.assert_close(out, torch.stack(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SPARSE)
def test_what_is_dense(make: Make, caches: Caches, query: torch.Tensor, name: str) -> None:
    policy = make(name)
    assert step(policy, caches, query, dense=True)[0] is None
    assert step(policy, caches, query, begin=19)[0] is None, "shorter than min_tokens"
    assert make(name, window=COLUMNS).views(RequestRows(Request(1, "r", None, {}), order(), 5, caches.slot_pos)) is None
    prompt = RequestRows(Request(1, "r", None, {}), order(), 50, caches.slot_pos)
    policy.start(prompt.request)
    assert policy.views(prompt) is None, "a prompt's rows"
    assert systems()[name].apart
    policy.finish(prompt.request)
    assert policy._asked == {}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("quest", {"budget": 0}, "budget=0: expected"),
        ("twilight", {"p": 2}, "p=2: expected 0 < p <= 1"),
        ("retroinfer", {"exact": 0.9, "approx": 0.2}, "expected shares that sum to at most 1"),
        ("retroinfer", {"exact": "all"}, "exact='all': expected a number"),
        ("quest", {"attention_report": 1}, "attention_report=1: expected true or false"),
    ],
)
def test_wrong_options_of_a_request(make: Make, name: str, options: dict[str, Any], message: str) -> None:
    policy = make(name)
    assert set(options) <= policy.request_options
    with pytest.raises(ValueError, match=message):
        policy.check(options)
    policy.check({"budget": 0.5, "unknown": "is somebody else's"})


@pytest.mark.parametrize("name", SPARSE)
def test_batches_that_mix_prompts_and_decoding_are_refused(
    make: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from sglang_ext.serving.checks import refusals

    make(name)
    arguments = SimpleNamespace(
        dtype="auto",
        attention_backend=name,
        enable_mixed_chunk=True,
        dp_size=1,
        pp_size=1,
        tp_size=1,
        chunked_prefill_size=None,
    )
    (problem,) = refusals(arguments)
    assert "enable_mixed_chunk" in problem and name in problem
    other = SimpleNamespace(**{**vars(arguments), "attention_backend": "dbsa"})
    with pytest.raises(ValueError, match=r"unknown option .*; known are host_gb"):
        refusals(other)
    monkeypatch.delenv(POLICY_ENV)
    assert refusals(other) == []


def test_a_system_without_options_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from sglang_ext.serving import checks
    from sglang_ext.systems.registry import ours

    bare = replace(ours()["dbsa"], options=None, policy="sglang_ext.attention.policy:Policy")
    monkeypatch.setattr(checks, "system_of", lambda _arguments: bare)
    monkeypatch.setenv(POLICY_ENV, json.dumps({"p1": 0.9}))
    arguments = SimpleNamespace(attention_backend="bare", dp_size=1, pp_size=1, tp_size=1, chunked_prefill_size=None)
    (problem,) = checks.refusals(arguments)
    assert "--policy" in problem and "bare has no options" in problem


def test_options_that_the_policy_has_not_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from sglang_ext.serving.checks import before_server_args

    monkeypatch.setenv(POLICY_ENV, json.dumps({"p1": 0.9}))
    with pytest.raises(ValueError, match="SGLANG_EXT_POLICY: unknown option p1; known are budget, min_tokens, page"):
        before_server_args(SimpleNamespace(attention_backend="quest", dtype="float32", disable_cuda_graph=False))
