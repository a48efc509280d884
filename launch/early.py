"""What `sglang-ext serve` refuses before torch and SGLang are imported, which takes a quarter of a minute.

What SGLang itself knows (its flags, the model, the device) is checked later, by SGLang and by `serving.checks`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

from sglang_ext import lines
from sglang_ext.config import ATTENTION_BACKEND
from sglang_ext.serving.tenants import Tenants
from sglang_ext.systems.options import check_policy
from sglang_ext.systems.registry import ours

_NEAR = 0.8  # how alike a typing error is (difflib's ratio)


def attention_backend(argv: Sequence[str]) -> str | None:
    """The attention backend that SGLang's flags in `argv` name; None where only SGLang's own parser can say.

    That is so with a configuration file, and with a flag that was shortened.
    """
    named = ATTENTION_BACKEND
    for at, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == "--attention-backend":
            named = value if equals else "".join(argv[at + 1 : at + 2])
        elif name == "--config" or (len(name) > len("--a") and "--attention-backend".startswith(name)):
            return None
    return named


def check_policy_flag(policy: str | None, argv: Sequence[str]) -> None:
    """ValueError for options that the system of the server to be does not take; another package's are not looked at."""
    name = attention_backend(argv)
    if policy is not None:
        check_policy(policy, ours().get(name or ""), f"--attention-backend {name}", "--policy")


def folder(path: str) -> str:
    """The absolute path of --pool-dir, or ValueError where no folder can be there."""
    absolute = Path(os.path.abspath(path))
    there = next(each for each in (absolute, *absolute.parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"--pool-dir {path}: {there} is a file; expected a folder, which is made where there is none")
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"--pool-dir {path}: {there} cannot be written to; give another folder, or change its rights")
    return str(absolute)


def check_tenants(path: str | None, argv: Sequence[str]) -> None:
    """ValueError for a file of --tenants that is none, or beside which the server has no key of its own."""
    if path is None:
        return
    Tenants.read(path)
    keys = ("--api-key", "--admin-api-key")
    named = [word.partition("=")[0] for word in argv]
    if not any(len(name) > len("--a") and key.startswith(name) for name in named for key in (*keys, "--config")):
        raise ValueError(f"--tenants {path}: expected {' or '.join(keys)} beside it, the operator's own key")


def check_typing_errors(argv: Sequence[str], ours: Collection[str]) -> None:
    """ValueError for a flag in `argv` that looks like one of `ours` and is none of SGLang's."""
    theirs = None
    for word in argv:
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, ours, 1, _NEAR) if name.startswith("--") else []
        near = near or [each for each in ours if len(name) > len("--x") and each.startswith(name)]
        if not near:
            continue
        theirs = _sglang_source() if theirs is None else theirs
        if name.removeprefix("--").replace("-", "_") not in theirs and name not in theirs:
            raise ValueError(f"{name}: not a flag of this command nor of SGLang; did you mean {near[0]}?")


def _sglang_source() -> str:
    """The source of SGLang's arguments: all names of its flags are in it, and reading it imports nothing."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ValueError("sglang is not installed: pip install sglang-ext")
    package = Path(spec.origin).parent
    files = [file for pattern in lines.current().arguments for file in sorted(package.glob(pattern))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
