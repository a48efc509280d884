"""What counts as an answer, in the commands that ask for many."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.launch import answers, cli, demo, demo_methods
from sglang_ext.launch.answers import FailedAnswers, completed, counted, failure
from sglang_ext.launch.bench import _cascade_engine, _dbsa_engine, _double_p_engine, _ltri_engine, _quality_engine
from sglang_ext.launch.bench._quality_tasks import QualityTask
from sglang_ext.launch.client import ServerError

META = {"prompt_tokens": 4, "cached_tokens": 2, "completion_tokens": 1}
GOOD: dict[str, Any] = {"text": "red", "meta_info": {**META, "finish_reason": {"type": "stop"}}}
ABORTED: dict[str, Any] = {"text": "", "meta_info": {**META, "finish_reason": {"type": "abort", "message": "no room"}}}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (GOOD, None),
        ({"text": "r", "meta_info": {"finish_reason": {"type": "length", "length": 1}}}, None),
        ({"text": "r", "meta_info": {"finish_reason": None}}, None),
        ({"text": "r", "meta_info": {}}, None),
        (ABORTED, "no room"),
        ({"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": None}}}, "aborted, for a reason"),
        ({"error": {"message": "too long", "code": 400}}, "too long"),
        ({"error": "HTTP 503: full"}, "HTTP 503: full"),
    ],
)
def test_why_an_answer_is_none(answer: dict[str, Any], reason: str | None) -> None:
    found = failure(answer)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_reasons_are_counted() -> None:
    assert counted(["a", "b", "b"]) == "b (2 times); a"
    many = [str(number) for number in range(answers.SHOWN + 3)]
    assert counted(many).endswith("; and 3 for other reasons")
    assert completed([GOOD, GOOD]) == [GOOD, GOOD] and completed(GOOD) is GOOD
    with pytest.raises(FailedAnswers, match=r"1 of 2 answers failed: no room"):
        completed([GOOD, ABORTED])


class Engine:
    """Gives the answers it was made with, one a prompt."""

    def __init__(self, *given: dict[str, Any]) -> None:
        self.given = given
        self.loop = asyncio.new_event_loop()

    def generate(self, input_ids: list[Any], **_: Any) -> Any:
        return list(self.given) if isinstance(input_ids[0], list) else self.given[0]

    async def async_generate(self, **_: Any) -> Any:
        return self.given[0]


def test_no_benchmark_measures_failed_answers() -> None:
    """Each place where a benchmark asks an engine."""
    two = Engine(ABORTED, GOOD)
    task = QualityTask("t", [[1], [2]], ["red", "red"], 1, str.strip, 1)
    method = SimpleNamespace(options={}, reports=False, finds=False)
    served = _double_p_engine.Served(two, [[1], [2]])
    for measured in (
        lambda: _cascade_engine.timed(two, [1]),
        lambda: _dbsa_engine.Loop(two).run([{}, {}], 2),
        served.prefill,
        lambda: served.decode(1),
        lambda: _ltri_engine.stepping(two, 1, 1, 2, 3),  # type: ignore[arg-type]
        lambda: _quality_engine.Asker(two, method).ask(task, {}),  # type: ignore[arg-type]
    ):
        with pytest.raises(FailedAnswers, match="no room"):
            measured()


def bench(answers: list[Any]) -> demo_methods.Bench:
    """The demo's methods on a server that gives these answers, over and over; an error is raised."""

    def call(*_: Any) -> Any:
        answer = answers[call.at % len(answers)]  # type: ignore[attr-defined]
        call.at += 1  # type: ignore[attr-defined]
        if isinstance(answer, Exception):
            raise answer
        return answer

    call.at = 0  # type: ignore[attr-defined]
    made = object.__new__(demo_methods.Bench)
    made.server = SimpleNamespace(call=call)  # type: ignore[assignment]
    queries = [{"input": f"q{at}", "output": "red"} for at in range(3)]
    made.task = SimpleNamespace(queries=queries)  # type: ignore[assignment]
    made.concurrency, made.ratio, made.new_tokens, made.encode_seconds = 1, 0.3, 4, 0.0
    return made


def test_the_demo_counts_failed_answers() -> None:
    row = bench([GOOD, GOOD, ABORTED, ServerError("HTTP 503: full")]).dbsa()  # the first one warms up
    assert row.predictions == ["red", None, None] and row.correct == 1 and row.accuracy == pytest.approx(1 / 3)
    assert row.failures == ["no room", "HTTP 503: full"] and row.prompt_tokens == 4
    assert bench([GOOD]).dbsa().failures == []
    with pytest.raises(ServerError, match=r"all 3 answers failed: no room \(3 times\)"):
        bench([ABORTED]).dbsa()


def test_the_demos_exit_status_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"method": "DBSA", "queries": 3, "failures": ["no room"] * 2}, {"method": "Fixed ICL", "failures": []}]
    monkeypatch.setattr(demo, "run", lambda *_: {"rows": rows})
    monkeypatch.setattr(demo, "describe", lambda _: "a table")
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    assert cli.main(["demo"]) == 1
    said = capsys.readouterr()
    assert said.out == "a table\n"
    assert said.err == "DBSA: 2 of 3 answers failed and count as wrong: no room (2 times)\n"
