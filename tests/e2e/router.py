"""The real router in front of test servers: requests through it, and clients that never stop asking.

with routing([one.url, two.url]) as router:
    router.ask("tickets", QUESTION)
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import requests

from sglang_ext.launch.bench._router import BY_KEY, ROUTING_KEY, known, routed
from sglang_ext.launch.bench._router import ROUTED as HOME
from sglang_ext.launch.demo_server import Server as Running
from tests.e2e.server import REQUEST_SECONDS, until

QUICK = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1")
PATIENCE = 240.0  # seconds; a server starts in them on a crowded machine


class Router:
    """A running router.

    Args:
        running: it.
    """

    def __init__(self, running: Running) -> None:
        self.running, self.url = running, running.url

    def call(self, method: str, path: str, key: str | None = None, **kwargs: Any) -> requests.Response:
        """One request, whatever its answer, with a routing key."""
        headers = {ROUTING_KEY: key} if key else {}
        return requests.request(method, self.url + path, headers=headers, timeout=REQUEST_SECONDS, **kwargs)

    def generate(self, body: Mapping[str, Any], key: str | None = None) -> requests.Response:
        """One request of /generate."""
        return self.call("POST", "/generate", key, json=body)

    def home(self, key: str, body: Mapping[str, Any]) -> str:
        """Address of the server that answers requests with a key."""
        answer = self.generate(body, key)
        assert answer.status_code == 200, answer.text
        return answer.headers[HOME]

    def knows(self, urls: Sequence[str]) -> None:
        """Wait until requests go to these servers and to no other."""
        until(lambda: known(self.running) == set(urls), PATIENCE)

    def remove(self, url: str) -> None:
        """Take a server out: what is under way there goes on.

        SMG still lists the server for some seconds, while it drains, and does not take it back before these end.
        """
        answer = self.call("DELETE", f"/workers/{self._listed()[url]}")
        assert answer.status_code in (200, 202), answer.text
        until(lambda: url not in self._listed(), PATIENCE)

    def add(self, url: str) -> None:
        """Have requests go to a server, too."""
        answer = self.call("POST", "/workers", json={"url": url})
        assert answer.status_code in (200, 201, 202), answer.text
        until(lambda: url in known(self.running), PATIENCE)

    def _listed(self) -> dict[str, str]:
        """Address of each server that SMG lists, healthy or not -> its id."""
        return {each["url"]: each["id"] for each in self.call("GET", "/workers").json()["workers"]}


@contextmanager
def routing(urls: Sequence[str], *more: str, policy: str = BY_KEY) -> Iterator[Router]:
    """A router in front of servers."""
    with routed(urls, policy, (*QUICK, *more), PATIENCE) as running:
        yield Router(running)


@dataclass
class Seen:
    """What clients saw.

    Attributes:
        answered: whole answers by the server that gave them.
        broken: streams that ended with an error, behind their status and perhaps their first tokens.
        wrong: everything else, in words.
    """

    answered: dict[str, int] = field(default_factory=dict)
    broken: int = 0
    wrong: list[str] = field(default_factory=list)


class Clients:
    """Threads that ask for one thing after the other while the block runs.

    Args:
        router: that is asked.
        asked: by routing key: the body of /generate, and the text that it must be answered with.
        count: threads; every second one streams.
    """

    def __init__(self, router: Router, asked: Mapping[str, tuple[dict[str, Any], str]], count: int = 6) -> None:
        self.router, self.asked, self.seen = router, asked, Seen()
        self._over, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(REQUEST_SECONDS)
            assert not thread.is_alive(), "a request has no answer"

    def more(self, count: int, url: str | None = None) -> None:
        """Wait for so many more answers, of one server where one is named."""

        def answers() -> int:
            with self._lock:
                return self.seen.answered.get(url, 0) if url else sum(self.seen.answered.values())

        before = answers()
        until(lambda: answers() >= before + count, PATIENCE)

    def _ask(self, number: int) -> None:
        keys = list(self.asked)
        ask = self._stream if number % 2 else self._whole
        while not self._over.is_set():
            key = keys[number % len(keys)]
            number += 1
            try:
                ask(key, *self.asked[key])
            except Exception as error:
                self._note_wrong(f"{key}: {type(error).__name__}: {error}")

    def _whole(self, key: str, body: dict[str, Any], text: str) -> None:
        answer = self.router.generate(body, key)
        if answer.status_code != 200 or answer.json()["text"] != text:
            self._note_wrong(f"{key}: {answer.status_code} {answer.text[:300]}")
            return
        self._note(answer.headers[HOME])

    def _stream(self, key: str, body: dict[str, Any], text: str) -> None:
        seen, ended = "", False
        with requests.post(
            self.router.url + "/generate",
            json={**body, "stream": True},
            headers={ROUTING_KEY: key},
            stream=True,
            timeout=REQUEST_SECONDS,
        ) as answer:
            if answer.status_code != 200:
                self._note_wrong(f"{key}, streamed: {answer.status_code} {answer.text[:300]}")
                return
            try:
                for line in answer.iter_lines():
                    if not line.startswith(b"data: ") or line == b"data: [DONE]":
                        continue
                    piece = json.loads(line[6:])
                    if "error" in piece:
                        break
                    seen, ended = piece["text"], piece["meta_info"]["finish_reason"] is not None
            except requests.RequestException:
                pass  # it broke, as an error does
        if ended and seen == text:
            self._note(answer.headers[HOME])
        elif ended or not text.startswith(seen):
            self._note_wrong(f"{key}, streamed: {seen!r} is not {text!r}")
        else:
            with self._lock:
                self.seen.broken += 1

    def _note(self, url: str) -> None:
        with self._lock:
            self.seen.answered[url] = self.seen.answered.get(url, 0) + 1

    def _note_wrong(self, words: str) -> None:
        with self._lock:
            self.seen.wrong.append(words)
