"""Load on a running server over HTTP, in open loops (Poisson arrivals) and closed ones, and what its clients see.

Every answer is streamed. The server says with each piece how many tokens the answer has, so that times between tokens
are known whatever their text is, and no token is counted twice.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

import aiohttp

from sglang_ext.types import JsonObject

PATIENCE = 60.0
"""Seconds that answers may take once no request begins any more; those that take longer count as unfinished."""
HUNDREDTHS = 100
PARTS = 5
"""Parts of a load that tell how much it varies."""


@dataclass(frozen=True)
class LoadRequest:
    """A request of `/generate`.

    Attributes:
        body: of it, without `stream`.
        tokens: of the answer; it ends with no other number.
    """

    body: JsonObject
    tokens: int


@dataclass
class Answered:
    """What a client saw of one request.

    Attributes:
        wanted: tokens that the answer should have.
        begun: seconds from the begin of the load to that of the request.
        first: seconds until the first token; None where there was none.
        gaps: seconds from each token to the next; tokens that came together share the time, but those that came with
            the first one have none.
        tokens: of the answer.
        finished: whether the answer ended as it should.
        error: what the server or the connection said where it did not.
    """

    wanted: int
    begun: float = 0.0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    finished: bool = False
    error: str = ""

    def count(self, tokens: int, seconds: float, since: float) -> None:
        """Have seen so many tokens of the answer after some seconds, and the ones before after `since`."""
        new = tokens - self.tokens
        if self.first is None:
            self.first = seconds
        else:
            self.gaps += [(seconds - since) / new] * new
        self.tokens = tokens


@dataclass(frozen=True)
class Limits:
    """What a good answer keeps to.

    Attributes:
        first: seconds to the first token, at most.
        token: seconds a token behind it, on average over the answer, at most.
    """

    first: float = 0.5
    token: float = 0.05

    def kept(self, answer: Answered) -> bool:
        """Whether an answer ended, with all of its tokens, in time."""
        if not answer.finished or answer.first is None or answer.tokens != answer.wanted:
            return False
        return answer.first <= self.first and (not answer.gaps or statistics.fmean(answer.gaps) <= self.token)


@dataclass(frozen=True)
class Measured:
    """One load, as its clients saw it.

    Attributes:
        rate: requests a second that were offered; None in a closed loop.
        concurrency: requests under way in a closed loop; None in an open one.
        seconds: for which requests began.
        requests: that began.
        completed: answers that ended a second, until the last one had ended.
        good: answers within the limits, of a second in which requests began.
        good_parts: the same of each fifth of this time.
        unfinished: requests whose answers took too long after the load.
        failed: requests that the server refused, or whose connection ended; `errors` has some of their messages.
        miscounted: answers that ended with another number of tokens than were asked for.
        first: seconds to the first token: {"p50": ..., "p99": ...}.
        token: seconds from a token to the next, of all answers, likewise.
    """

    rate: float | None
    concurrency: int | None
    seconds: float
    requests: int
    completed: float
    good: float
    good_parts: list[float]
    unfinished: int
    failed: int
    miscounted: int
    first: dict[str, float]
    token: dict[str, float]
    errors: list[str]

    @classmethod
    def of(
        cls, answers: Sequence[Answered], limits: Limits, seconds: float, whole: float, **load: float | None
    ) -> Measured:
        """Of the answers to requests that began within `seconds`; the last one ended after `whole`."""
        finished = [each for each in answers if each.finished]
        errors = [each.error for each in answers if each.error]
        concurrency = load.get("concurrency")
        return cls(
            rate=load.get("rate"),
            concurrency=None if concurrency is None else int(concurrency),
            seconds=seconds,
            requests=len(answers),
            completed=len(finished) / whole,
            good=sum(map(limits.kept, answers)) / seconds,
            good_parts=in_parts([each.begun for each in answers if limits.kept(each)], seconds),
            unfinished=sum(not each.finished and not each.error for each in answers),
            failed=len(errors),
            miscounted=sum(each.tokens != each.wanted for each in finished),
            first=quantiles([each.first for each in finished if each.first is not None]),
            token=quantiles([gap for each in finished for gap in each.gaps]),
            errors=sorted(set(errors))[:3],
        )

    def record(self) -> JsonObject:
        """For a results file."""
        return asdict(self)


def in_parts(times: Sequence[float], seconds: float) -> list[float]:
    """How many of some times, between 0 and `seconds`, lie in each of `PARTS` equal parts, a second."""
    part = seconds / PARTS
    return [sum(number * part <= at < (number + 1) * part for at in times) / part for number in range(PARTS)]


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """The 50th and the 99th percentile; nothing of nothing."""
    if len(seconds) < 2:
        return {name: value for value in seconds for name in ("p50", "p99")}
    found = statistics.quantiles(seconds, n=HUNDREDTHS, method="inclusive")
    return {"p50": found[49], "p99": found[98]}


async def ask(session: aiohttp.ClientSession, url: str, asked: LoadRequest, begun: float) -> Answered:
    """Send one request, and see its answer through; what goes wrong is in the answer."""
    answer = Answered(asked.tokens, begun)
    begin = time.perf_counter()
    since = 0.0
    try:
        async with session.post(f"{url}/generate", json={**asked.body, "stream": True}) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:300]}"
                return answer
            async for line in response.content:
                piece = _piece(line)
                if piece is None:
                    continue
                if "error" in piece:
                    answer.error = str(piece["error"])[:300]
                    return answer
                meta, seconds = piece["meta_info"], time.perf_counter() - begin
                if meta["completion_tokens"] > answer.tokens:
                    answer.count(meta["completion_tokens"], seconds, since)
                    since = seconds
                answer.finished = meta["finish_reason"] is not None
    except (aiohttp.ClientError, ConnectionError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.finished and not answer.error:
        answer.error = "the answer ended without a reason"
    return answer


def _piece(line: bytes) -> JsonObject | None:
    """What one line of a streamed answer says; None for a line between two pieces and for the last one."""
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return None
    found: JsonObject = json.loads(line[len(b"data: ") :])
    return found


Begin: TypeAlias = Callable[[LoadRequest], "asyncio.Task[Answered]"]
"""Sends a request."""


class Load:
    """A load on a server, with a connection for each request under way.

    Args:
        url: of the server.
        limits: what a good answer keeps to.
        patience: seconds that answers may take once no request begins any more.
    """

    def __init__(self, url: str, limits: Limits, patience: float = PATIENCE) -> None:
        self.url, self.limits, self.patience = url, limits, patience

    def open(self, requests: Iterator[LoadRequest], rate: float, seconds: float, seed: int) -> Measured:
        """Requests that arrive at random, `rate` of them a second on average, whatever the server does."""
        dice = random.Random(seed)

        async def arrive(begin: Begin) -> None:
            at, started = dice.expovariate(rate), time.perf_counter()
            while at < seconds:
                await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
                begin(next(requests))
                at += dice.expovariate(rate)
            await asyncio.sleep(max(0.0, started + seconds - time.perf_counter()))

        answers, whole = asyncio.run(self._run(arrive))
        return Measured.of(answers, self.limits, seconds, whole, rate=rate)

    def closed(
        self,
        requests: Iterator[LoadRequest],
        concurrency: int,
        seconds: float,
        beside: Callable[[], bool] = lambda: False,
    ) -> Measured:
        """As many requests under way at any time; each answer is followed by another request.

        Args:
            requests: one after the other.
            concurrency: requests under way.
            seconds: for which requests begin.
            beside: whether something goes on beside them, for which requests begin longer.
        """

        async def arrive(begin: Begin) -> None:
            started = time.perf_counter()

            async def client() -> None:
                while time.perf_counter() - started < seconds or beside():
                    await begin(next(requests))

            await asyncio.gather(*(client() for _ in range(concurrency)))

        answers, whole = asyncio.run(self._run(arrive))
        # The loop ends with its last answers: all of this time is the load's.
        return Measured.of(answers, self.limits, whole, whole, concurrency=concurrency)

    async def _run(self, arrive: Callable[[Begin], Awaitable[None]]) -> tuple[list[Answered], float]:
        """(answers, seconds until the last one) of what arrives."""
        tasks: list[asyncio.Task[Answered]] = []
        asked: list[LoadRequest] = []
        started = time.perf_counter()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session:

            def begin(each: LoadRequest) -> asyncio.Task[Answered]:
                asked.append(each)
                tasks.append(asyncio.create_task(ask(session, self.url, each, time.perf_counter() - started)))
                return tasks[-1]

            await arrive(begin)
            if tasks:
                await asyncio.wait(tasks, timeout=self.patience)
            whole = time.perf_counter() - started
            answers = [
                task.result() if task.done() else Answered(each.tokens)  # unfinished
                for task, each in zip(tasks, asked, strict=True)
            ]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return answers, whole
