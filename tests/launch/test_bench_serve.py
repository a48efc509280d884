"""`sglang-ext bench serve`: loads on a server that says how long it takes, and the rows that follow from loads."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from itertools import islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from sglang_ext.launch import cli
from sglang_ext.launch.bench import _serve_watch, serve
from sglang_ext.launch.bench._serve_load import (
    Answered,
    Limits,
    Load,
    LoadRequest,
    Measured,
    arrivals,
    in_parts,
    quantiles,
)
from sglang_ext.launch.bench._serve_mixes import CHAT_ANSWER, MIXES, Chat, Long, Questions, Sizes
from sglang_ext.launch.bench._serve_rows import compare, curves

SMALL = Sizes(pools=3, pool_tokens=400, block_size=8, answer=4, long=(20, 30), decoded=5)
STEP = 0.02  # seconds of a token of the fake server


def asked(tokens: int, **body: Any) -> LoadRequest:
    """A request of so many tokens, of which the fake server makes four unless `made` says otherwise."""
    return LoadRequest({"input_ids": [1], **body}, tokens)


async def generate(request: web.Request) -> web.StreamResponse:
    """A fake `/generate`: tokens in pairs, a wait before each; what is asked for in `do` goes wrong."""
    body = await request.json()
    assert body["stream"] is True
    do, tokens = body.get("do"), body.get("made", 4)
    if do == "refuse":
        return web.json_response({"error": {"message": "too long"}}, status=400)
    response = web.StreamResponse()
    await response.prepare(request)
    for count in range(2, tokens + 1, 2):
        await asyncio.sleep(STEP)
        ends = count >= tokens
        reason = {"type": "abort" if do == "abort" else "length"}
        meta = {"completion_tokens": count, "finish_reason": reason if ends else None}
        await response.write(b"data: " + json.dumps({"text": "", "meta_info": meta}).encode() + b"\n\n")
        if do == "fail":
            await response.write(b'data: {"error": {"message": "it broke"}}\n\n')
            return response
        if do == "hang":
            await asyncio.sleep(60)
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    loop, app = asyncio.new_event_loop(), web.Application(client_max_size=2**24)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    port = runner.addresses[0][1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_tokens_that_come_together_share_their_time() -> None:
    answer = Answered(5)
    answer.count(2, 1.0, 0.0)
    answer.count(5, 1.6, 1.0)
    assert answer.first == 1.0 and answer.tokens == 5
    assert answer.gaps == pytest.approx([0.2, 0.2, 0.2])  # the second token came with the first one


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        (Answered(2, first=0.4, gaps=[0.05], tokens=2, ended=1.0), True),
        (Answered(1, first=0.4, tokens=1, ended=1.0), True),
        (Answered(2, first=0.6, gaps=[0.01], tokens=2, ended=1.0), False),
        (Answered(3, first=0.4, gaps=[0.01, 0.1], tokens=3, ended=1.0), False),
        (Answered(3, first=0.4, gaps=[0.01], tokens=2, ended=1.0), False),
        (Answered(2, first=0.4, gaps=[0.01], tokens=2), False),
        (Answered(2), False),
    ],
)
def test_a_good_answer_keeps_to_both_limits(answer: Answered, good: bool) -> None:
    assert Limits(first=0.5, token=0.05).kept(answer) is good


def test_quantiles_and_parts() -> None:
    assert quantiles([]) == {} and quantiles([3.0]) == {"p50": 3.0, "p99": 3.0}
    assert quantiles([float(n) for n in range(101)]) == {"p50": 50.0, "p99": 99.0}
    assert in_parts([0.0, 0.9, 1.0, 4.9, 5.0], 5.0) == [2.0, 1.0, 0.0, 0.0, 1.0]


def test_a_closed_loop_keeps_so_many_under_way(url: str) -> None:
    found = Load(url, Limits()).closed(repeat(asked(4)), 3, 0.5)
    assert found.concurrency == 3 and found.rate is None and not found.failed and not found.unfinished
    # An answer takes two steps: three clients get less than three in two steps, and most of them.
    assert 0.4 * 3 / (2 * STEP) < found.completed < 3 / (2 * STEP)
    assert (
        found.completed <= found.good <= found.completed + 3 / 0.5 and not found.miscounted
    )  # the last ones end later
    assert found.first["p50"] >= STEP and STEP / 2 <= found.token["p50"] < 5 * STEP


def test_times_beside_something_are_of_that_time_alone(url: str) -> None:
    found = Load(url, Limits()).beside(repeat(asked(4)), 2, 0.2, lambda: time.sleep(0.3))
    assert found.requests >= 8 and found.seconds == pytest.approx(0.3, abs=0.1) and not found.failed
    nothing = Load(url, Limits()).beside(repeat(asked(4)), 2, 0.1, lambda: None)
    assert nothing.token == {} and nothing.requests >= 2
    with pytest.raises(ValueError, match="it broke"):
        Load(url, Limits()).beside(repeat(asked(4)), 2, 0.1, lambda: broken("it broke"))


def broken(words: str) -> None:
    raise ValueError(words)


def test_a_closed_loop_ends_with_its_time(url: str) -> None:
    begin = time.perf_counter()
    found = Load(url, Limits(), patience=0.2).closed(repeat(asked(4, do="hang")), 2, 0.3)
    assert time.perf_counter() - begin < 5 and found.unfinished == 2 and not found.completed
    assert found.first["p50"] == pytest.approx(STEP, abs=0.2)


def test_who_waits_in_vain_has_waited(url: str) -> None:
    found = Measured.of([Answered(2, begun=1.0), Answered(2, begun=2.0)], Limits(), 3.0, 63.0, rate=1.0)
    assert found.first["p50"] == pytest.approx(61.5) and found.unfinished == 2


def test_gaps_of_a_part_of_a_load() -> None:
    answer = Answered(4, begun=1.0, first=0.5, gaps=[0.25, 0.5, 1.0], tokens=4, ended=2.25)
    assert answer.gaps_within(1.7, 2.3) == [0.25, 0.5] and answer.gaps_within(0.0, 9.0) == [0.25, 0.5, 1.0]


def test_an_open_loop_does_not_wait_for_answers(url: str) -> None:
    found = Load(url, Limits()).open(repeat(asked(20, made=20)), 100.0, 0.5, seed=1)
    assert 25 < found.requests < 90 and found.rate == 100.0 and found.concurrency is None
    assert found.good * 0.5 == pytest.approx(found.requests)  # one client would have got two answers
    again = Load(url, Limits()).open(repeat(asked(20, made=20)), 100.0, 0.5, seed=1)
    assert again.requests == found.requests


def test_what_goes_wrong_is_counted(url: str) -> None:
    load = Load(url, Limits(), patience=0.3)
    kinds = [asked(4), asked(4, do="refuse"), asked(4, do="fail"), asked(6), asked(4, do="hang")]
    kinds += [asked(4, do="abort")]
    found = load.open(itertools.chain(kinds, repeat(asked(4))), 200.0, 0.1, seed=3)
    assert found.requests >= 6 and found.unfinished == 1 and found.failed == 3 and found.miscounted == 1
    assert [error[:5] for error in found.errors] == ["400: ", "abort", "{'mes"]
    nobody = Load("http://127.0.0.1:9", Limits()).open(repeat(asked(4)), 100.0, 0.05, seed=1)
    assert nobody.failed == nobody.requests > 0 and "Connect" in nobody.errors[0]


def measured(**changes: Any) -> Measured:
    answers = [Answered(2, first=0.1, gaps=[0.01], tokens=2, ended=1.0)] * 4
    return Measured(**{**vars(Measured.of(answers, Limits(), 2.0, 2.0, rate=2.0)), **changes})


def test_a_load_that_tells_nothing_ends_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.kept("chat", measured(), {"gpu_busy": 0.5})["gpu_busy"] == 0.5
    assert "chat, 2 a second: 2 good a second, 0 failed, 0 unfinished" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="chat, 2 a second: 1 answers have another number of tokens"):
        serve.kept("chat", measured(miscounted=1), {})
    with pytest.raises(RuntimeError, match="no request was answered: 400: too long"):
        serve.kept("chat", measured(failed=4, first={}, errors=["400: too long"]), {})


def test_both_servers_are_asked_the_same() -> None:
    questions = Questions(SMALL)
    ours, theirs = (list(islice(questions.requests(5, ours=own), 60)) for own in (True, False))
    names = [each.body["sampling_params"]["custom_params"]["pool"] for each in ours]
    assert {*names} == {"load-0", "load-1", "load-2"} and names.count("load-0") > names.count("load-2")
    for own, other, name in zip(ours, theirs, names, strict=True):
        prefix = questions.prefixes[int(name[-1])]
        ids = other.body["input_ids"]
        assert ids[: len(prefix)] == prefix and own.tokens == other.tokens == SMALL.answer
        assert own.body["text"] in questions.tokenizer.decode(ids[len(prefix) :])
    assert len({each.body["text"] for each in ours}) == 60
    assert questions.prefixes[0][:40] != questions.prefixes[1][:40]


def test_lengths() -> None:
    chats = list(islice(Chat(SMALL).requests(1, ours=True), 4000))
    mean = sum(each.tokens for each in chats) / len(chats)
    assert 0.8 * CHAT_ANSWER < mean < 1.1 * CHAT_ANSWER  # the longest ones are cut
    assert all(4 <= len(each.body["input_ids"]) <= 1024 for each in chats)
    for each in islice(Long(SMALL).requests(1, ours=False), 100):
        assert 20 <= len(each.body["input_ids"]) <= 30 and each.tokens == 5


def arguments(**changes: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **changes})


def test_servers_of_the_mixes() -> None:
    assert list(serve.servers(arguments(stock_backend=["fa3"]))) == [
        ("ours", "dbsa", ["questions", "chat", "encoding"]),
        ("ours", "double_p", ["long"]),
        ("ours", "cascade", ["streams"]),
        ("stock", "fa3", [*MIXES, "encoding"]),
    ]
    assert [*serve.servers(arguments(mixes=["streams"], roles=["ours"]))] == [("ours", "cascade", ["streams"])]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-total-tokens 20000 --mixes long", "--long 32768 65536 with --decoded 512 (long): 66048 tokens, and"),
        ("--max-total-tokens 20000", "--pools 8 of --pool-tokens 30000 (questions): 240000 tokens, and"),
        ("--encoded 200000 --mixes encoding", "--encoded 200000, which is replaced (encoding): 400000 tokens, and"),
        ("--long 9 8", "--long 9 8: expected the least tokens first"),
        ("--concurrency 0", "expected numbers above 0"),
        ("--shares -1", "expected numbers above 0"),
        ("--rates 0", "expected numbers above 0"),
    ],
)
def test_sizes_that_do_not_go_together(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", *words.split()]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("rates", "expected"), [(None, [20.0, 40.0]), ([7.0, 9.0], [7.0, 9.0])])
def test_either_server_gets_the_same_rates(
    rates: list[float] | None, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock SGLang gets the shares of what it can do itself, too."""
    for name, stub in {
        "closed": lambda made, *_: {"completed": 40.0 if made.ours else 10.0},
        "open": lambda *given: given[-1],
        "freeze": lambda _: None,
        "forget": lambda _: None,
    }.items():
        monkeypatch.setattr(serve.ServerLoads, name, stub)
    raw: Any = {}
    server: Any = SimpleNamespace(url="", call=lambda *_: None)
    for ours in (True, False):
        made = serve.ServerLoads(server, arguments(shares=[0.5, 1.0], rates=rates, concurrency=[8]), ours=ours)
        made.load = SimpleNamespace(closed=lambda *_: None)  # type: ignore[assignment]
        made.measure("chat", raw, "x")
    assert raw["ours"]["x"]["open"] == raw["stock"]["x"]["open"] == expected
    assert (raw["ours"]["x"]["own"], raw["stock"]["x"]["own"]) == ([], [5.0, 10.0])


def loads(good: float, first: float) -> Any:
    one = {**measured(good=good, good_parts=[good] * 5, first={"p50": first, "p99": 2 * first}).record()}
    return {"closed": [{**one, "concurrency": 8, "rate": None}], "open": [one], "own": [{**one, "good": good - 0.1}]}


def test_rows_have_the_best_of_stocks_backends() -> None:
    raw = {
        "questions": {
            "ours": {"dbsa": loads(9.0, 0.1)},
            "stock": {"fa3": loads(2.5, 0.4), "flashinfer": loads(2.0, 0.3)},
        },
        "chat": {"ours": {"dbsa": loads(1.0, 0.1)}},
        "encoding": {
            "ours": {"dbsa": {"alone": loads(1, 0.1)["open"][0], "beside": loads(1, 0.1)["open"][0]}},
            "stock": {},
        },
    }
    rows = compare(raw, arguments())
    best = rows[0]
    assert best.baseline == "stock SGLang on fa3" and best.ratio == 3.6 and best.met and best.unit == "a second"
    assert [row.ratio for row in rows if "to the first token, 99th" in row.name] == [4.0, None]
    [chat] = [row for row in rows if row.name.startswith("plain chat") and "goodput" in row.name]
    assert chat.baseline == "" and chat.met is None
    [encoding] = [row for row in rows if "encoded and replaced" in row.name]
    assert encoding.met and encoding.ratio == 1.0
    lines = curves(raw)
    assert [each.y for each in lines[:2]] == ["good answers a second", "s to the first token, 99th percentile"]
    assert lines[0].series["stock on fa3"] == [(2.0, 2.5)]


def test_a_server_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_serve_watch, "LOOK_SECONDS", 0.01)
    answers, waited = iter([[(1, 0)], [(2, 1)], [(0, 0)]]), iter([1.5, 4.0])

    def call(_method: str, path: str) -> dict[str, Any]:
        if path == "/server_info":
            return {"internal_states": [{"sglang_ext": {"compiled": {"kernels": 2, "seconds": next(waited)}}}]}
        under_way = next(answers, [(0, 0)])
        return {"loads": [{"num_running_reqs": runs, "num_waiting_reqs": waits} for runs, waits in under_way]}

    server: Any = SimpleNamespace(pid=os.getpid(), call=call)
    with _serve_watch.watched(server) as cost:
        sum(number**2 for number in range(1_000_000))
        threading.Event().wait(0.1)
    record = cost.record(2)
    assert record["compiled_seconds"] == 2.5
    assert record["most_running"] == 2 and 0 < record["processor_ms_a_request"] < 10_000
    _serve_watch.settle(server, 1.0)
    busy: Any = SimpleNamespace(call=lambda *_: {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 1}]})
    with pytest.raises(RuntimeError, match="requests are under way 0 s after a load"):
        _serve_watch.settle(busy, 0.05)


@pytest.mark.parametrize("rate", (0.05, 7.0))
def test_an_open_loop_has_at_least_one_request(rate: float) -> None:
    counts = []
    for seed in range(200):
        times = arrivals(random.Random(seed), rate, 6.0)
        assert times == sorted(times) == arrivals(random.Random(seed), rate, 6.0) and times[0] > 0
        assert len(times) == 1 or times[-1] < 6.0
        counts.append(len(times))
    assert statistics.fmean(counts) == pytest.approx(max(rate * 6.0, 1.0), rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_engines")
def test_two_servers_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--shape tiny --mixes questions long encoding --max-total-tokens 9000 --pools 2 --pool-tokens 1500"
    long = "--long 5000 6000 --decoded 4 --encoded 1500"  # they do not fit beside the pools of the questions
    loads = "--seconds 3 --concurrency 2 --shares 0.5 --stock-backend torch_native --kernels torch"
    out = tmp_path / "rows.json"
    words = ["bench", "serve", *sizes.split(), *long.split(), *loads.split(), "--out", str(out)]
    assert cli.main(words) == 0, capsys.readouterr()
    record = json.loads(out.read_text())
    for role, mix in itertools.product(("ours", "stock"), ("questions", "long")):
        [found] = record["loads"][mix][role].values()
        for load in (*found["closed"], *found["open"], *found["own"]):
            assert load["requests"] and not load["failed"] and not load["unfinished"] and not load["miscounted"]
        assert len(found["own"]) == (role == "stock")
    [ours] = record["loads"]["encoding"]["ours"].values()
    assert ours["beside"]["token"] and ours["beside"]["seconds"] > 0
    names = [figure["name"] for figure in record["figures"]]
    assert "questions over pools: goodput (500 ms to the first token, 50 ms a token)" in names
    assert "a token while a pool of 1500 tokens is encoded and replaced, 99th percentile" in names
