"""This module starts a server in a process of its own, asks it over HTTP from several threads, and stops it
with everything it has started; when the server fails, the error carries the end of its log.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

import requests

from sglang_ext.launch.client import PoolClient, ServerError
from sglang_ext.types import Json, JsonObject

START_SECONDS = 600.0  # for the server; a model of many gigabytes takes minutes to load


class Server:
    """A running server, asked from several threads; each has its own connection.

    Attributes:
        url: where it answers.
        pid: of its first process, which started all others.
        log: the file that has what it printed.
    """

    def __init__(self, url: str, pid: int, log: str) -> None:
        self.url, self.pid, self.log = url, pid, log
        self._local = threading.local()

    def call(self, method: str, path: str, body: JsonObject | None = None) -> Json:
        """One request; JSON in, JSON out. Raises ServerError with the server's own words."""
        if not hasattr(self._local, "client"):
            self._local.client = PoolClient(self.url)
        return self._local.client.call(method, path, body)

    def is_up(self) -> bool:
        """Whether the server has loaded its model and finished its warm-up."""
        try:
            return requests.get(self.url + "/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _server_command(model: str, port: int, kv_tokens: int, extra: Sequence[str]) -> list[str]:
    import torch

    command = [sys.executable, "-m", "sglang_ext.launch.cli", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    if not torch.cuda.is_available():
        command += ["--dtype", "float32", "--max-total-tokens", str(kv_tokens)]
    return [*command, *extra]


@contextmanager
def served(model: str, kv_tokens: int, extra: Sequence[str] = ()) -> Iterator[Server]:
    """`running` for the command line's own server.

    Args:
        kv_tokens: size of the KV cache in tokens on a machine without a GPU; on a GPU SGLang sizes it.
        extra: further SGLang flags.

    Raises:
        ServerError: as `running`.
    """
    port = free_port()
    with running(_server_command(model, port, kv_tokens, extra), port) as server:
        yield server


@contextmanager
def running(command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server in a process of its own, stopped with everything it started when the block ends.

    Args:
        command: that starts it.
        port: where it answers.
        environment: variables that differ from this process's.

    Raises:
        ServerError: the server ended, was not up in time, or failed at a request; with the end of its log.
    """
    with tempfile.NamedTemporaryFile("w+", suffix=".log", prefix="sglang-ext-server-", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            server = Server(f"http://127.0.0.1:{port}", process.pid, log.name)
            deadline = time.monotonic() + START_SECONDS
            while not server.is_up():
                ended = process.poll()
                if ended is not None or time.monotonic() > deadline:
                    what = (
                        f"ended with status {ended}" if ended is not None else f"is not up after {START_SECONDS:.0f} s"
                    )
                    raise ServerError(f"the server {what}; the end of its log:\n{_tail(log)}")
                time.sleep(0.3)
            try:
                yield server
            except ServerError as error:
                raise ServerError(f"{error}; the end of the server's log:\n{_tail(log)}") from error
        finally:
            _stop(process)


def _tail(log: IO[str]) -> str:
    """The last lines of a log that another process writes."""
    log.seek(0)
    return "".join(log.readlines()[-40:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers: they are one process group."""
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait(10)
