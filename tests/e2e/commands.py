"""Commands whose engines start in seconds: `subprocess.Popen` forks them from the process that has imported SGLang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from tests.e2e.warm import SPAWN, WarmProcess, warm

Popen = subprocess.Popen


def forking() -> dict[str, str]:
    """The environment of a command that imports SGLang once, and forks its engine's processes from that one.

    There is nothing in it on a GPU, since a process that has used CUDA cannot be forked, and where `SPAWN` is set.
    """
    if torch.cuda.is_available() or SPAWN in os.environ:
        return {}
    folder = Path(__file__).resolve().parent / "forked"
    folders = [str(folder), str(folder.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(folders)}


def popen(command: Sequence[str], **settings: Any) -> WarmCommand | Popen[Any]:
    """What stands for `subprocess.Popen`: Python's modules are forked, all else is started as it was asked for.

    Modules that run other code than the tests' (another PYTHONPATH), or our Triton kernels, or whose output is read
    through a pipe, start as others do.
    """
    env = settings.get("env") or os.environ
    elsewhere = env.get("PYTHONPATH") != os.environ.get("PYTHONPATH")
    triton = "triton" in (env.get("SGLANG_EXT_KERNELS"), *command)
    read = subprocess.PIPE in (settings.get("stdout"), settings.get("stderr"))
    if list(command[:2]) != [sys.executable, "-m"] or elsewhere or triton or read:
        return Popen(command, **settings)
    return WarmCommand(command, **settings)


class WarmCommand(WarmProcess):
    """A forked command, with what our code uses of `subprocess.Popen`: its input is text."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        text: bool = True,
        start_new_session: bool = True,
    ) -> None:
        self.args, self.stdin = command, None
        out = _path(stdout, 1)
        files = {0: os.devnull, 1: out, 2: out if stderr == subprocess.STDOUT else _path(stderr, 2)}
        files |= {number: _path(number, number) for number in pass_fds}
        read = None
        if stdin == subprocess.PIPE:
            read, write = os.pipe()
            files[0] = _path(read, read)
            self.stdin = os.fdopen(write, "w")
        plain = {name: value for name, value in (env or os.environ).items() if name != "TRITON_INTERPRET"}
        forked = warm().start(command[2:], plain, files)
        super().__init__(warm(), forked.pid)
        if read is not None:
            os.close(read)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def __enter__(self) -> WarmCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def wait(self, timeout: float | None = None) -> int:
        return super().wait(timeout or 600.0)

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[None, None]:
        self.wait(timeout)
        return None, None

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _path(file: int | IO[Any] | None, default: int) -> str:
    """A file of this process, by which another one can open it."""
    if file == subprocess.DEVNULL:
        return os.devnull
    number = default if file is None else file if isinstance(file, int) else file.fileno()
    return f"/proc/{os.getpid()}/fd/{number}"
