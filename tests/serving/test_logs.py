"""Pools in the log of requests: which answers have a line, and what it says."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.serving import access
from sglang_ext.serving.errors import UnknownPool
from sglang_ext.serving.logs import logged

USED = {"pool": "a", "version": 3, "blocks": [0, 2], "stitched_tokens": 9, "retrieval_ms": 0.5}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(json.loads(record.getMessage()))


def run(answers: list[Any], form: str = "json", on: bool = True, custom: Any = None) -> tuple[list[Any], list[Any]]:
    """(what comes through, the lines of the log); an answer that is an exception is raised."""
    lines, target = Lines(), logging.Logger("of a test", logging.INFO)
    target.addHandler(lines)
    log = SimpleNamespace(log_requests=on, log_requests_format=form, targets=[target])
    obj = SimpleNamespace(rid="r", sampling_params={"custom_params": custom})
    through: list[Any] = []

    async def source() -> AsyncGenerator[Any, None]:
        for each in answers:
            if isinstance(each, Exception):
                obj.rid = []  # as a quota does
                raise each
            yield each

    async def read() -> None:
        async for each in logged(source(), SimpleNamespace(request_logger=log), obj):
            through.append(each)

    try:
        asyncio.run(read())
    except UnknownPool as error:
        through.append(error)
    return through, lines.found


def answer(id: str, finish: str | None, used: Any = USED) -> dict[str, Any]:
    reason = None if finish is None else {"type": finish}
    return {
        "meta_info": {
            "id": id,
            "finish_reason": reason,
            "completion_tokens": 4,
            **({"sglang_ext": used} if used else {}),
        }
    }


def test_each_answer_over_a_pool_has_a_line_when_it_ends() -> None:
    given = [answer("x", None), [answer("x", "stop"), answer("y", "length"), answer("plain", "stop", None)]]
    through, lines = run(given)
    assert through == given
    assert [(line["event"], line["rid"], line["finish_reason"]) for line in lines] == [
        ("sglang_ext.answered", "x", "stop"),
        ("sglang_ext.answered", "y", "length"),
    ]
    said = {name: lines[0][name] for name in ("pool", "version", "blocks", "retrieval_ms", "completion_tokens")}
    assert said == {"pool": "a", "version": 3, "blocks": 2, "retrieval_ms": 0.5, "completion_tokens": 4}
    assert "timestamp" in lines[0]


@pytest.mark.parametrize("custom", [{"pool": "none"}, None, "no object"])
def test_a_failure_over_a_pool_has_a_line(custom: Any) -> None:
    error = UnknownPool("none", [])
    through, lines = run([error], custom=custom)
    assert through == [error]
    expected = [("sglang_ext.failed", "r", "none", str(error))] if isinstance(custom, dict) else []
    assert [(line["event"], line["rid"], line["pool"], line["error"]) for line in lines] == expected


def test_lines_name_the_tenant_whose_pool_it_is() -> None:
    before = access._tenant.set("acme")
    try:
        found = [*run([answer("x", "stop")])[1], *run([UnknownPool("a", [])], custom={"pool": "a"})[1]]
    finally:
        access._tenant.reset(before)
    assert [(line["event"], line["pool"], line["tenant"]) for line in found] == [
        ("sglang_ext.answered", "a", "acme"),
        ("sglang_ext.failed", "a", "acme"),
    ]
    assert "tenant" not in run([answer("x", "stop")])[1][0]


@pytest.mark.parametrize(("form", "on"), [("text", True), ("json", False)])
def test_other_logs_have_none(form: str, on: bool) -> None:
    given = [answer("x", "stop")]
    assert run(given, form, on) == (given, [])
