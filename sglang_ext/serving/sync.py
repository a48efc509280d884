"""Pools from one folder to another (`sglang-ext pool sync`), while servers use both.

The newest version of each pool goes over under its own number, by the same link by which servers claim numbers in a
folder that they share. So nothing is overwritten, servers of the other folder find it as they find each other's
changes, and a version that is there already stays as it is. The folders of tenants (`tenants/NAME`) go over likewise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.store import UNREADABLE, VERSION_FILE, read, unreadable
from sglang_ext.serving.tenants import FOLDER
from sglang_ext.serving.versions import Damaged, Replaced, VersionStore
from sglang_ext.types import JsonObject

Outcome: TypeAlias = Literal["copied", "there", "newer", "refused"]

TRIES = 10  # of one pool that others change at the same time


@dataclass(frozen=True)
class Synced:
    """What was done with a pool.

    Attributes:
        pool: its name.
        version: number of the newest version in the folder that is copied from; 0 where no file could be read.
        outcome: `copied`; `there`: the other folder has the same; `newer`: it has a newer one, which stays; `refused`.
        words: more of it, for users; why it was refused.
        tenant: whose pool it is; "" for nobody's.
    """

    pool: str
    version: int
    outcome: Outcome
    words: str = ""
    tenant: str = ""


def sync(source: Path, target: Path) -> Iterator[Synced]:
    """Copy the newest version of each pool, of all tenants, from one folder to the other; says of each what was done.

    Args:
        source: a folder that servers share, or one server's own; it is only read.
        target: a folder that servers share, or an empty one, which becomes one; made where there is none.

    Raises:
        ValueError: the folders are none, or the wrong ones; says what to do.
        OSError: a folder cannot be read or written to.
    """
    yield from _synced(source, target)
    for folder in sorted(each for each in source.glob(f"{FOLDER}/*") if each.is_dir()):
        for each in _synced(folder, target / FOLDER / folder.name):
            yield replace(each, tenant=folder.name)


def _synced(source: Path, target: Path) -> Iterator[Synced]:
    """`sync` of the pools that lie in a folder itself."""
    _check(source, target)
    store = VersionStore(target)
    known = store.newest()
    if _is_shared(source):
        versions = VersionStore(source)
        for name in sorted(versions.newest()):
            yield _from_shared(versions, store, name, known)
    else:
        for path in sorted(source.glob("*.json")):
            yield _from_own(path, store, known)


def _check(source: Path, target: Path) -> None:
    """ValueError for folders that nothing is copied between."""
    if not source.is_dir():
        raise ValueError(f"{source} is no folder: expected the --pool-dir of one or several servers to copy from")
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file: expected a folder that servers share, or one that can be made")
    if os.path.samefile(source, target):
        raise ValueError(f"{source} and {target} are one folder: expected two")
    own = next(iter(sorted(target.glob("*.json"))), None)
    if own is not None and not _is_shared(target):
        raise ValueError(
            f"{target} is one server's own folder ({own.name} is in it), which looks into it only when it starts: start"
            " that server with --pool-scan-seconds, which makes it one that servers share, or give an empty folder"
        )


def _is_shared(folder: Path) -> bool:
    return any(map(VERSION_FILE.fullmatch, os.listdir(folder)))


def _from_shared(source: VersionStore, target: VersionStore, name: str, known: dict[str, int]) -> Synced:
    number = 0
    for _ in range(TRIES):
        number = source.newest()[name]
        try:
            definition = source.read(name, number)
        except Replaced:  # a server of that folder has made the next one meanwhile
            continue
        except (Damaged, OSError) as error:
            return Synced(name, number, "refused", str(error))
        return _brought(target, name, number, definition, known)
    return Synced(name, number, "refused", "it is changed all the time; sync again")


def _from_own(path: Path, target: VersionStore, known: dict[str, int]) -> Synced:
    try:
        stored = read(path, path.stem)
    except UNREADABLE as error:
        return Synced(path.stem, 0, "refused", unreadable(path, error))
    except OSError as error:
        return Synced(path.stem, 0, "refused", str(error))
    return _brought(target, path.stem, stored.version, stored.definition, known)


def _brought(
    target: VersionStore, name: str, number: int, definition: JsonObject | None, known: dict[str, int]
) -> Synced:
    """Make version `number` of a pool that of the other folder, if it is newer than what is there.

    Args:
        known: the newest version of each pool there, as it was seen last.

    Raises:
        OSError: the other folder cannot be read or written to.
    """
    for _ in range(TRIES):
        newest = known.get(name, 0)
        if newest > number:
            return Synced(name, number, "newer", f"version {newest} is there")
        try:
            if newest == number:
                return _compared(target, name, number, definition)
            target.bring(name, number, definition, newest)
            return Synced(name, number, "copied", "a deletion" if definition is None else "")
        except (PoolError, Replaced):  # a server there has made another one meanwhile
            known.update(target.newest())
    return Synced(name, number, "refused", f"it is changed in {target.directory} all the time; sync again")


def _compared(target: VersionStore, name: str, number: int, definition: JsonObject | None) -> Synced:
    try:
        same = target.read(name, number) == definition
    except Damaged as error:
        return Synced(name, number, "refused", str(error))
    if same:
        return Synced(name, number, "there")
    return Synced(
        name,
        number,
        "refused",
        f"version {number} in {target.directory} is another one: both folders were changed on their own; put the pool"
        " again where the right one is, and sync from there",
    )
