"""One architecture in one system, in a process of its own, and what came of it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.models import serve

SECONDS = 90.0  # a start takes one
ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Exit)\b): (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What came of one start.

    Attributes:
        kind: `works`, `refused` (by us, at start), `failed` (anything else) or `wrong` (answers deviate).
        words: the exact words; of answers, the largest error of a log-probability.
    """

    kind: str
    words: str


def refused(folder: Path, system: str) -> Outcome:
    """What resolving a server's arguments says, which needs no engine."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    try:
        ServerArgs(model_path=str(folder), attention_backend=system, device="cpu", dtype="float32")
    except ValueError as error:
        return Outcome("refused", str(error))
    return Outcome("failed", "it was not refused")


def run(needs_gpu: str, folder: Path, system: str, wider: int | None = None) -> Outcome:
    """Start an engine over a folder that holds a model, and ask it.

    Args:
        needs_gpu: why it cannot be run here; empty where it can.
        folder, system: as of `serve.error_of`.
        wider: likewise.
    """
    if needs_gpu:
        return Outcome("failed", needs_gpu)
    with tempfile.TemporaryDirectory() as room:
        log, result = Path(room) / "log", Path(room) / "result"
        process = multiprocessing.get_context("fork").Process(
            target=_in_child, args=(folder, system, wider, log, result)
        )
        process.start()
        process.join(SECONDS)
        late = process.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.join()
        if result.exists():
            return Outcome(*json.loads(result.read_text(encoding="utf-8")))
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        errors = ERROR.findall(text)
        words = errors[-1][1] if errors else f"the process ended with status {process.exitcode}"
        return Outcome("failed", f"no end within {SECONDS:.0f} s: {words}" if late else words)


def _in_child(folder: Path, system: str, wider: int | None, log: Path, result: Path) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        error = serve.error_of(folder, system, wider)
        kind = "works" if error <= serve.TOLERANCE else "wrong"
        result.write_text(json.dumps([kind, f"{error:.1e}"]), encoding="utf-8")
    except ValueError as error:
        result.write_text(json.dumps(["refused", str(error)]), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)
