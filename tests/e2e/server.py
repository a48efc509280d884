"""A real SGLang server in a process of its own, for tests: started, waited for, talked to, and killed with its tree.

with Server(model, max_total_tokens=4000) as server:
    server.put("pool", demonstrations, block_size=10)
    answer = server.generate("a question", pool="pool", ratio=0.5)
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import requests
import torch

from sglang_ext.lines import NEWER, current
from tests.e2e.warm import SPAWN, WarmProcess, warm
from tests.oracle import models

START_SECONDS = 600.0  # a start takes ten seconds on an idle machine, minutes on a crowded one
REQUEST_SECONDS = 120.0
TAKEN = "address already in use"
AT_IMPORT = {"PYTHONPATH", "SGLANG_EXT_KERNELS", "SGLANG_TEST_RETRACT"}
"""Environment that a process which has imported SGLang is too late for."""
OURS = {"attention_backend": "dbsa", "radix_cache_backend": "sglang_ext"}
STOCK = {"attention_backend": "torch_native"}
STORES_ANSWERS: dict[str, Any] = {"served_model_name": "m"}
"""What a server is started with whose /v1/responses stores answers, to requests for the model `m`."""
if current() is NEWER:
    STORES_ANSWERS["enable_response_store"] = True
_CPU = {
    "device": "cpu",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
    "dtype": "float32",
    "enable_cache_report": True,
    "skip_server_warmup": True,
    "max_running_requests": 48,
}


def cold() -> bool:
    """Whether this run's environment wants processes that were started as users start them."""
    return SPAWN in os.environ or "SGLANG_EXT_KERNELS" in os.environ


@cache
def model(name: str = "llama", **overrides: Any) -> Path:
    """The oracle's tiny random model of that name, written once a test run."""
    folder = Path(tempfile.mkdtemp(prefix=f"sglang-ext-{name}-"))
    return models.save_model(name, folder, **overrides)


def free_port() -> int:
    """A port that nobody listens at, below those of outgoing connections, which could take it in the meantime."""
    dice = random.SystemRandom()
    while True:
        port = dice.randrange(20_000, 32_000)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def arguments(**options: Any) -> list[str]:
    """Keyword arguments as SGLang's command line; True is a bare flag, None and False are left out."""
    listed: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        listed.append("--" + name.replace("_", "-"))
        if value is not True:
            listed.append(str(value))
    return listed


class Server:
    """`python -m sglang.launch_server` on a free port of this machine, up while the `with` block runs.

    Args:
        path: model folder.
        stock: leave our two backends out: SGLang as it is, on the same platform.
        env: environment variables beside the test's own.
        wait: whether to wait until the server answers; without, only the process is started.
        warm: whether it is forked from a process that has imported SGLang (`tests.e2e.warm`), where that is the same;
            without, and always on a GPU, `command` is run as users run it.
        options: SGLang's arguments, with underscores.
    """

    def __init__(
        self,
        path: Path,
        stock: bool = False,
        env: Mapping[str, str] | None = None,
        wait: bool = True,
        warm: bool = True,
        **options: Any,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.wait = wait
        self.warm = warm and not torch.cuda.is_available() and not AT_IMPORT & (env or {}).keys() and not cold()
        self.api_key = options.get("api_key")
        chosen = {**_CPU, **(STOCK if stock else OURS), **options}
        self.command = [sys.executable, "-m", "sglang.launch_server"] + arguments(
            model_path=path, host="127.0.0.1", port=self.port, **chosen
        )
        # Sessions outlive a pause of a crowded machine; nobody sends into a connection that is being closed.
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "SGLANG_TIMEOUT_KEEP_ALIVE": "600", **(env or {})}
        if self.env.get("SGLANG_EXT_KERNELS") != "triton":
            self.env.pop("TRITON_INTERPRET", None)  # the tests' own setting, not a user's
        handle, name = tempfile.mkstemp(prefix="sglang-ext-server-", suffix=".log")
        os.close(handle)
        self.log_file = Path(name)
        self.session = requests.Session()
        if self.api_key:
            self.session.headers["Authorization"] = f"Bearer {self.api_key}"
        self.process: subprocess.Popen[bytes] | WarmProcess | None = None
        self._answered = False

    # ---- life ----

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:
            self.kill()  # a test's time limit, too, must leave no server behind
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        died = self.wait and self.process is not None and self.process.poll() is not None
        self.kill()
        if kind is None and not died:
            self.log_file.unlink(missing_ok=True)
        else:
            print(f"server log, {self.log_file}:\n{self.tail()}")

    def start(self) -> None:
        """Start the process (again), and wait until it answers."""
        self.process = self._process()
        if not self.wait:
            return
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                if requests.get(self.url + "/health", timeout=5).status_code == 200 and self.process.poll() is None:
                    self._answered = True
                    return
            except requests.RequestException:
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                code = self.process.poll()
                self.kill()
                if not self._answered and TAKEN in self.log():
                    self._move()
                    return self.start()
                raise RuntimeError(f"the server did not come up (exit status {code}):\n{self.tail()}")
            time.sleep(0.2)

    def _move(self) -> None:
        """Go to another port: another server has taken the port in the meantime, for itself or for its processes."""
        old, self.port = self.port, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [str(self.port) if word == str(old) else word for word in self.command]
        self.log_file.write_text("", encoding="utf-8")

    def _process(self) -> subprocess.Popen[bytes] | WarmProcess:
        if self.warm:
            files = {0: os.devnull, 1: str(self.log_file), 2: str(self.log_file)}
            return warm().start(self.command[2:], self.env, files)  # without "python -m"
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                self.command, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL to the server and all its children, as a crash would be."""
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            return
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        for member in family:
            try:
                member.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=20)
        process.wait(timeout=20)

    def wait_for_exit(self, seconds: float = START_SECONDS) -> int:
        """Exit status of a server that ends by itself."""
        assert self.process is not None
        return self.process.wait(timeout=seconds)

    # ---- the log ----

    def log(self) -> str:
        """All the server has printed."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def tail(self, lines: int = 60) -> str:
        """The last lines of the log."""
        return "\n".join(self.log().splitlines()[-lines:])

    def faults(self) -> list[str]:
        """Lines of the log that tell of an exception or a leak; refusals of bad requests are none."""
        # PyTorch's profiler complains of itself, once, on a machine without a GPU.
        harmless = ("[http_server] Error:", "DeviceProperties.cpp")
        signs = ("Traceback", "Error:", "Exception", "leak", "ERROR", "double free", "CRITICAL")
        # SGLang 0.5.23 asks a server that is not there yet for /freeze_gc, where its own warm-up is left out.
        log = re.sub(r"^\[[^]]*\] post-warmup freeze_gc failed\n([^\[].*\n|\n)*", "", self.log(), flags=re.MULTILINE)
        lines = [line for line in log.splitlines() if not any(known in line for known in harmless)]
        return [line for line in lines if any(sign in line for sign in signs)]

    # ---- talking ----

    def call(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """One HTTP request, whatever its answer."""
        kwargs.setdefault("timeout", REQUEST_SECONDS)
        return self.session.request(method, self.url + path, **kwargs)

    def json(self, method: str, path: str, **kwargs: Any) -> Any:
        """One HTTP request that must succeed; its JSON."""
        answer = self.call(method, path, **kwargs)
        assert answer.status_code in (200, 202), f"{method} {path}: {answer.status_code} {answer.text[:800]}"
        return answer.json()

    def put(self, name: str, demonstrations: list[dict[str, str]], **options: Any) -> Any:
        """PUT a pool that must succeed."""
        return self.json("PUT", f"/v1/pools/{name}", json={"demonstrations": demonstrations, **options})

    def pool(self, name: str, tokens: bool = False) -> Any:
        """GET a pool."""
        return self.json("GET", f"/v1/pools/{name}", params={"tokens": str(tokens).lower()})

    def payload(self, prompt: str | list[int], max_new_tokens: int = 8, **options: Any) -> dict[str, Any]:
        """A /generate body: greedy, with log-probabilities; options are those of custom_params, none for plain."""
        params: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        if options:
            params["custom_params"] = options
        own = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        return {**own, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}

    def generate(self, prompt: str | list[int], max_new_tokens: int = 8, **options: Any) -> Any:
        """One greedy answer over /generate."""
        return self.json("POST", "/generate", json=self.payload(prompt, max_new_tokens, **options))

    def stream(self, body: dict[str, Any], session: requests.Session | None = None) -> Iterator[Any]:
        """The events of a streaming /generate; closing the iterator hangs up."""
        with (session or requests).post(
            self.url + "/generate",
            json={**body, "stream": True},
            stream=True,
            timeout=REQUEST_SECONDS,
            headers=dict(self.session.headers),
        ) as answer:
            assert answer.status_code == 200, answer.text
            for line in answer.iter_lines():
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line[6:])

    def state(self) -> dict[str, Any]:
        """The scheduler's internal state, of /server_info."""
        return self.json("GET", "/server_info")["internal_states"][0]

    def idle(self, seconds: float = 60.0) -> dict[str, Any]:
        """Wait until nothing runs or waits; the load as SGLang reports it."""
        end = time.monotonic() + seconds
        while True:
            load = self.json("GET", "/v1/loads")["loads"][0]
            if load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0:
                return load
            assert time.monotonic() < end, f"the server did not become idle: {load}"
            time.sleep(0.1)


def in_mid_encode(
    server: Server, name: str, body: Mapping[str, Any], again: Callable[[], object] | None = None
) -> None:
    """Begin to encode a pool, and return before half of its blocks are there.

    On a crowded machine this process may look too late. Then the pool goes, `again` makes what was there before it,
    and it is begun anew.
    """
    for _ in range(8):
        answer = server.call("PUT", f"/v1/pools/{name}", json={**body, "wait": False})
        assert answer.status_code == 202 and answer.json()["status"] == "encoding", answer.text
        progress = until(lambda: (seen := server.pool(name)["progress"])["blocks_done"] and seen)
        if 2 * progress["blocks_done"] < progress["blocks"]:
            return
        assert until(lambda: (now := server.pool(name)["status"]) != "encoding" and now) == "ready"
        server.json("DELETE", f"/v1/pools/{name}")
        if again is not None:
            again()
    raise AssertionError("every encoding was half done before anyone looked: encode more, or less at a time")


def until(condition: Any, seconds: float = 60.0) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def answer_tokens(answer: Any) -> list[int]:
    """Generated token ids of a /generate answer with log-probabilities."""
    return [token for _, token, *_ in answer["meta_info"]["output_token_logprobs"]]


def answer_logprobs(answer: Any) -> list[float]:
    """Their natural-log probabilities."""
    return [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]


def input_logprobs(answer: Any) -> list[float]:
    """Natural-log probabilities of the prompt's tokens, the first (which has none) left out."""
    return [value for value, *_ in answer["meta_info"]["input_token_logprobs"] if value is not None]


def error_of(response: requests.Response) -> str:
    """The message of an error answer, whichever of SGLang's envelopes it has."""
    data = response.json()
    error = data.get("error", data)
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)
