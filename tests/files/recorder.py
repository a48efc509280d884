"""Which files of ours run, in a process of the server: loaded as `sitecustomize` by `tests.files.count`.

While the file `on` is in the folder that the environment names, functions that are entered are noted; when it goes,
what was found is written beside it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER_ENV, ROOT_ENV = "SGLANG_EXT_TEST_FILES", "SGLANG_EXT_TEST_ROOT"


def record(folder: Path, root: str) -> None:
    """Note the functions under `root` that any thread of this process enters, for as long as it lives."""
    seen: set[tuple[str, str]] = set()
    on = [False]

    def entered(frame: FrameType, event: str, _: Any) -> None:
        if on[0] and event == "call" and frame.f_code.co_filename.startswith(root):
            seen.add((frame.f_code.co_filename, frame.f_code.co_name))

    def watch() -> None:
        while True:
            time.sleep(0.02)
            wanted = (folder / "on").exists()
            if on[0] and not wanted:
                on[0] = False
                (folder / f"{os.getpid()}.json").write_text(json.dumps(sorted(seen)))
                seen.clear()
            on[0] = wanted

    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(entered)
    sys.setprofile(entered)


if FOLDER_ENV in os.environ:
    record(Path(os.environ[FOLDER_ENV]), os.environ[ROOT_ENV])
