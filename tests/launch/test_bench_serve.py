"""`sglang-ext bench serve`: loads on a server that says how long it takes, and the rows that follow from loads."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import threading
from collections.abc import Iterator
from itertools import islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from sglang_ext.launch import cli
from sglang_ext.launch.bench import _serve_watch, serve
from sglang_ext.launch.bench._serve_load import Answered, Limits, Load, LoadRequest, Measured, in_parts, quantiles
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
        meta = {"completion_tokens": count, "finish_reason": {"type": "length"} if ends else None}
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
        (Answered(2, first=0.4, gaps=[0.05], tokens=2, finished=True), True),
        (Answered(1, first=0.4, tokens=1, finished=True), True),
        (Answered(2, first=0.6, gaps=[0.01], tokens=2, finished=True), False),
        (Answered(3, first=0.4, gaps=[0.01, 0.1], tokens=3, finished=True), False),
        (Answered(3, first=0.4, gaps=[0.01], tokens=2, finished=True), False),
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
    assert found.good == pytest.approx(found.completed) and not found.miscounted
    assert found.first["p50"] >= STEP and STEP / 2 <= found.token["p50"] < 5 * STEP


def test_a_closed_loop_goes_on_beside_something(url: str) -> None:
    calls = iter([True] * 8)
    found = Load(url, Limits()).closed(repeat(asked(2, made=2)), 1, 0.0, lambda: next(calls, False))
    assert found.requests == 8


def test_an_open_loop_does_not_wait_for_answers(url: str) -> None:
    found = Load(url, Limits()).open(repeat(asked(20, made=20)), 100.0, 0.5, seed=1)
    assert 25 < found.requests < 90 and found.rate == 100.0 and found.concurrency is None
    assert found.good * 0.5 == pytest.approx(found.requests)  # one client would have got two answers
    again = Load(url, Limits()).open(repeat(asked(20, made=20)), 100.0, 0.5, seed=1)
    assert again.requests == found.requests


def test_what_goes_wrong_is_counted(url: str) -> None:
    load = Load(url, Limits(), patience=0.3)
    kinds = [asked(4), asked(4, do="refuse"), asked(4, do="fail"), asked(6), asked(4, do="hang")]
    found = load.open(iter([*kinds, *repeat(asked(4), 10_000)]), 200.0, 0.05, seed=3)
    assert found.requests >= 5 and found.unfinished == 1 and found.failed == 2 and found.miscounted == 1
    assert [error[:5] for error in found.errors] == ["400: ", "{'mes"]
    nobody = Load("http://127.0.0.1:9", Limits()).open(repeat(asked(4)), 100.0, 0.05, seed=1)
    assert nobody.failed == nobody.requests > 0 and "Connect" in nobody.errors[0]


def measured(**changes: Any) -> Measured:
    answers = [Answered(2, first=0.1, gaps=[0.01], tokens=2, finished=True)] * 4
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
        ("ours", "double_p", ["questions", "chat", "long", "encoding"]),
        ("ours", "cascade", ["streams"]),
        ("stock", "fa3", [*MIXES, "encoding"]),
    ]
    assert [*serve.servers(arguments(mixes=["streams"], roles=["ours"]))] == [("ours", "cascade", ["streams"])]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-total-tokens 20000", "--long 32768 65536, --decoded 512: expected at least and at most"),
        ("--concurrency 0", "expected numbers above 0"),
        ("--shares -1", "expected numbers above 0"),
    ],
)
def test_sizes_that_do_not_go_together(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", *words.split()]) != 0
    assert message in capsys.readouterr().err


def loads(good: float, first: float) -> Any:
    one = {**measured(good=good, good_parts=[good] * 5, first={"p50": first, "p99": 2 * first}).record()}
    return {"closed": [{**one, "concurrency": 8, "rate": None}], "open": [one]}


def test_rows_have_the_best_of_stocks_backends() -> None:
    raw = {
        "questions": {
            "ours": {"double_p": loads(9.0, 0.1)},
            "stock": {"fa3": loads(2.5, 0.4), "flashinfer": loads(2.0, 0.3)},
        },
        "chat": {"ours": {"double_p": loads(1.0, 0.1)}},
        "encoding": {
            "ours": {"double_p": {"alone": loads(1, 0.1)["open"][0], "beside": loads(1, 0.1)["open"][0]}},
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
    answers = iter([[(1, 0)], [(2, 1)], [(0, 0)]])
    call = lambda *_: {  # noqa: E731
        "loads": [
            {"num_running_reqs": running, "num_waiting_reqs": waiting} for running, waiting in next(answers, [(0, 0)])
        ]
    }
    server: Any = SimpleNamespace(pid=os.getpid(), call=call)
    with _serve_watch.watched(server) as cost:
        sum(number**2 for number in range(1_000_000))
        threading.Event().wait(0.1)
    record = cost.record(2)
    assert record["most_running"] == 2 and 0 < record["processor_ms_a_request"] < 10_000
    _serve_watch.settle(server, 1.0)
    busy: Any = SimpleNamespace(call=lambda *_: {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 1}]})
    with pytest.raises(RuntimeError, match="requests are under way 0 s after a load"):
        _serve_watch.settle(busy, 0.05)


@pytest.mark.slow
def test_two_servers_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = (
        "--shape tiny --mixes questions encoding --max-total-tokens 12000 --pools 2 --pool-tokens 600 --encoded 1500"
    )
    loads = "--seconds 1 --concurrency 2 --shares 0.5 --stock-backend torch_native --kernels torch"
    out = tmp_path / "rows.json"
    assert cli.main(["bench", "serve", *sizes.split(), *loads.split(), "--out", str(out)]) == 0, capsys.readouterr()
    record = json.loads(out.read_text())
    for role in ("ours", "stock"):
        [found] = record["loads"]["questions"][role].values()
        for load in (*found["closed"], *found["open"]):
            assert load["requests"] and not load["failed"] and not load["unfinished"] and not load["miscounted"]
    assert [figure["name"].split(",")[0].split(":")[0] for figure in record["figures"]][::4] == [
        "questions over pools",
        "a token while a pool of 1500 tokens is encoded and replaced",
    ]
