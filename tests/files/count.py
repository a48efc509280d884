"""How many of our files a request's way goes through, traced in a running server.

    python -m tests.files.count dbsa        # one /generate over a pool, in all processes
    python -m tests.files.count double_p    # decoding steps over clusters, in the scheduler
    python -m tests.files.count cascade     # a stride of a stream, in the scheduler

Kernels run in Triton's interpreter where there is no GPU: the files are those that a GPU's server goes through.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import requests
import torch

from tests.e2e.server import Server
from tests.files.recorder import FOLDER_ENV, ROOT_ENV
from tests.oracle import models

ROOT = Path(__file__).resolve().parents[2] / "sglang_ext"
SCHEDULER = "serving/scheduler.py"  # a process that has entered it is a scheduler
STEPS = {"double_p": 4, "cascade": 20}  # a stride and more; Triton's interpreter is slow
POLICIES = {
    "double_p": {"min_tokens": 50, "sink": 2, "window": 8, "cluster": 8, "segment": 64, "append": 32},
    "cascade": {"sinks": 4, "window": 32, "stride": 16},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.files.count", description=__doc__)
    parser.add_argument("system", choices=("dbsa", "double_p", "cascade"))
    parser.add_argument("--functions", action="store_true", help="list the functions, too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = count(asked.system, Path(name))
    for file, functions in sorted(found.items()):
        print(f"{file}: {', '.join(sorted(functions))}" if asked.functions else file)
    print(f"{asked.system}: {len(found)} files")


def count(system: str, folder: Path) -> dict[str, set[str]]:
    """File -> functions entered in it, of one request to a server of `system` that has answered others before."""
    shutil.copy(Path(__file__).with_name("recorder.py"), folder / "sitecustomize.py")
    env = {FOLDER_ENV: str(folder), ROOT_ENV: str(ROOT), "SGLANG_EXT_KERNELS": "triton"}
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    env["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    if system in POLICIES:
        env["SGLANG_EXT_POLICY"] = json.dumps(POLICIES[system])
    model = models.save_model("llama", folder / "model", max_position_embeddings=2048)
    with Server(model, env=env, attention_backend=system, dtype="float32", max_total_tokens=4096) as server:
        return _while_decoding(server, folder, STEPS[system]) if system in STEPS else _over_a_pool(server, folder)


def _over_a_pool(server: Server, folder: Path) -> dict[str, set[str]]:
    pool = {"demonstrations": models.demonstrations(12), "block_size": 4}
    server.json("PUT", "/v1/pools/p", json=pool)
    params = {"max_new_tokens": 4, "temperature": 0, "custom_params": {"pool": "p", "ratio": 0.5}}
    body = {"text": "why is my card frozen?", "sampling_params": params}
    for _ in range(2):
        server.json("POST", "/generate", json=body)
    with Recording(folder) as recording:
        server.json("POST", "/generate", json=body)
    return recording.files


def _while_decoding(server: Server, folder: Path, steps: int) -> dict[str, set[str]]:
    params = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    body = {"text": "why is my card frozen? " * 12, "sampling_params": params, "stream": True}
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=600) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(steps):
            next(lines)
        with Recording(folder, only=SCHEDULER) as recording:
            for _ in range(steps):
                next(lines)
    server.call("POST", "/abort_request", json={"rid": "", "abort_all": True})
    return recording.files


class Recording:
    """What the processes of a server enter within the `with` block.

    Args:
        folder: of the recorders.
        only: how the name of a file ends that a process must have entered to count; all count without.

    Attributes:
        files: file -> functions, of all processes that count.
    """

    def __init__(self, folder: Path, only: str = "") -> None:
        self.folder, self.only, self.files = folder, only, defaultdict[str, set[str]](set)

    def __enter__(self) -> Recording:
        (self.folder / "on").touch()
        time.sleep(0.2)
        return self

    def __exit__(self, *_: Any) -> None:
        (self.folder / "on").unlink()
        time.sleep(1)
        for part in self.folder.glob("*.json"):
            entered = json.loads(part.read_text())
            for file, function in entered if any(file.endswith(self.only) for file, _ in entered) else ():
                self.files[str(Path(file).resolve().relative_to(ROOT.parent))].add(function)


if __name__ == "__main__":
    main()
