"""Load on a running server over HTTP, in open loops (Poisson arrivals) and closed ones, and what its clients see.

Every answer is streamed. The server says with each piece how many tokens the answer has, so that times between tokens
are known whatever their text is, and no token is counted twice.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import aiohttp

from sglang_ext.types import JsonObject

PATIENCE = 60.0
"""Seconds that answers may take once no request begins any more; those that take longer count as unfinished."""
HUNDREDTHS = 100
JSON = {"Content-Type": "application/json"}
PARTS = 5
"""Parts of a load that tell how much it varies."""


@dataclass(frozen=True)
class LoadRequest:
    """A request of `/generate`.

    Attributes:
        body: of it, without `stream`.
        tokens: of the answer; it ends with no other number.
        headers: beside the body's type.
    """

    body: JsonObject
    tokens: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def data(self) -> bytes:
        """The body, as it is sent."""
        return json.dumps({**self.body, "stream": True}).encode()


@dataclass
class Answered:
    """What a client saw of one request.

    Attributes:
        wanted: tokens that the answer should have.
        begun: seconds from the begin of the load to when the request was due.
        first: seconds from then to the first token; None where there was none.
        ended: seconds from then to the end; None where the answer did not end.
        gaps: seconds from each token to the next; tokens that came together share the time, but those that came with
            the first one have none.
        tokens: of the answer.
        error: what the server or the connection said where it did not.
    """

    wanted: int
    begun: float = 0.0
    first: float | None = None
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""

    @property
    def finished(self) -> bool:
        """Whether the answer ended as it should."""
        return self.ended is not None and not self.error

    def count(self, tokens: int, seconds: float, since: float) -> None:
        """Have seen so many tokens of the answer after some seconds, and the ones before after `since`."""
        new = tokens - self.tokens
        if self.first is None:
            self.first = seconds
        else:
            self.gaps += [(seconds - since) / new] * new
        self.tokens = tokens

    def gaps_within(self, begin: float, end: float) -> list[float]:
        """Times between tokens of which the later one came in a part of the load."""
        if self.first is None:
            return []
        times = itertools.accumulate(self.gaps, initial=self.begun + self.first)
        return [gap for gap, at in zip(self.gaps, itertools.islice(times, 1, None), strict=True) if begin <= at <= end]


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
        completed: answers that ended within these, a second.
        good: answers within the limits to requests that began, a second.
        good_parts: the same of each fifth of this time.
        unfinished: requests whose answers took too long after the load.
        failed: requests that the server refused, or whose connection ended; `errors` has some of their messages.
        miscounted: answers that ended with another number of tokens than were asked for.
        first: seconds to the first token: {"p50": ..., "p99": ...}; at least the time that was waited where none came.
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
        cls,
        answers: Sequence[Answered],
        limits: Limits,
        seconds: float,
        whole: float,
        rate: float | None = None,
        concurrency: int | None = None,
        within: tuple[float, float] = (0.0, math.inf),
    ) -> Measured:
        """Of the answers to requests that began within `seconds`; who waited, did so for `whole`.

        Args:
            within: the part of the load whose times between tokens count.
        """
        good = [each.begun for each in answers if limits.kept(each)]
        ended = [each.begun + each.ended for each in answers if each.ended is not None and each.finished]
        errors = [each.error for each in answers if each.error]
        waited = [whole - each.begun if each.first is None else each.first for each in answers if not each.error]
        return cls(
            rate=rate,
            concurrency=concurrency,
            seconds=seconds,
            requests=len(answers),
            completed=sum(at <= seconds for at in ended) / seconds,
            good=len(good) / seconds,
            good_parts=in_parts(good, seconds),
            unfinished=sum(not each.finished and not each.error for each in answers),
            failed=len(errors),
            miscounted=sum(each.tokens != each.wanted for each in answers if each.finished),
            first=quantiles(waited),
            token=quantiles([gap for each in answers for gap in each.gaps_within(*within)]),
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


async def ask(
    session: aiohttp.ClientSession, url: str, data: bytes, headers: Mapping[str, str], answer: Answered, due: float
) -> None:
    """Send one request, and see its answer through; what goes wrong is in the answer.

    Args:
        session: with connections enough.
        url: of the server.
        data: the body.
        headers: beside its type.
        answer: where to say what is seen.
        due: when it should have been sent (`time.perf_counter`): from there times are counted.
    """
    since = 0.0
    try:
        async with session.post(f"{url}/generate", data=data, headers={**JSON, **headers}) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                piece = _piece(line)
                if piece is None:
                    continue
                if "error" in piece:
                    answer.error = str(piece["error"])[:300]
                    return
                meta, seconds = piece["meta_info"], time.perf_counter() - due
                if meta["completion_tokens"] > answer.tokens:
                    answer.count(meta["completion_tokens"], seconds, since)
                    since = seconds
                _end(answer, meta["finish_reason"], seconds)
    except (aiohttp.ClientError, ConnectionError) as error:
        answer.error = f"{type(error).__name__}: {error}"
        return
    if not answer.finished and not answer.error:
        answer.error = "the answer ended without a reason"


def _end(answer: Answered, reason: JsonObject | None, seconds: float) -> None:
    """Note that an answer has ended, where it has."""
    if reason is None:
        return
    answer.ended = seconds
    if reason["type"] == "abort":
        answer.error = f"aborted: {reason.get('message')}"[:300]


def _piece(line: bytes) -> JsonObject | None:
    """What one line of a streamed answer says; None for a line between two pieces and for the last one."""
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return None
    found: JsonObject = json.loads(line[len(b"data: ") :])
    return found


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
        """Requests that arrive at random, `rate` of them a second on average, whatever the server does.

        A load without a request measures nothing: where the first one arrives after `seconds`, the load ends with it.
        """
        times = arrivals(random.Random(seed), rate, seconds)
        seconds = max(seconds, times[-1])
        ready = [(at, each, each.data()) for at, each in zip(times, requests, strict=False)]

        async def arrive(run: _Run) -> None:
            for at, each, data in ready:
                await asyncio.sleep(max(0.0, run.started + at - time.perf_counter()))
                run.send(each, data, at)
            await asyncio.sleep(max(0.0, run.started + seconds - time.perf_counter()))

        answers, whole = asyncio.run(self._run(arrive))
        return Measured.of(answers, self.limits, seconds, whole, rate=rate)

    def closed(self, requests: Iterator[LoadRequest], concurrency: int, seconds: float) -> Measured:
        """As many requests under way at any time; each answer is followed by another request."""

        async def arrive(run: _Run) -> None:
            clients = [asyncio.create_task(run.client(requests)) for _ in range(concurrency)]
            await _stopped(clients, seconds)

        answers, whole = asyncio.run(self._run(arrive))
        return Measured.of(answers, self.limits, seconds, whole, concurrency=concurrency)

    def beside(
        self, requests: Iterator[LoadRequest], concurrency: int, seconds: float, work: Callable[[], object]
    ) -> Measured:
        """A closed loop in which something else is done after some seconds.

        Times between tokens are those of that time alone, and so are `Measured.seconds`.

        Raises:
            Exception: as `work`.
        """
        begin = end = 0.0

        async def arrive(run: _Run) -> None:
            nonlocal begin, end
            clients = [asyncio.create_task(run.client(requests)) for _ in range(concurrency)]
            await asyncio.sleep(seconds)
            begin = time.perf_counter() - run.started
            try:
                await asyncio.to_thread(work)
            finally:
                end = time.perf_counter() - run.started
                await _stopped(clients, 0.0)

        answers, whole = asyncio.run(self._run(arrive))
        return Measured.of(answers, self.limits, end - begin, whole, concurrency=concurrency, within=(begin, end))

    async def _run(self, arrive: Callable[[_Run], Awaitable[None]]) -> tuple[list[Answered], float]:
        """(answers, seconds until nobody waits any more) of what arrives."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session:
            run = _Run(session, self.url)
            try:
                await arrive(run)
                if run.tasks:
                    await asyncio.wait(run.tasks, timeout=self.patience)
            finally:
                whole = time.perf_counter() - run.started
                for task in run.tasks:
                    task.cancel()
                await asyncio.gather(*run.tasks, return_exceptions=True)
        return run.answers, whole


class _Run:
    """One load under way.

    Args:
        session: with connections enough.
        url: of the server.

    Attributes:
        started: when it began (`time.perf_counter`).
        answers: to all requests that were sent.
        tasks: that wait for them.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url
        self.started = time.perf_counter()
        self.answers: list[Answered] = []
        self.tasks: list[asyncio.Task[None]] = []

    def send(self, request: LoadRequest, data: bytes, at: float) -> asyncio.Task[None]:
        """Send a request, whose body was made before, that was due so many seconds after the begin."""
        answer = Answered(request.tokens, at)
        self.answers.append(answer)
        asking = ask(self.session, self.url, data, request.headers, answer, self.started + at)
        self.tasks.append(asyncio.create_task(asking))
        return self.tasks[-1]

    async def client(self, requests: Iterator[LoadRequest]) -> None:
        """Ask for one thing after the other, without end."""
        while True:
            each = next(requests)
            data = each.data()
            await asyncio.shield(self.send(each, data, time.perf_counter() - self.started))


def arrivals(dice: random.Random, rate: float, seconds: float) -> list[float]:
    """When the requests of an open loop arrive: a Poisson process of `rate` a second, and at least one of its times.

    Args:
        dice: says when; the same state gives the same times.
        rate: requests a second, on average.
        seconds: until when they arrive, but for a first one that comes later.
    """
    times = [dice.expovariate(rate)]
    while (later := times[-1] + dice.expovariate(rate)) < seconds:
        times.append(later)
    return times


async def _stopped(clients: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Stop clients after some seconds; their last requests go on.

    Raises:
        Exception: as a client that could not go on.
    """
    ended, _ = await asyncio.wait(clients, timeout=seconds)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    for client in ended:
        client.result()
