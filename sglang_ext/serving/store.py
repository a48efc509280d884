"""Pools on disk (`--pool-dir`), in a folder of one server's own: one JSON file a pool, replaced atomically.

`serving.versions` keeps pools in a folder that several servers share. What is kept is the definition, not the keys and
values: demonstrations, options, the grouping into blocks and what was deleted. A restarted server encodes the same
blocks again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.config import check_name
from sglang_ext.serving.pool import Definition
from sglang_ext.types import JsonObject

FORMAT = 1
ASIDE = ".damaged"  # how the names of files end that were set aside
VERSION_FILE = re.compile(r"(.+)@([1-9][0-9]*)\.json")  # of a shared folder; names of pools have no "@"
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What `read` raises of a file that is no definition."""


@dataclass(frozen=True)
class Stored:
    """A pool as its file has it.

    Attributes:
        version: number of the version that was served last.
        definition: what `serving.pool.Definition.load` reads.
    """

    version: int
    definition: JsonObject


class PoolStore:
    """A directory of pool definitions.

    A crash at any moment leaves the old file or the new one: the new one is written beside it, flushed to disk, and
    renamed over it, which POSIX makes atomic; then the directory itself is flushed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def save(self, name: str, version: int, definition: JsonObject) -> None:
        """Write or replace the definition of pool `name`, whose version has that number."""
        with written(self.directory, name, {"version": version, **definition}) as temporary:
            os.replace(temporary, self._path(name))
        flush(self.directory)

    def delete(self, name: str) -> None:
        """Forget pool `name`; nothing happens if it is not there."""
        self._path(name).unlink(missing_ok=True)
        flush(self.directory)

    def load(self, strict: bool) -> tuple[dict[str, Stored], list[str]]:
        """(all definitions by name, what is wrong with the other files); removes what a crash left half written.

        A file that is no definition is set aside under another name, so that nothing overwrites it, and is reported
        at each start until it is mended or gone.

        Args:
            strict: whether such a file is an error instead, and stays where it is.

        Raises:
            ValueError: names every such file and what is wrong with it; or the folder is one that servers share.
        """
        shared = next(filter(VERSION_FILE.fullmatch, sorted(os.listdir(self.directory))), None)
        if shared is not None:
            raise ValueError(
                f"--pool-dir {self.directory} is a folder that servers share ({shared} is in it): start with"
                " --pool-scan-seconds, as they do, or give a folder of its own"
            )
        for leftover in self.directory.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        found: dict[str, Stored] = {}
        damaged: dict[Path, str] = {}
        for path in sorted(self.directory.glob("*.json")):
            try:
                found[path.stem] = read(path, path.stem)
            except (*UNREADABLE, OSError) as error:
                damaged[path] = unreadable(path, error)
        if damaged and strict:
            raise ValueError("; ".join(damaged.values()) + "; mend them or move them away")
        problems = [f"{words}; it was set aside as {_set_aside(path).name}" for path, words in damaged.items()]
        problems += [
            f"{path} was set aside as damaged; mend it and take {ASIDE} off its name, or delete it"
            for path in sorted(self.directory.glob(f"*{ASIDE}"))
            if path.name.removesuffix(ASIDE) not in {each.name for each in damaged}
        ]
        return found, problems

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.json"


@contextlib.contextmanager
def written(directory: Path, name: str, content: JsonObject) -> Iterator[Path]:
    """A file of a name of its own beside the others, with what is kept of pool `name`, on disk; removed at the end."""
    text = json.dumps({"format": FORMAT, "name": name, **content}, ensure_ascii=False)
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield Path(temporary)
    finally:
        with contextlib.suppress(OSError):  # what was done with it counts, and not whether it can be removed
            Path(temporary).unlink(missing_ok=True)


def flush(directory: Path) -> None:
    """See that the names of files in a folder are on disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def content(path: Path, name: str) -> tuple[int, JsonObject]:
    """(number of the version, what is kept of it) in a file of pool `name`; raises `UNREADABLE`."""
    data = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(data, dict):
        raise ValueError(f"it holds a {type(data).__name__}, expected an object")
    if data.pop("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT}, the one that this version reads")
    named = data.pop("name")
    if named != name:
        raise ValueError(f"it names the pool {named!r}, and its file is called {path.name}: expected the same name")
    check_name(name)
    version = data.pop("version", 1)  # files that were written before versions were stored
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"version {version!r}: expected a whole number of at least 1")
    return version, data


def read(path: Path, name: str) -> Stored:
    """The definition in a file of pool `name`, checked as far as `Definition.load` checks it; raises `UNREADABLE`."""
    version, data = content(path, name)
    Definition.load(data)
    return Stored(version, data)


def unreadable(path: Path, error: Exception) -> str:
    """What users are told of a file that is no definition."""
    reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return f"{path} is not a pool definition ({reason})"


def _set_aside(path: Path) -> Path:
    """Give a damaged file a name that nothing reads or writes; returns it."""
    number, aside = 1, path.with_name(path.name + ASIDE)
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.{number}{ASIDE}")
    path.rename(aside)
    return aside
