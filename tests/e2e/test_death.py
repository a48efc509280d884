"""A process of the server dies: it ends within 10 s, its last line says why, and it comes back with its pools."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.e2e import commands, failing
from tests.e2e.server import Server, answer_tokens, model, until
from tests.oracle import models

LEAVES_IN = 10.0
SHARED = Path("/dev/shm")
QUESTION = "how do i activate my card?"


def family(server: Server) -> list[psutil.Process]:
    """The server's processes, itself first."""
    assert server.process is not None
    itself = psutil.Process(server.process.pid)
    return [itself, *itself.children(recursive=True)]


def member(server: Server, kind: str) -> psutil.Process:
    """The scheduler or the detokenizer, by the title that SGLang gives it."""
    (found,) = [each for each in family(server) if each.cmdline() and each.cmdline()[0].startswith(f"sglang::{kind}")]
    return found


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def kill(kind: str, how: signal.Signals) -> Callable[[Server], None]:
    return lambda server: member(server, kind).send_signal(how)


def crash(server: Server) -> None:
    """A crash of the scheduler; the kernel ends it where Python hangs in the handler, which prints all stacks."""
    process = member(server, "scheduler")
    process.send_signal(signal.SIGSEGV)
    _, alive = psutil.wait_procs([process], timeout=LEAVES_IN / 2)
    for each in alive:
        each.kill()


def fail(server: Server) -> None:
    """A request that makes the scheduler raise; it is answered by an error or by a closed connection."""
    body = {"text": "a", "rid": failing.RID, "sampling_params": {"max_new_tokens": 1}}
    try:
        answer = server.call("POST", "/generate", json=body, timeout=30)
    except requests.ConnectionError:
        return
    assert answer.status_code >= 500


def ask_for_long(server: Server, stream: bool, ends: list[str]) -> None:
    """A long answer; notes whether it came whole, was cut off, or never ended."""
    body = {"text": "tell me of my card", "stream": stream}
    body["sampling_params"] = {"max_new_tokens": 1900, "ignore_eos": True, "custom_params": {"pool": "kept"}}
    try:
        with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as answer:
            whole = any(line == b"data: [DONE]" or line.startswith(b'{"text"') for line in answer.iter_lines())
        ends.append("whole" if whole else "cut off")
    except requests.Timeout:
        ends.append("never ended")
    except requests.RequestException:
        ends.append("cut off")


class Kept:
    """A server with a pool directory, started again by the same command, as a supervisor does."""

    def __init__(self, server: Server, directory: Path) -> None:
        self.server, self.directory = server, directory
        self.answer: list[int] = []

    def put(self) -> None:
        self.server.put("kept", models.demonstrations(24), block_size=6)
        self.answer = self.ask()

    def ask(self) -> list[int]:
        return answer_tokens(self.server.generate(QUESTION, pool="kept", ratio=0.5))

    def revive(self) -> None:
        """Start it again if it died."""
        if self.server.process is not None and self.server.process.poll() is None:
            return
        self.server.kill()
        self.server.start()


def with_failing_scheduler() -> str:
    """A PYTHONPATH whose scheduler fails when it is asked to."""
    return os.pathsep.join([str(failing.folder()), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    directory = tmp_path_factory.mktemp("pools")
    env = {
        "SGLANG_EXT_POOL_DIR": str(directory),
        "PYTHONPATH": with_failing_scheduler(),
    }
    with Server(model("llama", max_position_embeddings=2048), env=env, max_total_tokens=8000) as running:
        found = Kept(running, directory)
        found.put()
        yield found


KILLED = "SIGKILL (sent by hand, or by the kernel for want of memory: its log says which)"
DEATHS = {
    "an exception in the scheduler": (fail, {f"the scheduler ended: RuntimeError: {failing.REASON}"}),
    "kill -9 of the scheduler": (kill("scheduler", signal.SIGKILL), {f"the scheduler ended: {KILLED}"}),
    # Python prints all stacks in the handler of the signal, and seldom aborts there: the process ends by that then.
    "a crash of the scheduler": (
        crash,
        {"the scheduler ended: SIGSEGV", "the scheduler ended: SIGABRT", f"the scheduler ended: {KILLED}"},
    ),
    "kill -9 of the detokenizer": (kill("detokenizer", signal.SIGKILL), {f"the detokenizer ended: {KILLED}"}),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("death", DEATHS)
def test_the_server_ends_with_a_reason_and_comes_back_with_its_pools(kept: Kept, death: str) -> None:
    how, reasons = DEATHS[death]
    server = kept.server
    kept.revive()
    assert kept.ask() == kept.answer  # also what the server before this one answered
    ends: list[str] = []
    clients = [threading.Thread(target=ask_for_long, args=(server, stream, ends)) for stream in (True, False)]
    for client in clients:
        client.start()
    until(lambda: server.json("GET", "/v1/loads")["loads"][0]["num_running_reqs"] == 2)
    processes = family(server)
    assert len(processes) >= 3
    begin = time.monotonic()
    how(server)
    status = server.wait_for_exit(60)
    seconds = time.monotonic() - begin
    assert seconds < LEAVES_IN, f"{seconds:.1f} s"
    assert status == 1
    last = {f"sglang_ext: {reason}; the server stops (exit status 1)" for reason in reasons}
    assert server.log().splitlines()[-1] in last
    _, alive = psutil.wait_procs(processes, timeout=2)
    assert not alive, alive
    assert not listens(server.port)
    for client in clients:
        client.join(70)
    assert ends == ["cut off", "cut off"]


@pytest.mark.timeout(600)
def test_kill_9_of_the_main_process_leaves_no_process_behind(kept: Kept) -> None:
    kept.revive()
    processes = family(kept.server)
    processes[0].send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(processes[1:], timeout=LEAVES_IN)
    assert not alive, alive
    assert not listens(kept.server.port)


@pytest.mark.timeout(900)
def test_a_server_with_host_memory_leaves_none_of_it_behind() -> None:
    """Whichever process is killed while a stream has blocks there: they are memory of the scheduler's alone."""
    before = set(SHARED.iterdir())
    policy = {"sinks": 8, "window": 16, "block": 8, "chunk": 16, "last": 4, "host_gb": 0.01}
    arguments: dict[str, Any] = {"attention_backend": "ltri", "max_total_tokens": 2000, "enable_metrics": True}
    body: dict[str, Any] = {"input_ids": [7 + at % 90 for at in range(600)], "sampling_params": {"max_new_tokens": 900}}
    body["sampling_params"]["ignore_eos"] = True
    env = {"SGLANG_EXT_POLICY": json.dumps(policy), **commands.forking()}
    server = Server(model("llama", max_position_embeddings=2048), env=env, warm=False, **arguments)
    for kind in ("scheduler", "detokenizer", None):
        with server:
            client = threading.Thread(target=ask_and_be_cut_off, args=(server, body))
            client.start()
            until(lambda: server.json("GET", "/server_info")["internal_states"][0]["sglang_ext"]["host_blocks"] > 9)
            server.generate("another stream", 1)  # when it comes, the gauges are set
            assert gauge(server, "host_blocks") > 9 and gauge(server, "host_blocks_total") > 100
            processes = family(server)
            victim = processes[0] if kind is None else member(server, kind)
            victim.send_signal(signal.SIGKILL)
            _, alive = psutil.wait_procs(processes, timeout=LEAVES_IN)
            client.join(70)
            assert not alive, (kind, alive)
            left = sum(each.stat().st_size for each in set(SHARED.iterdir()) - before)  # SGLang leaves counters there
            assert left < 2**20, (kind, left)


def gauge(server: Server, name: str) -> float:
    """What /metrics shows of one of ours."""
    lines = server.call("GET", "/metrics").text.splitlines()
    (value,) = (line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"sglang_ext:{name}{{"))
    return float(value)


def ask_and_be_cut_off(server: Server, body: dict[str, Any]) -> None:
    with contextlib.suppress(requests.RequestException):
        server.call("POST", "/generate", json=body, timeout=60)


@pytest.mark.timeout(600)
def test_a_scheduler_that_fails_at_the_start_is_the_last_line() -> None:
    env = {"PYTHONPATH": with_failing_scheduler(), failing.AT_START: "1"}
    with Server(model("llama"), env=env, max_total_tokens=6000, wait=False) as server:
        assert server.wait_for_exit() == 1
        wanted = f"sglang_ext: the scheduler ended: RuntimeError: {failing.REASON}; the server stops (exit status 1)"
        assert server.log().splitlines()[-1] == wanted
