"""Engines resident at the same time, each in a process of its own that does what it is told, to be measured in turns.

How fast a process is changes with the state of the host and from one start to the next: engines that are compared do
the same things alternately. A line of JSON on a process's input asks for something, a line of JSON on a pipe answers;
its output is for people. An engine that waits for its turn leaves the GPU alone, but SGLang's scheduler polls for
requests, which takes a core (SGLang's argument `sleep_on_idle` ends that).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_ext.types import Json, JsonObject

if TYPE_CHECKING:
    from sglang_ext.names import Passed


STOP_SECONDS = 60.0
"""Longest that an engine may take to end."""

STOCK = {"SGLANG_PLUGINS": "sglang_ext_cpu"}
"""Environment of stock SGLang. It loads every plugin that is installed: only the one it needs without a GPU stays."""


class Process:
    """An engine in another process; leaving its context ends it.

    Args:
        name: of the engine, for messages.
        module: what is run; it ends in `serve`.
        words: its command line, to which ``--replies`` and a file descriptor are added.
        environment: variables that differ from this process's.
    """

    def __init__(self, name: str, module: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        read, write = os.pipe()
        command = [sys.executable, "-m", module, *words, "--replies", str(write)]
        self._process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.PIPE, text=True, pass_fds=[write]
        )
        os.close(write)
        self._replies = os.fdopen(read)
        self._ready = False

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: Passed) -> None:
        self.stop()

    def wait(self) -> None:
        """Wait until the engine has started.

        Raises:
            RuntimeError: it ended; its output is on the terminal.
        """
        if not self._ready:
            self._answer()
            self._ready = True

    def _answer(self) -> JsonObject:
        line = self._replies.readline()
        if not line:
            self.stop()
            raise RuntimeError(f"the {self.name} engine failed; its output is above")
        found: JsonObject = json.loads(line)
        return found

    def ask(self, what: str, **options: Json) -> JsonObject:
        """Have it do one of the methods of what it serves.

        Raises:
            RuntimeError: it ended before it had answered; its output is on the terminal.
        """
        self.wait()
        if self._process.stdin is None:
            raise RuntimeError(f"the {self.name} engine has no input")
        try:
            print(json.dumps({"do": what, **options}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise RuntimeError(f"the {self.name} engine has ended; its output is above") from None
        return self._answer()

    def stop(self) -> None:
        """End it, and wait until its memory is free."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()


def serve(served: Any, replies: int) -> None:
    """Have `served` do what is asked for, until the input ends: the other side of `Process`.

    Args:
        served: its methods take JSON-like keywords and return JSON-like dictionaries.
        replies: file descriptor of the answers.
    """
    with os.fdopen(replies, "w", buffering=1) as answers:
        print(json.dumps({}), file=answers)
        for line in sys.stdin:
            asked = json.loads(line)
            what = asked.pop("do")
            print(json.dumps(getattr(served, what)(**asked)), file=answers)


def say(words: str) -> None:
    """Say how far a benchmark is."""
    print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)
