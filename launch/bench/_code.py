"""Which code a benchmark has measured, by a hash."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import sglang_ext

PACKAGE = Path(sglang_ext.__file__).parent
SOURCES = (".py", ".cu", ".cuh")
APART = "launch"
"""The folder that is no part of what is measured: commands, and the benchmarks themselves."""


def code_hash(package: Path = PACKAGE) -> str:
    """16 hexadecimal digits, of the names and the texts of all sources of the product.

    Args:
        package: folder of the package.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(_sources(package)):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def _sources(package: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(package, followlinks=True):
        if Path(folder) == package:
            names[:] = [name for name in names if name != APART]
        yield from (Path(folder) / file for file in files if file.endswith(SOURCES))
