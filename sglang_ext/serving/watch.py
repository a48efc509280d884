"""A server ends within seconds when one of its processes does, with the reason as its last line of output.

SGLang finds out, too, but waits for diagnostics of the crash (65 s) before it ends, needs an event loop that runs, and
kills itself without a word. Here a thread of the main process waits for the others. A scheduler that fails writes down
its reason first, in memory that both processes can reach.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import psutil

from sglang_ext.names import Passed, Scheduler, ServerArgs
from sglang_ext.serving import checks

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import SignalHandler

logger = logging.getLogger(__name__)

WORDS_ENV = "SGLANG_EXT_LAST_WORDS"
"""Set for the processes that a server starts: the file to which they append a line of JSON when they fail."""
LOOK_SECONDS = 0.5  # between two looks at what the processes wrote; that one ended is known at once
TELL_SECONDS = 2.0  # in which a process that failed prints its traceback, or ends
LEAVE_SECONDS = 7.0  # until the server leaves, whatever hangs
EXIT_STATUS = 1
# SGLang's diagnostics of a crash sleep for 5 and 60 seconds. They are for live schedulers, and on unless set.
DIAGNOSTICS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
_WATCH = "sglang_ext_watch"
_MAX_REASON = 500


# ---- in a process that fails ----


def around_scheduler_work(
    original: Callable[..., Passed], scheduler: Scheduler, *args: Passed, **kwargs: Passed
) -> Passed:
    """AROUND Scheduler.__init__ and Scheduler.run_event_loop: what ends them is written down for the main process."""
    try:
        return original(scheduler, *args, **kwargs)
    except (Exception, SystemExit) as error:
        write_reason(os.environ.get(WORDS_ENV), error)
        raise


def write_reason(path: str | None, error: BaseException) -> None:
    """Append why this process ends to the file `path` of the main process; None: nobody wants to know."""
    if path is None:
        return
    line = json.dumps({"pid": os.getpid(), "reason": one_line(error)})
    with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as words:
        words.write(line + "\n")


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}"[:_MAX_REASON].rstrip(": ")


# ---- in the main process ----


class Words:
    """Memory of the main process to which the processes that it starts append their reasons.

    It has no name in the file system, so nothing stays behind. Other systems than Linux have no such memory; there the
    reason is in the log, above the last line.
    """

    def __init__(self) -> None:
        self._memory: int | None = None
        if sys.platform == "linux":
            self._memory = os.memfd_create("sglang-ext-last-words")

    @property
    def path(self) -> str | None:
        """Where other processes of this user find it."""
        return None if self._memory is None else f"/proc/{os.getpid()}/fd/{self._memory}"

    def read(self) -> dict[int, str]:
        """Reasons by process id; of one process the first."""
        if self._memory is None:
            return {}
        found: dict[int, str] = {}
        for line in os.pread(self._memory, os.fstat(self._memory).st_size, 0).splitlines():
            with contextlib.suppress(ValueError):  # a line that is being written
                told = json.loads(line)
                found.setdefault(told["pid"], told["reason"])
        return found


class Watch:
    """Waits for the processes of a server, in a thread, and ends the server with the first of them.

    Args:
        processes: (name, process) of each; a name as SGLang's watchdog has it, for example `scheduler_0`.
        words: where they write their reasons.
        stopped: whether the server is being stopped: then processes may end.
        dump: writes what SGLang keeps of requests for a crash.
        leave: ends this process (tests have another).
    """

    def __init__(
        self,
        processes: Iterable[tuple[str, BaseProcess]],
        words: Words,
        stopped: Callable[[], bool],
        dump: Callable[[], None],
        leave: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._processes = list(processes)
        self._words = words
        self._stopped = stopped
        self._dump = dump
        self._leave = leave
        self._told = threading.Event()

    def start(self) -> None:
        """Watch from now on."""
        threading.Thread(target=self.run, daemon=True, name="sglang-ext-watch").start()

    def told(self) -> None:
        """A process has sent SIGQUIT, as SGLang's do when they have printed what failed."""
        self._told.set()

    def run(self) -> None:
        """Wait until a process has ended or says that it failed; end the server, unless it is being stopped."""
        while not self._stopped():
            ended = wait([process.sentinel for _, process in self._processes], timeout=LOOK_SECONDS)
            if ended or self._told.is_set() or self._words.read():
                reason = self._reason()
                if reason is not None and not self._stopped():
                    self._leave(reason, self._dump)
                    return
                self._told.wait(LOOK_SECONDS)  # a process that ended well stays in the list

    def _reason(self) -> str | None:
        """Why the server must end, or None: a process has ended as it should."""
        reason = self._found()
        if reason is None and self._told.is_set():
            wait([process.sentinel for _, process in self._processes], timeout=TELL_SECONDS)
            ended = [plain_name(name) for name, process in self._processes if not process.is_alive()]
            return self._found() or f"{'the ' + ended[0] if ended else 'a process'} failed, for the reason above"
        if reason is not None and self._words.read():
            self._told.wait(TELL_SECONDS)  # its traceback is being printed
        return reason

    def _found(self) -> str | None:
        words = self._words.read()
        for name, process in self._processes:
            if process.pid in words:
                return f"the {plain_name(name)} ended: {words[process.pid]}"
        for name, process in self._processes:
            if not process.is_alive() and process.exitcode:
                return f"the {plain_name(name)} ended: {exit_words(process.exitcode)}"
        return None


def plain_name(name: str) -> str:
    """`scheduler_0` of SGLang's watchdog in words."""
    kind, _, number = name.rpartition("_")
    if not number.isdigit() or not kind:
        return name
    return kind if number == "0" else f"{kind} of rank {number}"


def exit_words(code: int) -> str:
    """What an exit code of `multiprocessing` says."""
    if code > 0:
        return f"exit status {code}, for the reason above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        return "SIGKILL (sent by hand, or by the kernel for want of memory: its log says which)"
    return name


def leave(reason: str, dump: Callable[[], None]) -> NoReturn:
    """End this process and all it started, with `reason` as the last line on standard error."""
    if not any(os.environ.get(name, "0").lower() in ("1", "true", "yes", "y") for name in DIAGNOSTICS):
        last_resort = threading.Timer(LEAVE_SECONDS, os._exit, (EXIT_STATUS,))
        last_resort.daemon = True
        last_resort.start()
    try:
        dump()
    except Exception:
        logger.exception("sglang_ext: the requests under way could not be dumped")
    _kill_children()
    _say_last(f"sglang_ext: {reason}; the server stops (exit status {EXIT_STATUS})\n")
    os._exit(EXIT_STATUS)


def _kill_children() -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=3)


def _say_last(line: str) -> None:
    """Print a line after which no thread of this process prints anything."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ours, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with contextlib.suppress(OSError):
        os.write(ours, line.encode("utf-8", "backslashreplace"))


# ---- hooks ----

_words: list[Words] = []  # one a process: an Engine that follows another goes on with it


def fail_to_start(*_signal: int | FrameType | None) -> NoReturn:
    """On SIGQUIT of a scheduler that fails before the server is up."""
    reasons = list(_words[0].read().values())
    leave(f"the scheduler ended: {reasons[-1]}" if reasons else "a process failed, for the reason above", lambda: None)


def after_set_envs_and_config(result: Passed, server_args: ServerArgs) -> Passed:
    """AFTER engine._set_envs_and_config: before the processes start, say where they write why they end."""
    if not checks.is_active(server_args):
        return result
    for name in DIAGNOSTICS:
        os.environ.setdefault(name, "0")
    if not _words:
        _words.append(Words())
    if _words[0].path is not None:
        os.environ[WORDS_ENV] = _words[0].path
    if threading.current_thread() is threading.main_thread() and server_args.custom_sigquit_handler is None:
        signal.signal(signal.SIGQUIT, fail_to_start)
    return result


def after_launch_subprocesses(result: Passed, *_args: Passed, **_kwargs: Passed) -> Passed:
    """AFTER Engine._launch_subprocesses: watch what was started."""
    manager, watchdog = result[0], result[4]
    if manager is None or watchdog is None or not checks.is_active(manager.server_args):
        return result
    watch = Watch(
        zip(watchdog._names, watchdog._processes, strict=True),
        _words[0],
        watchdog._stop_event.is_set,
        manager.dump_requests_before_crash,
        leave,
    )
    setattr(manager, _WATCH, watch)
    watch.start()
    return result


def around_running_phase_sigquit_handler(
    original: Callable[..., Passed], handler: SignalHandler, *args: Passed
) -> Passed:
    """AROUND SignalHandler.running_phase_sigquit_handler: the watch knows which process failed, and why."""
    watch = getattr(handler.tokenizer_manager, _WATCH, None)
    if watch is None:
        return original(handler, *args)
    return watch.told()
