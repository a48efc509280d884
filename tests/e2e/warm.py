"""Servers that start in seconds: forked from a process that has imported SGLang, as many as a test run needs.

Most of a server's start are the same imports in each of its processes, some 40 seconds of a core. `python -m
tests.e2e.warm` imports them once, and forks a server for each line of JSON that it reads; the server's own processes
are forked from it. What such a server runs is otherwise what `python -m sglang.launch_server` does.

Servers that are told apart by what is imported (`TRITON_INTERPRET`), and those whose birth and death are the test's
matter, start as users start them (`Server(warm=False)`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang_ext.plugin",
    "sglang_ext.serving.http",
    "sglang_ext.serving.scheduler",
    "sglang_ext.serving.streams",
    "sglang_ext.attention.on_torch",
    "sglang_ext.attention.readers.streams",
    "sglang_ext.attention.readers.views",
    "sglang_ext.attention.cascade",
    "sglang_ext.attention.double_p",
)
SPAWN = "SGLANG_EXT_TEST_SPAWN"  # environment: SGLang's processes are new interpreters after all
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1)


# ---- the process that servers are forked from ----


def main() -> None:
    """Fork a server for every line of standard input: {"argv", "env", "files"}; say when one begins and when one ends.

    Not as a child of the tests' process, whose engines end all of its children with themselves.
    """
    if os.fork():
        return
    running: set[int] = set()
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what was imported stays shared with those that are forked
    say({"ready": True})
    left = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.05)
        if readable:
            part = os.read(0, 1 << 16)
            if not part:  # the tests have ended
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                return
            *lines, left = (left + part).split(b"\n")
            for asked in map(json.loads, lines):
                running.add(pid := _fork(asked))
                say({"number": asked["number"], "pid": pid})
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                running.discard(ended[0])
                say({"ended": ended[0], "status": os.waitstatus_to_exitcode(ended[1])})


def say(what: dict[str, Any]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _fork(asked: dict[str, Any]) -> int:
    files = {int(number): _opened(int(number), path) for number, path in asked["files"].items()}
    pid = os.fork()
    if pid:
        for file in files.values():
            os.close(file)
        return pid
    status = 1
    try:
        os.setsid()
        for number, file in files.items():
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(asked["env"])
        forked_children()
        sys.argv = asked["argv"]
        runpy.run_module(asked["argv"][0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _opened(number: int, path: str) -> int:
    """Open what is to have this number, under a high one: standard input to read, all else to write at its end."""
    opened = os.open(path, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
    high = fcntl.fcntl(opened, fcntl.F_DUPFD, 512)
    os.close(opened)
    return high


def forked_children() -> None:
    """Have SGLang's processes forked where it asks for new interpreters, with the signals of a new one."""
    choose = multiprocessing.set_start_method

    @functools.wraps(choose)
    def set_start_method(method: str | None, force: bool = False) -> None:
        if method == "spawn" and SPAWN not in os.environ:
            for name in MODULES:
                importlib.import_module(name)
            method = "fork"
        choose(method, force)

    multiprocessing.set_start_method = set_start_method
    os.register_at_fork(after_in_child=_signals_of_a_new_process)


def _signals_of_a_new_process() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


# ---- the tests' side ----


class Warm:
    """The process of `main`, of this test process; servers' processes are its children."""

    def __init__(self) -> None:
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        root = Path(__file__).resolve().parents[2]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**env, "OMP_NUM_THREADS": "1"},
            cwd=root,
        )
        self._statuses: dict[int, int] = {}
        self._left = b""
        self._numbers = itertools.count()
        self._said("ready", True)
        self._process.wait()  # what was started has left; the one that was forked from it is nobody's child

    def start(self, argv: Sequence[str], env: Mapping[str, str], files: Mapping[int, str]) -> WarmProcess:
        """A server: the module `argv[0]` as a program, with the files of these paths by their numbers."""
        assert self._process.stdin is not None
        number = next(self._numbers)
        asked = {"number": number, "argv": list(argv), "env": dict(env), "files": dict(files)}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        return WarmProcess(self, self._said("number", number)["pid"])

    def status(self, pid: int) -> int | None:
        """Exit status of a server, None while it runs."""
        while pid not in self._statuses and self._readable():
            self._said()
        return self._statuses.get(pid)

    def _readable(self) -> bool:
        return b"\n" in self._left or bool(select.select([self._process.stdout], [], [], 0)[0])

    def _said(self, field: str | None = None, value: Any = None) -> dict[str, Any]:
        """The next message whose `field` has this value; any one where none is named. Ends are noted."""
        assert self._process.stdout is not None
        while True:
            while b"\n" not in self._left:
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    warm.cache_clear()  # the next test starts another
                    self._errors.seek(0)
                    said = self._errors.read().decode(errors="replace")[-2000:]
                    raise RuntimeError(f"the process that test servers are forked from has ended: {said}")
                self._left += part
            line, self._left = self._left.split(b"\n", 1)
            found: dict[str, Any] = json.loads(line)
            if "ended" in found:
                self._statuses[found["ended"]] = found["status"]
            if field is None or found.get(field) == value:
                return found


class WarmProcess:
    """A forked server, with what the tests use of `subprocess.Popen`."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self._warm, self.pid = warm, pid

    def poll(self) -> int | None:
        return self._warm.status(self.pid)

    def wait(self, timeout: float = 60.0) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"server {self.pid}", timeout)
            time.sleep(0.02)
        return status


@functools.cache
def warm() -> Warm:
    """The one of this test process."""
    return Warm()


if __name__ == "__main__":
    main()
