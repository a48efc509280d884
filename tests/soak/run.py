"""The soak from start to end: two servers one after the other, their clients, what must hold when all is quiet."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import requests

from tests.e2e.server import Server, model, until
from tests.soak import streams as streams_module
from tests.soak.caller import ADMIN_KEY, ANSWER_SECONDS, USER_KEY, Caller, ServerEnded, headers
from tests.soak.changes import Changes
from tests.soak.journal import Journal
from tests.soak.memory import grown, resident
from tests.soak.mistakes import Mistakes
from tests.soak.questions import STEADY, Questions
from tests.soak.streams import SLOTS, Streams
from tests.soak.table import AnswerTable, PoolTable

NAMES = ("a", "b", "c", "d", "e", "u", "v")
UNPINNED = frozenset({"u", "v"})
TOKENS = 8000  # of the KV cache: less than the pools would like to have
STREAMS_SHARE = 0.2  # of the time
MEMORY_SHARE = 0.05
SETTLE_SECONDS = 15.0  # after the last answer, before memory is looked at
FROZEN_SECONDS = 20.0  # without an answer to what needs nothing but the event loop
MOST_FAILURES = 100  # then the rest of the run tells nothing new
MOST_REQUESTS = 2_000_000
WEAK_SHARE = 0.02  # of answers of a version whose number nobody was told
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
LIMITS = {
    "max_pool_mb": 2,
    "max_request_mb": 1,
    "max_demonstrations": 1000,
    "max_pools": 12,
    "max_waiting_encodings": 6,
}

Action = Callable[[random.Random], Awaitable[None]]


class Watchdog:
    """Looks, in a thread, whether the server is there and its event loop runs."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.problem: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(FROZEN_SECONDS + 5)

    def _look(self) -> None:
        while not self._stop.wait(1.0) and self.problem is None:
            process = self.server.process
            if process is None or process.poll() is not None:
                self.problem = f"the server ended: {self.server.tail(1)}"
                return
            try:
                url = self.server.url + "/v1/models"
                requests.get(url, timeout=FROZEN_SECONDS, headers=headers("user"))
            except requests.Timeout:
                self.problem = f"the event loop is frozen: /v1/models has no answer; {self._busy()}"
            except requests.RequestException:
                continue  # it ended, or a connection was closed

    def _busy(self) -> str:
        """Who uses the processor, by process."""
        process = self.server.process
        if process is None:
            return "no process"
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        for each in family:
            each.cpu_percent()
        time.sleep(1)
        return ", ".join(f"{(each.cmdline() or ['?'])[0]} at {each.cpu_percent():.0f}%" for each in family)


class Soak:
    """One server and its clients."""

    def __init__(self, server: Server, watchdog: Watchdog, clients: int, seed: int) -> None:
        self.server, self.watchdog, self.clients, self.seed = server, watchdog, clients, seed
        self.journal = Journal()
        self.caller = Caller(server.url, self.journal, self.alive)
        self.storms = 0

    def alive(self) -> bool:
        """Whether the server's main process is there."""
        return self.server.process is not None and self.server.process.poll() is None

    def within(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` with a session, until it is done or the server is broken."""

        async def run() -> None:
            limit, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=ANSWER_SECONDS)
            async with aiohttp.ClientSession(connector=limit, timeout=timeout) as session:
                self.caller.session = session
                task = asyncio.ensure_future(work())
                while not task.done() and self.watchdog.problem is None:
                    await asyncio.wait([task], timeout=0.5)
                if not task.done():
                    task.cancel()
                await asyncio.gather(task, return_exceptions=self.watchdog.problem is not None)

        try:
            asyncio.run(run())
        except ServerEnded:
            raise RuntimeError(f"the server ended: {self.server.tail(1)}") from None
        if self.watchdog.problem is not None or not self.alive():
            raise RuntimeError(self.watchdog.problem or f"the server ended: {self.server.tail(1)}")

    def storm(self, actions: Sequence[tuple[float, Action]], seconds: float, settle: Callable[[], None]) -> None:
        """All clients at once, each choosing among the actions by their weights, for so long."""
        self.storms += 1
        weights, ways = [weight for weight, _ in actions], [way for _, way in actions]
        end = time.monotonic() + seconds

        async def client(number: int) -> None:
            dice = random.Random(f"{self.seed}-{self.storms}-{number}")
            while time.monotonic() < end and self.journal.failed < MOST_FAILURES:
                if sum(self.journal.requests.values()) > MOST_REQUESTS:
                    return
                (way,) = dice.choices(ways, weights)
                try:
                    await way(dice)
                except ServerEnded:
                    return
                except Exception:
                    self.journal.fail("a client failed:\n" + traceback.format_exc(limit=-4))
                settle()

        async def run() -> None:
            tasks = [asyncio.ensure_future(client(number)) for number in range(self.clients)]
            try:
                _, waiting = await asyncio.wait(tasks, timeout=seconds + ANSWER_SECONDS + 30)
                for _ in waiting:
                    self.journal.fail("a client still waits for its answer")
            finally:
                for task in tasks:
                    task.cancel()

        self.within(run)

    # ---- what must hold when nothing is asked ----

    def admin(self, method: str, path: str, **kwargs: Any) -> Any:
        return self.server.json(method, path, headers=headers("admin"), **kwargs)

    def flush(self) -> None:
        """Empty the cache, when nothing runs."""
        answer = self.server.call("POST", "/flush_cache", params={"timeout": 10}, headers=headers("admin"))
        if answer.status_code != 200:
            self.journal.fail(f"flush_cache while nothing runs: {answer.status_code} {answer.text[:200]}")

    def stats(self) -> dict[str, Any]:
        """Our counters in the scheduler."""
        found: dict[str, Any] = self.server.state()["sglang_ext"]
        return found

    def check(self, what: str, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Wait for what must come true; note that it did not."""
        try:
            until(condition, seconds)
        except AssertionError:
            self.journal.fail(what)
        except Exception as error:
            self.journal.fail(f"{what}: {type(error).__name__}: {error}")

    def quiet(self, seconds: float) -> dict[str, float]:
        """Nothing runs; after `seconds` more, the memory of each process."""
        self.server.idle(120)
        time.sleep(seconds)
        assert self.server.process is not None
        return resident(self.server.process.pid)

    def used_tokens(self) -> int:
        return int(self.server.json("GET", "/v1/loads")["loads"][0]["num_used_tokens"])

    def end(self, half: dict[str, float], last: dict[str, float], memory_share: float) -> None:
        """The books after the last request."""
        for line in grown(half, last, memory_share):
            self.journal.fail(line)
        self.flush()
        self.check("tokens of the KV cache are in use when all is done", lambda: self.used_tokens() == 0)
        self.server.json("POST", "/generate", json={"text": "hello", "sampling_params": {"max_new_tokens": 2}})
        for line in [*self.server.faults(), *leaks(self.server.log())][:20]:
            self.journal.fail(f"the server's log: {line[:300]}")


def leaks(log: str) -> list[str]:
    """Lines in which SGLang complains of its accounting."""
    signs = ("memory leak", "double free", "use-after-free", "pool_leak")
    return [line for line in log.splitlines() if any(sign in line for sign in signs)]


# ---- the server with pools ----


def soak_pools(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Pools under churn; what happened, for JSON."""
    env = {**STRICT, "SGLANG_EXT_SETTINGS": json.dumps(LIMITS)}
    arguments = {
        "max_total_tokens": TOKENS,
        "chunked_prefill_size": 256,
        "api_key": USER_KEY,
        "admin_api_key": ADMIN_KEY,
        "enable_metrics": True,
    }
    folder = model("llama", max_position_embeddings=2048)
    with Server(folder, env=env, **arguments) as server, Watchdog(server) as watchdog:
        soak = Soak(server, watchdog, options.clients, options.seed)
        return guarded(soak, lambda: _pools(soak, seconds, options))


def _pools(soak: Soak, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    table, answers = PoolTable(), AnswerTable()
    changes = Changes(soak.caller, table, NAMES, UNPINNED)
    questions = Questions(soak.caller, table, answers, NAMES)
    say("learning what is answered on the idle server")

    async def prepare() -> None:
        await changes.put_steady()
        await questions.learn()

    soak.within(prepare)
    secret = sorted(table.known(STEADY)[0].labels)[0]
    mistakes = Mistakes(soak.caller, options.without, secret)

    async def every_mistake() -> None:
        for mistake in mistakes.mistakes:
            await mistakes.make(random.Random(0), mistake)

    soak.within(every_mistake)
    actions: list[tuple[float, Action]] = [
        (40, questions.over_pool),
        (35, questions.plain),
        (6, mistakes.make),
        (3, mistakes.try_keys),
        (0.5, mistakes.large),
        (1, mistakes.pry),
        (12, changes.episode),
        (4, questions.leave),
        (3, questions.abort),
    ]

    def half(number: int) -> dict[str, float]:
        say(f"{soak.clients} clients for {seconds / 2:.0f} s ({number} of 2)")
        soak.within(lambda: changes.put_all(random.Random(f"{options.seed}-{number}")))
        soak.storm(actions, seconds / 2, questions.settle)
        questions.settle()
        say(f"{soak.journal.answers} answers checked; waiting until all is quiet")
        _check_held(soak)
        soak.within(changes.delete_all)
        soak.flush()
        return soak.quiet(min(SETTLE_SECONDS, seconds / 4))

    resident_half, resident_end = half(1), half(2)
    questions.settle()
    if questions.weak > WEAK_SHARE * max(soak.journal.answers, 1):
        soak.journal.fail(f"{questions.weak} answers were of versions whose number nobody was told")
    soak.admin("DELETE", f"/v1/pools/{STEADY}")
    soak.check("tokens are held though there is no pool", lambda: soak.stats()["held_tokens"] == 0)
    soak.end(resident_half, resident_end, options.memory)
    stats = soak.stats()
    left = {key: stats[key] for key in ("held_tokens", "blocks_resident", "block_tokens_resident")}
    if any(left.values()):
        soak.journal.fail(f"after flush_cache: {left}")
    return {
        "resident_mib_half_time": resident_half,
        "resident_mib_end": resident_end,
        "answers_known_beforehand": answers.size,
        "answers_of_versions_nobody_was_told_of": questions.weak,
        "held_tokens_at_the_end": stats["held_tokens"],
    }


def _check_held(soak: Soak) -> None:
    """When nothing runs, what is held is what pinned pools hold."""
    soak.server.idle(120)

    def pools() -> list[Any]:
        found: list[Any] = soak.admin("GET", "/v1/pools")["pools"]
        return found

    soak.check("a pool is still being encoded", lambda: all(pool["status"] != "encoding" for pool in pools()), 120)
    soak.check("a pool still counts requests", lambda: all(pool["requests_in_flight"] == 0 for pool in pools()))

    def held() -> bool:
        pinned = {
            block["key"]: block["tokens"]
            for pool in pools()
            if pool["options"]["pinned"]
            for block in soak.admin("GET", f"/v1/pools/{pool['name']}")["blocks"]
            if block["resident"]
        }
        return soak.stats()["held_tokens"] >= sum(pinned.values())

    soak.check("fewer tokens are held than pinned pools have", held)


# ---- the server of streams ----


def soak_streams(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Conversations and long prompts in rows of a fixed size; what happened, for JSON."""
    env = {**STRICT, "SGLANG_EXT_POLICY": json.dumps(streams_module.POLICY)}
    arguments = {
        "attention_backend": "cascade",
        "max_total_tokens": 24 * SLOTS,  # fewer than the clients' conversations want to keep
        "max_running_requests": 12,
        "chunked_prefill_size": 50,
        "api_key": USER_KEY,
        "admin_api_key": ADMIN_KEY,
    }
    folder = model("llama", max_position_embeddings=256)
    with Server(folder, env=env, **arguments) as server, Watchdog(server) as watchdog:
        soak = Soak(server, watchdog, options.clients, options.seed)
        return guarded(soak, lambda: _streams(soak, seconds, options))


def _streams(soak: Soak, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    clients = Streams(soak.caller)
    say("streams: learning what is answered on the idle server")
    soak.within(clients.learn)
    actions: list[tuple[float, Action]] = [
        (50, clients.converse),
        (35, clients.ask),
        (8, clients.leave),
        (7 if "streams" not in options.without else 0, clients.forget),
    ]

    def half(number: int) -> dict[str, float]:
        say(f"streams: {soak.clients} clients for {seconds / 2:.0f} s ({number} of 2)")
        soak.storm(actions, seconds / 2, lambda: None)
        say(f"{soak.journal.answers} answers checked; waiting until all is quiet")
        soak.server.idle(120)
        soak.flush()
        return soak.quiet(min(SETTLE_SECONDS, seconds / 4))

    resident_half, resident_end = half(1), half(2)
    soak.end(resident_half, resident_end, options.memory)
    stats = soak.stats()
    if stats["streams"] or stats["reserved_slots"]:
        soak.journal.fail(f"streams are left: {stats}")
    return {
        "resident_mib_half_time": resident_half,
        "resident_mib_end": resident_end,
        "answers_known_beforehand": sum(map(len, clients.scripts.values())) + len(clients.prompts),
        "conversations_have_keys": clients.keyed,
    }


# ---- all of it ----


def guarded(soak: Soak, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The summary of one server; whatever goes wrong is a failure in it."""
    found: dict[str, Any] = {}
    try:
        found = work()
    except Exception as error:
        problem = soak.watchdog.problem or (str(error) if isinstance(error, RuntimeError) else None)
        words = problem or f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
        soak.journal.fail(f"{words}\nthe server's last lines:\n{last_lines(soak.server)}")
    seconds = time.monotonic() - soak.journal.began
    summary = soak.journal.summary()
    rate = {"seconds": round(seconds, 1), "answers_per_s": round(summary["answers_checked"] / seconds, 2)}
    return {**rate, **summary, **found}


def last_lines(server: Server) -> str:
    """The end of the server's log without what is said of every request."""
    usual = ("HTTP/1.1", "Prefill batch", "Decode batch")
    lines = [line[:400] for line in server.log().splitlines() if not any(word in line for word in usual)]
    return "\n".join(lines[-15:])


def say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)


def commit() -> str:
    """The commit that runs, with `+` where files were changed."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "") or "unknown"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="of clients at work (default: 15)")
    parser.add_argument("--answers", type=int, help="at least so many checked answers (default: 333 a minute)")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--seed", type=int, default=0, help="of what the clients do; the order of events is not repeated"
    )
    parser.add_argument("--json", type=Path, help="write the summary to this file")
    parser.add_argument("--only", choices=["pools", "streams"], help="one of the two servers")
    parser.add_argument("--memory", type=float, default=MEMORY_SHARE, help="share by which resident memory may change")
    parser.add_argument("--without", default="", help="beginnings of the names of bad inputs to leave out, by commas")
    options = parser.parse_args(argv)
    if options.minutes <= 0 or options.clients < 1:
        parser.error("--minutes and --clients must be positive")
    options.without = tuple(filter(None, options.without.split(",")))
    if options.answers is None:
        options.answers = int(options.minutes * 333)
    return options


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run the soak; its summary."""
    began = time.time()
    share = {"pools": 0.0, "streams": 1.0, None: STREAMS_SHARE}[options.only]
    servers: dict[str, Any] = {}
    if share < 1:
        servers["pools"] = soak_pools(options, options.minutes * 60 * (1 - share))
    if share > 0:
        servers["streams"] = soak_streams(options, options.minutes * 60 * share)
    answers = sum(each["answers_checked"] for each in servers.values())
    failures = sum(each["failures"] for each in servers.values())
    names = ("sglang-ext", "sglang", "torch", "transformers", "xgrammar")
    return {
        "passed": failures == 0 and answers >= options.answers,
        "answers_checked": answers,
        "answers_wanted": options.answers,
        "failures": failures,
        "minutes": options.minutes,
        "clients": options.clients,
        "seed": options.seed,
        "commit": commit(),
        "command": shlex.join(["python", "-m", "tests.soak", *sys.argv[1:]]),
        "began": time.strftime("%Y-%m-%d %H:%M", time.gmtime(began)),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        "servers": servers,
    }


def show(summary: dict[str, Any]) -> None:
    """The summary in words."""
    for name, each in summary["servers"].items():
        print(
            f"\n{name}: {each['requests']:,} requests in {each['seconds']:,.0f} s, {each['answers_checked']:,} answers"
        )
        print(f"checked ({each['answers_per_s']} a second); median {each['median_s']} s, 99% within {each['p99_s']} s")
        for kind, row in each["kinds"].items():
            statuses = ", ".join(f"{count} x {status}" for status, count in row["statuses"].items())
            times = f"{row['median_s']:.3f} / {row['p99_s']:.3f} s" if "median_s" in row else ""
            print(f"  {kind:26} {times:19} {statuses}")
        for kind, count in each["checks"].items():
            print(f"  checked: {count:6,} x {kind}")
        for process, half in each.get("resident_mib_half_time", {}).items():
            print(f"  memory of {process}: {half} MiB at half time, {each['resident_mib_end'].get(process)} at the end")
        for failure in each["first_failures"]:
            print(f"  FAILED {failure}")
        for kind, count in each["failures_by_kind"].items():
            print(f"  FAILED {count} x {kind}")
    wanted = summary["answers_wanted"]
    print(f"\n{summary['answers_checked']:,} answers checked ({wanted:,} wanted), {summary['failures']} failures")
    print("passed" if summary["passed"] else "FAILED")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m tests.soak`."""
    options = parse(argv)
    summary = soak(options)
    show(summary)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0 if summary["passed"] else 1
