"""Pools on disk (`--pool-dir`): one JSON file a pool, replaced atomically.

What is kept is the definition, not the keys and values: demonstrations, options, the grouping into blocks and what was
deleted. A restarted server encodes the same blocks again.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

FORMAT = 1


class PoolStore:
    """A directory of pool definitions.

    A crash at any moment leaves the old file or the new one: the new one is written beside it, flushed to disk, and
    renamed over it, which POSIX makes atomic; then the directory itself is flushed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def save(self, name: str, definition: dict[str, Any]) -> None:
        """Write or replace the definition of pool `name`."""
        text = json.dumps({"format": FORMAT, "name": name, **definition}, ensure_ascii=False)
        handle, temporary = tempfile.mkstemp(dir=self.directory, prefix=f".{name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path(name))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._flush_directory()

    def delete(self, name: str) -> None:
        """Forget pool `name`; nothing happens if it is not there."""
        self._path(name).unlink(missing_ok=True)
        self._flush_directory()

    def load(self) -> dict[str, dict[str, Any]]:
        """All definitions by name, and removal of what a crash left half written.

        Raises:
            ValueError: a file is not a pool definition of this format; nothing is skipped silently.
        """
        for leftover in self.directory.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        found = {}
        for path in sorted(self.directory.glob("*.json")):
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
                if data["format"] != FORMAT:
                    raise ValueError(f"format {data['format']}, this version reads {FORMAT}")
                found[data.pop("name")] = data
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not a pool definition ({error}); mend it or move it away") from error
        return found

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def _flush_directory(self) -> None:
        handle = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
