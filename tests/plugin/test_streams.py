"""Streams without an engine: what fits, what is refused, where chunks end, at which positions tokens are written."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext import compat
from sglang_ext.attention import choice
from sglang_ext.attention.cascade import CascadePolicy, StreamingLlmPolicy
from sglang_ext.attention.policy import Request, ServedModel
from sglang_ext.attention.readers.streams import check_fits
from sglang_ext.attention.stream_policy import StreamPolicy
from sglang_ext.cache.rows import WIRE_KEY
from sglang_ext.cache.streams import Conversation, StreamCache
from sglang_ext.config import POLICY_ENV
from sglang_ext.policies.cascade import Cascade
from sglang_ext.serving import checks
from sglang_ext.systems.registry import systems

POLICY = {"sinks": 4, "window": 32, "stride": 16}  # 52 slots


class Own(StreamPolicy):
    """Somebody else's, which no kernels of ours know."""


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> CascadePolicy:
    monkeypatch.setenv(POLICY_ENV, json.dumps(POLICY))
    return CascadePolicy()


def arguments(**changed: Any) -> SimpleNamespace:
    sizes = {"dp_size": 1, "pp_size": 1, "tp_size": 1, "chunked_prefill_size": None}
    given = {"attention_backend": "cascade", "dtype": "auto", "radix_eviction_policy": "lru", **sizes, **changed}
    return SimpleNamespace(**given)


def test_names_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (POLICY_ENV, "SGLANG_EXT_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    cascade, streaming = (systems()[name].make_policy() for name in ("cascade", "streaming_llm"))
    assert isinstance(cascade, CascadePolicy) and isinstance(streaming, StreamingLlmPolicy)
    assert (cascade.config.cascades, streaming.config.cascades) == (4, 1)
    assert cascade.config.slots == streaming.config.slots == 64 + 4096 + 1024
    assert cascade.request_options == {*Cascade.__dataclass_fields__, "conversation", "continue", "conversation_key"}
    assert checks.serves_streams(arguments()) and checks.refusals(arguments()) == []
    for name, system in systems().items():
        assert system.streams == (name in ("cascade", "streaming_llm", "ltri", "infllm"))
        assert isinstance(system.make_policy(), StreamPolicy) == system.streams


def test_ranks_of_heads_that_decide_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POLICY_ENV, raising=False)
    two: dict[str, Any] = {"tp_size": 2}
    for name in ("cascade", "streaming_llm"):
        assert checks.refusals(arguments(attention_backend=name, **two)) == []
    with pytest.raises(ValueError, match=r"tp_size=2.*set --tp-size 1"):
        Own().spread(2)
    policy = systems()["cascade"].make_policy(2)
    with pytest.raises(ValueError, match="custom_params: heads=homogeneous with tp_size=2"):
        policy.check({"heads": "homogeneous"})
    policy.check({"heads": "homogeneous", "selection": False})  # what is kept follows from counts
    systems()["streaming_llm"].make_policy(2).check({"heads": "homogeneous"})
    for name in ("cascade", "ltri"):
        with pytest.raises(ValueError, match=r"tp_size=8.*4 key-value heads a layer.*set --tp-size 4 or less"):
            systems()[name].make_policy(8).meet(ServedModel("model", 32, 4, 4, True))
    policy.meet(ServedModel("model", 32, 16, 2, True))
    monkeypatch.setenv(POLICY_ENV, '{"heads": "homogeneous"}')
    (problem,) = checks.refusals(arguments(**two))
    assert "--policy: heads=homogeneous with tp_size=2" in problem and "independent, or --tp-size 1" in problem


@pytest.mark.parametrize("kernels", ["torch", "triton", "auto"])
def test_ranks_of_ltri_may_have_kernels(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """Which heads vote is known when the model is (`attention.readers.ltri.check_ranks`)."""
    monkeypatch.delenv(POLICY_ENV, raising=False)
    monkeypatch.setattr(choice, "_hopper", lambda: True)
    monkeypatch.setenv("SGLANG_EXT_KERNELS", kernels)
    given: dict[str, Any] = {"attention_backend": "ltri", "chunked_prefill_size": 4096, "dtype": "bfloat16"}
    assert checks.refusals(arguments(**given, tp_size=2)) == []


def test_ranks_of_infllm_need_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever chooses the kernels: somebody by name, or the machine."""
    monkeypatch.delenv(POLICY_ENV, raising=False)
    given: dict[str, Any] = {"attention_backend": "infllm", "chunked_prefill_size": 4096, "dtype": "bfloat16"}
    monkeypatch.setenv("SGLANG_EXT_KERNELS", "torch")
    assert checks.refusals(arguments(**given, tp_size=2)) == []
    monkeypatch.setenv("SGLANG_EXT_KERNELS", "triton")
    assert checks.refusals(arguments(**given)) == []
    (problem,) = checks.refusals(arguments(**given, tp_size=2))
    assert problem.startswith("--attention-backend infllm: tp_size=2 with kernels (triton)")
    assert "set SGLANG_EXT_KERNELS=torch in the server's environment, or --tp-size 1" in problem
    monkeypatch.setenv("SGLANG_EXT_KERNELS", "cuda")
    (problem,) = checks.refusals(arguments(**given, tp_size=2))
    assert "SGLANG_EXT_KERNELS=cuda: expected one of" in problem
    monkeypatch.setenv("SGLANG_EXT_KERNELS", "auto")
    monkeypatch.setattr(choice, "_hopper", lambda: True)
    problems = checks.refusals(arguments(**given, tp_size=2))
    assert [("kernels (flashinfer)" in each) for each in problems] == [True] * systems()["infllm"].automatic


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("enable_mixed_chunk", "--enable-mixed-chunk"),
        ("enable_priority_scheduling", "set --disable-priority-preemption"),
        ("enable_streaming_session", "--enable-streaming-session"),
        ("enable_prefill_delayer", "--enable-prefill-delayer"),
        ("enable_hisparse", "--enable-hisparse"),
    ],
)
def test_what_streams_do_not_serve_is_refused_by_name(name: str, remedy: str) -> None:
    (problem,) = checks.refusals(arguments(**{name: True}))
    assert name in problem and remedy in problem


def test_streams_go_by_priorities_where_none_gives_way() -> None:
    priorities = {"enable_priority_scheduling": True, "disable_priority_preemption": True}
    assert checks.refusals(arguments(**priorities)) == []


def test_requests_give_way_only_where_sglang_takes_them_up_again() -> None:
    problems = checks.refusals(arguments(attention_backend="dbsa", enable_priority_scheduling=True))
    assert bool(problems) != compat.REQUEUES_PREEMPTED
    assert all("loses a request that gave way" in each and "--disable-priority-preemption" in each for each in problems)


def test_dynamic_chunking_is_taken_because_it_needs_pipeline_parallelism() -> None:
    """SGLang ignores it without, and that is refused."""
    assert checks.refusals(arguments(enable_dynamic_chunking=True)) == []
    (problem,) = checks.refusals(arguments(enable_dynamic_chunking=True, pp_size=2))
    assert "pp_size=2" in problem


def test_a_pass_has_room_for_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICY_ENV, json.dumps({"chunk": 256}))
    for size, refused in ((128, True), (256, False), (1000, False), (-1, False), (None, False)):
        problems = checks.refusals(arguments(attention_backend="ltri", chunked_prefill_size=size))
        assert bool(problems) == refused
        assert not problems or "chunked_prefill_size=128 is below the policy's chunk of 256 tokens" in problems[0]


def test_slots_are_bounded_and_short_requests_take_fewer(policy: CascadePolicy) -> None:
    assert [policy.slots({}, tokens) for tokens in (1, 51, 52, 53, 10**9)] == [1, 51, 52, 52, 52]
    assert policy.slots({"window": 8, "stride": 1}, 10**9) == 13
    with pytest.raises(ValueError, match="= 84 KV slots; the server reserves at most 52 a request"):
        policy.check({"window": 64})
    for wrong in ({"conversation": ""}, {"conversation": 3}, {"continue": True}, {"conversation": "a", "continue": 1}):
        with pytest.raises(ValueError, match="custom_params: con"):
            policy.check(wrong)
    policy.check({"conversation": "a", "continue": False})
    policy.check({"window": 16, "stride": 32, "unknown": "is somebody else's"})


@pytest.mark.parametrize("computes", ["torch", "triton"])
def test_more_sub_caches_than_kernels_take(monkeypatch: pytest.MonkeyPatch, computes: str) -> None:
    """They are refused before the scheduler sees them, and at start, whatever computes."""
    monkeypatch.setenv("SGLANG_EXT_KERNELS", computes)
    monkeypatch.setenv(POLICY_ENV, json.dumps({"window": 26}))
    policy = StreamingLlmPolicy()
    policy.check({"cascades": 13})
    with pytest.raises(ValueError, match="custom_params: cascades=26: expected at most 13"):
        policy.check({"cascades": 26})
    monkeypatch.setenv(POLICY_ENV, json.dumps({"cascades": 14, "window": 28}))
    with pytest.raises(ValueError, match="cascades=14: expected at most 13"):
        CascadePolicy()


def test_a_chunk_is_a_stride_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, policy: CascadePolicy) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else it would be set here, too
    for backend, given, wanted in (("cascade", None, 16), ("cascade", 50, 50), ("dbsa", None, None)):
        server = arguments(
            chunked_prefill_size=given, disable_cuda_graph=False, radix_cache_backend="sglang_ext", page_size=1
        )
        server.attention_backend = backend
        if backend == "dbsa":
            monkeypatch.delenv(POLICY_ENV)
        checks.before_server_args(server)
        assert server.chunked_prefill_size == wanted


def test_a_conversation_has_an_end(monkeypatch: pytest.MonkeyPatch, policy: CascadePolicy) -> None:
    """Where its tokens could no longer be numbered, a turn is refused before it runs."""
    cache: Any = object.__new__(StreamCache)
    turn = Conversation(torch.zeros(3), 90, 5, {"conversation": "a"}, None)
    cache.policy, cache.conversations = policy, {"a": turn}
    monkeypatch.setattr(StreamCache, "most_tokens", 100)
    cache._under_way, cache.open_conversations = {}, False
    refused: list[str] = []
    monkeypatch.setattr(compat, "abort_unscheduled", lambda req, why, status: refused.append(f"{status}: {why}"))
    for length in (9, 10):
        custom = {"conversation": "a", "continue": True, WIRE_KEY: turn}
        req = SimpleNamespace(
            sampling_params=SimpleNamespace(custom_params=custom),
            origin_input_ids=[1] * length,
            to_finish=None,
            finished_reason=None,
        )
        cache.find_row(req, None)
    (why,) = refused
    assert why.startswith("400: conversation 'a' has 90 tokens, and this turn 10: expected fewer than 100 together")


KEY, OTHER = "k" * 43, "o" * 43


def request(rid: str, **custom: Any) -> SimpleNamespace:
    """A scheduler's request, as far as the cache looks at it before it runs."""
    return SimpleNamespace(
        rid=rid,
        sampling_params=SimpleNamespace(custom_params={"conversation": "a", **custom}),
        origin_input_ids=[1, 2],
        to_finish=None,
        finished_reason=None,
        kv=SimpleNamespace(req_pool_idx=None),
        req_pool_idx=None,
        prefix_indices=[],
        prefix_len=0,
    )


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, policy: CascadePolicy) -> Any:
    """A cache without slots, which notes whom it refuses in `refused`."""
    cache: Any = object.__new__(StreamCache)
    cache.policy, cache.conversations = policy, {}
    monkeypatch.setattr(StreamCache, "most_tokens", 100)
    cache._under_way, cache._claimed, cache.open_conversations, cache.reserved = {}, {}, False, {}
    cache._found, cache._forks = {}, {}
    monkeypatch.setattr(StreamCache, "_copies", lambda cache, req: None)
    cache.refused = {}

    def refuse(req: Any, why: str, status: int) -> None:
        cache.refused[req.rid], req.to_finish = (status, why), compat.aborts.FINISH_ABORT(why)

    monkeypatch.setattr(compat, "abort_unscheduled", refuse)
    monkeypatch.setattr(StreamCache, "_longest", lambda *_: None)
    monkeypatch.setattr(StreamCache, "_fork", lambda *_: None)
    monkeypatch.setattr(StreamCache, "_turn", lambda cache, req: None)
    return cache


def admit(cache: Any, *requests: SimpleNamespace) -> list[str]:
    """Look at requests one after the other, as a scheduler does that makes a batch; the ids of those that run."""
    running = []
    for req in requests:
        cache.find_row(req, None)
        if req.to_finish is None:
            cache.claim(req)
            running.append(req.rid)
    return running


def test_a_name_belongs_to_who_begins_it(cache: Any) -> None:
    """Of first turns in one batch the first has it, while it runs and when it is kept, until it gives way."""
    first, second = request("1", conversation_key=KEY), request("2", conversation_key=OTHER)
    assert admit(cache, first, second, request("3"), request("4", conversation_key=KEY)) == ["1", "4"]
    assert cache.refused["2"] == cache.refused["3"] and cache.refused["2"][0] == 400
    assert "'a' is another's" in cache.refused["2"][1]
    cache._under_way.clear()  # both ended, and the conversation was kept
    cache.conversations["a"] = Conversation(torch.zeros(3), 3, 5, {}, None, secret=KEY)
    assert admit(cache, request("5", conversation_key=OTHER), request("6", conversation_key=KEY)) == ["6"]
    cache._under_way.clear()
    del cache.conversations["a"]  # it gave way
    assert admit(cache, request("7", conversation_key=OTHER)) == ["7"]


def test_a_conversation_is_found_with_its_key(cache: Any) -> None:
    cache.conversations["a"] = kept = Conversation(torch.zeros(3), 3, 5, {}, None, secret=KEY)
    assert cache.conversation({"conversation": "a", "conversation_key": KEY}) is kept
    wrong: list[Any] = [OTHER, None, 7, "é" * 43, KEY[:-1]]
    for key in wrong:
        assert cache.conversation({"conversation": "a", "conversation_key": key}) is None
    assert cache.conversation({"conversation": "a"}) is cache.conversation({"conversation": "b"}) is None
    kept.secret = None  # no turn says what would open it
    assert cache.conversation({"conversation": "a"}) is None
    cache.open_conversations = True
    assert cache.conversation({"conversation": "a"}) is kept
    assert admit(cache, request("1"), request("2", conversation_key=OTHER)) == ["1", "2"]


def test_who_has_no_key_is_told_what_all_are_told(cache: Any) -> None:
    cache.conversations["a"] = Conversation(torch.zeros(3), 3, 5, {"cascades": 1}, None, secret=KEY)
    goes_on: dict[str, Any] = {"continue": True, "conversation_key": OTHER}
    assert admit(cache, request("1", **goes_on), request("2", **goes_on, cascades=4)) == []
    del cache.conversations["a"]
    assert admit(cache, request("3", **goes_on)) == []
    assert cache.refused["1"] == cache.refused["2"] == cache.refused["3"]


def test_nothing_chooses_what_to_evict() -> None:
    server = arguments()
    server.radix_eviction_policy = "lfu"
    (problem,) = checks.refusals(server)
    assert "radix_eviction_policy='lfu'" in problem and "no prefix to evict" in problem


def test_what_pool_and_context_must_hold(policy: CascadePolicy) -> None:
    check_fits(policy, pool=52, context=52)
    with pytest.raises(ValueError, match=r"up to 52 KV slots and the pool has 51: .*--max-total-tokens"):
        check_fits(policy, pool=51, context=128)
    with pytest.raises(ValueError, match="up to 52 tokens and the model's context has 51 positions"):
        check_fits(policy, pool=128, context=51)


def test_chunks_end_where_strides_do_when_they_can(policy: CascadePolicy) -> None:
    assert [policy.cut({}, begin, end, 200) for begin, end in ((0, 50), (48, 98), (48, 64), (50, 60), (3, 16))] == [
        48, 96, 64, 60, 16,
    ]  # fmt: skip
    assert policy.cut({"stride": 7}, 0, 50, 200) == 49


def test_positions_start_anew_behind_what_is_kept(policy: CascadePolicy) -> None:
    policy.bind(lambda: {0: (torch.zeros(60, 2, 4), torch.zeros(60, 2, 4))}, torch.float32)
    request = Request(1, "a", None, {}, ())
    policy.start(request)
    assert policy.positions(request, 0, 48) == list(range(48))
    # At 48 tokens the window has been full since 36: the stride stands behind 36 kept tokens, and so does every later.
    assert policy.positions(request, 40, 70) == [*range(40, 48), *range(36, 52), *range(36, 42)]
    assert policy.positions(request, 10**6, 10**6 + 1) == [36 + 10**6 % 16]
    assert policy.stats() == {"streams": 1}
    policy.finish(request)
    assert policy.stats() == {"streams": 0}


def test_heads_write_to_cells_of_their_own(policy: CascadePolicy) -> None:
    """After many strides every slot's two cells hold tokens that differ, and no slot but the request's was touched."""
    from sglang_ext.attention.policy import Caches
    from sglang_ext.kernels.rope import Rope

    gen = torch.Generator().manual_seed(0)
    keys, values = torch.zeros(80, 2, 4), torch.zeros(80, 2, 4)
    policy.bind(lambda: {7: (keys, values)}, torch.float32)
    slots = torch.randperm(79, generator=gen)[:60] + 1
    caches = Caches(7, keys, values, torch.empty(0, dtype=torch.int32), Rope(torch.tensor([1.0, 0.1])), 0.5)
    request = Request(3, "a", None, {"beta": 0.9}, ())
    policy.start(request)
    for begin in range(0, 200, 10):
        tokens = torch.arange(begin, begin + 10, dtype=torch.float32)
        value = tokens[:, None, None].expand(10, 2, 4)
        query, key = (torch.randn(10, heads, 4, generator=gen) for heads in (4, 2))
        out = policy.attend(request, caches, slots, begin, query, key, value)
        assert out.shape == (10, 4, 4) and bool((out <= tokens[:, None, None]).all())
    used = slots[:52]
    held = values[used][..., 0]
    assert set(held[:4].flatten().tolist()) <= set(range(200))
    assert set(range(4)) <= set(held[:, 0].tolist())  # sinks
    assert set(range(180, 200)) <= set(held[:, 1].tolist())  # the newest
    assert set(held[:, 0].tolist()) != set(held[:, 1].tolist())
    others = torch.ones(80, dtype=torch.bool)
    others[used] = False
    assert not bool(values[others].any()) and not bool(keys[others].any())


@pytest.mark.parametrize(("on_gpus", "gpu", "said"), [(True, True, 0), (False, False, 0), (False, True, 1)])
def test_a_line_that_no_gpu_has_run_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on_gpus: bool, gpu: bool, said: int
) -> None:
    line = replace(checks.lines.current(), on_gpus=on_gpus, tried=checks.lines.installed_sglang())
    monkeypatch.setattr(checks.lines, "current", lambda: line)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(checks, "refusals", lambda server_args: [])
    server = arguments(radix_cache_backend="sglang_ext")
    # An engine with log_level="error" that an earlier test started in this process has set the root logger's level.
    with caplog.at_level(logging.WARNING, logger=checks.logger.name):
        for _ in range(2):
            checks.after_server_args(None, server)
    assert sum("no GPU has run this plugin" in record.message for record in caplog.records) == said
