"""Pools in a folder that several servers share (`--pool-dir` with `--pool-scan-seconds`): a file for each version.

`NAME@NUMBER.json` is version NUMBER of pool NAME. Its name is the claim of that number, and stays for ever: a server
makes the file whole under a name of its own, and links it to that name, which only one server can do, whatever the
others have seen. So nothing here needs locks or clocks, and the folder may be on NFS. What a file holds is one of

- a definition, as `serving.store` has it,
- `{"gone": "deleted"}`: the version is the deletion of the pool,
- `{"gone": "replaced"}`: a newer version has been claimed since, and nobody needs the definition any more.

A server removes no file but the temporary ones that it wrote itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.pool import Definition
from sglang_ext.serving.store import UNREADABLE, VERSION_FILE, content, flush, read, unreadable, written
from sglang_ext.types import JsonObject

logger = logging.getLogger(__name__)

GONE, DELETED, REPLACED = "gone", "deleted", "replaced"
_EMPTY_BYTES = 256  # a file without a definition has fewer, and one with a definition has more
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)


class Damaged(ValueError):
    """A file that this version of sglang_ext cannot read; says why.

    Attributes:
        told: the same for clients, who are not told where the file lies.
    """

    def __init__(self, path: Path, error: Exception) -> None:
        super().__init__(unreadable(path, error))
        self.told = unreadable(Path(path.name), error)


class Replaced(Exception):
    """A newer version than the one that was asked for has been claimed."""


class VersionStore:
    """A folder of versions. Its methods wait for the disk: they are called beside the event loop."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def newest(self) -> dict[str, int]:
        """The number of the newest version of each pool, deletions among them, as far as this machine has seen."""
        found: dict[str, int] = {}
        for name in os.listdir(self.directory):
            if match := VERSION_FILE.fullmatch(name):
                found[match[1]] = max(found.get(match[1], 0), int(match[2]))
        return found

    def read(self, name: str, number: int) -> JsonObject | None:
        """What version `number` of pool `name` holds, checked by `Definition.load`; None where it is a deletion.

        Raises:
            Damaged: it cannot be read by this version of sglang_ext.
            Replaced: there is a newer one.
            OSError: the folder cannot be read, or does not show the file yet.
        """
        path = self._path(name, number)
        try:
            _, data = content(path, name)
            if GONE not in data:
                Definition.load(data)
                return data
            if data[GONE] == REPLACED:
                raise Replaced
            if data[GONE] != DELETED:
                raise ValueError(f"{GONE}={data[GONE]!r}: expected {DELETED!r} or {REPLACED!r}")
        except UNREADABLE as error:
            raise Damaged(path, error) from error
        return None

    def after(self, name: str, number: int) -> int:
        """The first version of a pool behind version `number`, of which this machine may have seen none yet."""
        found = (VERSION_FILE.fullmatch(file) for file in os.listdir(self.directory))
        later = [int(match[2]) for match in found if match and match[1] == name and int(match[2]) > number]
        return min(later, default=number + 1)

    def claim(self, name: str, number: int, definition: JsonObject | None) -> None:
        """Make a definition (None: a deletion) version `number` of a pool, the one behind `number` - 1.

        Raises:
            PoolError: (409) another server has made another one that version.
            OSError: the folder cannot be written to; the version was not claimed.
        """
        self.bring(name, number, definition, number - 1)

    def bring(self, name: str, number: int, definition: JsonObject | None, newest: int) -> None:
        """Make what another folder has as version `number` of a pool (None: a deletion) that version here, too.

        Numbers between the two are passed over. The one behind `newest` is claimed as replaced, for that is the one
        which a server that has not seen the new version yet would make.

        Args:
            newest: the newest version here, below `number`; 0 without any.

        Raises:
            PoolError: (409) a server has made a newer one meanwhile.
            OSError: the folder cannot be written to; the version was not claimed.
        """
        held = {GONE: DELETED} if definition is None else definition
        with contextlib.ExitStack() as files:
            new = files.enter_context(written(self.directory, name, {"version": number, **held}))
            if number > newest + 1:
                passed = {"version": newest + 1, GONE: REPLACED}
                self._link(files.enter_context(written(self.directory, name, passed)), name, newest + 1)
            self._link(new, name, number)
        try:
            flush(self.directory)
        except OSError as error:  # the version is there, and others may serve it already
            logger.warning("sglang_ext: %s may not outlast a failure of power: %s", self._path(name, number), error)
        if newest:
            self._empty(name, newest)

    def _link(self, temporary: Path, name: str, number: int) -> None:
        """Claim a number with what is in a file; raises what `claim` raises."""
        try:
            os.link(temporary, self._path(name, number))
        except OSError as error:
            if error.errno in _NO_LINKS:
                why = "the file system of a folder that servers share must have hard links"
                raise OSError(error.errno, f"{why} ({error.strerror})") from error
            # NFS may lose the answer to a link that it made, and ask again: the file has two names then (open(2)).
            if not isinstance(error, FileExistsError) or os.stat(temporary).st_nlink != 2:
                raise _taken(name, number, error) from error

    def adopt(self) -> list[str]:
        """Make the files of a folder that was one server's own the versions that they hold; says what is wrong there.

        The files stay as they are. Servers that do this at once link the same file.
        """
        problems = []
        for path in sorted(self.directory.glob("*.json")):
            if VERSION_FILE.fullmatch(path.name):
                continue
            try:
                os.link(path, self._path(path.stem, read(path, path.stem).version))
            except FileExistsError:
                continue
            except UNREADABLE as error:
                problems.append(f"{unreadable(path, error)}; it stays where it is: mend it, or move it away")
            except OSError as error:
                problems.append(f"{path} cannot be made a version of the folder that the servers share ({error})")
        return problems

    def tidy(self) -> None:
        """Take the definitions out of versions that were replaced, where a server ended before it had done so."""
        newest = self.newest()
        for name in os.listdir(self.directory):
            match = VERSION_FILE.fullmatch(name)
            if match and int(match[2]) < newest.get(match[1], 0):
                with contextlib.suppress(OSError):  # `_empty` says what hinders it
                    if (self.directory / name).stat().st_size > _EMPTY_BYTES:
                        self._empty(match[1], int(match[2]))

    def _empty(self, name: str, number: int) -> None:
        """Take the definition out of a version that was replaced. Its file stays, so that its number stays claimed."""
        path = self._path(name, number)
        try:
            if path.exists():
                with written(self.directory, name, {"version": number, GONE: REPLACED}) as temporary:
                    os.replace(temporary, path)
        except OSError as error:  # the newer version is there all the same
            logger.warning("sglang_ext: %s keeps its definition, which nobody needs any more: %s", path, error)

    def _path(self, name: str, number: int) -> Path:
        return self.directory / f"{name}@{number}.json"


def _taken(name: str, number: int, error: OSError) -> Exception:
    if not isinstance(error, FileExistsError):
        return error
    return PoolError(
        f"pool {name!r} was changed on another server at the same time, which made version {number}; this change was"
        " not made: look at the pool, and send the change again if it is still wanted",
        409,
    )
