"""A folder of pools that several servers share: what this server has seen there, and when it serves it.

Every server looks into the folder at an interval, and before it changes a pool. What it finds there it makes its own by
the same path as a client's change. Numbers of versions say what is newer; times say nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from sglang_ext.serving.errors import PoolError, reason_of
from sglang_ext.serving.folder import Folder, OwnFolder
from sglang_ext.serving.pool import Definition, Version
from sglang_ext.serving.standing import Pool
from sglang_ext.serving.store import PoolStore
from sglang_ext.serving.versions import Damaged, Replaced, VersionStore
from sglang_ext.settings import ServerSettings
from sglang_ext.types import JsonObject

if TYPE_CHECKING:
    from sglang_ext.serving.pools import PoolService

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # between looks for a version that a request waits for


class SharedFolder(Folder):
    """A folder that servers share.

    Args:
        service: the server's pools.
        store: the folder.
        seconds: between two looks into it.
        settings: the server's.

    Raises:
        ValueError: there are damaged files in the folder, and the settings are strict.
    """

    def __init__(self, service: PoolService, store: VersionStore, seconds: float, settings: ServerSettings) -> None:
        self._service, self._store, self._seconds, self._settings = service, store, seconds, settings
        self._seen: dict[str, int] = {}
        self._problems: dict[str, str] = {}  # by name of the pool
        self._failed: set[str] = set()  # pools whose newest version was tried in vain since the last look of the watch
        self._begun = 0  # looks
        self._first: set[str] | None = None  # pools of the first look that are to be encoded before the server is ready
        self._looking, self._encoding = asyncio.Lock(), asyncio.Lock()
        self._bringing: dict[str, asyncio.Task[None]] = {}
        self._taking: set[str] = set()  # pools that are encoded for one of those tasks
        self._start: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._unadopted = store.adopt()
        store.tidy()
        if settings.strict_pool_dir:
            _refuse_damaged(store, self._unadopted)
        for problem in self._unadopted:
            logger.error("sglang_ext: %s", problem)

    @property
    def damaged(self) -> list[str]:
        return [*self._unadopted, *self._problems.values()]

    # ---- looking ----

    async def started(self) -> None:
        """Look for the first time; from then on, at an interval."""
        if self._start is None:
            self._start = asyncio.create_task(self._begin())
        await asyncio.shield(self._start)

    async def _begin(self) -> None:
        self._watching = asyncio.create_task(self._watch())
        await self.look()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            self._failed.clear()
            try:
                await self.look()
            except Exception:  # the next look may see what this one did not
                logger.exception("sglang_ext: looking into %s failed", self._store.directory)

    async def look(self) -> None:
        """See what is in the folder; callers at one time share a look, which begins after they came."""
        # A task of its own: what it has begun to change, it ends, though its caller's client went away.
        await asyncio.shield(self._service.workers.background(self._look_after(self._begun)))

    async def _look_after(self, begun: int) -> None:
        async with self._looking:
            if self._begun == begun:
                self._begun += 1
                await self._look()

    async def _look(self) -> None:
        try:
            newest = await asyncio.to_thread(self._store.newest)
        except OSError as error:
            self._tell("", f"{self._store.directory} cannot be read ({error}); pools are served as they were seen last")
            return
        self._problems.pop("", None)
        for name, number in newest.items():
            if number > self.last(name):
                await self._found(name, number)
        if self._first is None:
            self._first = set(self._service.pools) if self._settings.encode_at_once else set()
        for pool in list(self._service.pools.values()):
            if pool.behind and pool.name not in self._failed and self._unasked(pool):
                self._bring(pool)

    def _unasked(self, pool: Pool) -> bool:
        """Whether the newest version of a pool is served here before a request needs it.

        What was encoded in vain is tried again when it is needed; what could not be read, as soon as it can be.
        """
        if pool.current is not None:
            return True
        return self._settings.encode_at_once and (pool.failure is None or pool.name in self._problems)

    async def _found(self, name: str, number: int) -> None:
        """A version that this server did not know is in the folder."""
        damaged = None
        try:
            number, definition = await self._read(name, number)
        except Damaged as error:
            definition, damaged = {}, error
        except OSError as error:
            self._tell(name, _unread(name, number, error))
            return
        pool = self._service.pools.get(name)
        if pool is not None and pool.deletion is not None:
            await asyncio.wait([pool.deletion])
        if number <= self.last(name):  # this server itself has made it meanwhile
            return
        self._seen[name] = number
        if definition is None:
            self._problems.pop(name, None)
            pool = self._service.pools.get(name)
            if pool is not None:
                await self._service.drop(pool)
            return
        pool = self._service.pools.setdefault(name, Pool(name))
        pool.versions, pool.stored, pool.failure = number, True, None
        self._failed.discard(name)
        if damaged is not None:
            await self._fail(pool, damaged.told)
        self._judge(name, damaged)

    async def _read(self, name: str, number: int) -> tuple[int, JsonObject | None]:
        """(number, what it holds) of version `number`, or of the newest one where that was replaced."""
        while True:
            try:
                return number, await asyncio.to_thread(self._store.read, name, number)
            except Replaced:
                number = await asyncio.to_thread(self._store.after, name, number)

    def last(self, name: str) -> int:
        return self._seen.get(name, 0)

    # ---- serving ----

    def waits_for(self) -> str | None:
        if self._first is None:  # later on, pools are served as they were seen last
            return "the folder that the servers share has not been read yet"
        self._first = {name for name in self._first if self._awaits(name)}  # a server that was ready stays it
        left = len(self._first)
        return f"pools of the folder that the servers share are still to be encoded: {left}" if left else None

    def _awaits(self, name: str) -> bool:
        """Whether a pool of the folder was not encoded yet, and not in vain."""
        pool = self._service.pools.get(name)
        return pool is not None and pool.stored and pool.current is None and pool.failure is None

    def stop(self) -> None:
        for task in (self._watching, *self._bringing.values()):
            if task is not None:
                task.cancel()

    async def free(self, name: str) -> None:
        await self.look()
        while name in self._taking:
            await asyncio.wait([self._bringing[name]])

    async def current(self, name: str) -> None:
        await self.look()
        pool = self._service.pools.get(name)
        if pool is None or not pool.behind:
            return
        await self._served(pool)
        if pool.behind and self._has(pool):  # a change of what is served here would undo what another server has made
            raise PoolError(pool.failure or f"version {pool.versions} of pool {name!r} is not served here; retry", 503)

    async def ready(self, name: str, number: int | None) -> None:
        await self.started()
        if name not in self._service.pools:  # it may have been put to another server a moment ago
            await self.look()
        if number is not None and number > self.last(name):
            await self._await_version(name, number)
        pool = self._service.pools.get(name)
        if pool is None or not pool.behind:
            return
        if number == pool.versions or (number is None and pool.current is None):
            await self._served(pool)

    async def _await_version(self, name: str, number: int) -> None:
        limit = self._settings.max_version_seconds
        deadline = time.monotonic() + limit
        while self.last(name) < number:
            if time.monotonic() > deadline:
                raise PoolError(
                    f"version {number} of pool {name!r} is not in the folder that the servers share, {limit} s after it"
                    f" was asked for (--max-version-seconds); the newest there is {self.last(name) or 'none'}: retry,"
                    " name that one, or leave the version out",
                    409,
                )
            await asyncio.sleep(min(POLL_SECONDS, self._seconds))
            await self.look()

    async def _served(self, pool: Pool) -> None:
        """Wait until the newest version of a pool is served here, or was tried in vain; `Pool.failure` says why."""
        while pool.behind and pool.name not in self._failed and self._has(pool):
            await asyncio.wait([self._bring(pool)])

    def _has(self, pool: Pool) -> bool:
        """Whether the server still has this pool, and is to keep it."""
        return self._service.pools.get(pool.name) is pool and pool.deletion is None

    def _bring(self, pool: Pool) -> asyncio.Task[None]:
        """The task that makes the newest version of a pool the one that is served here."""
        task = self._bringing.get(pool.name)
        if task is None or task.done():
            task = self._bringing[pool.name] = self._service.workers.background(self._bring_in(pool))
        return task

    async def _bring_in(self, pool: Pool) -> None:
        while pool.behind and self._has(pool):
            if pool.change is not None:  # a client's, which ends without a version if it came too late
                await pool.change.ended()
                continue
            deletion = None
            async with self._encoding:  # one after the other: together they are not there sooner
                if not self._may_take(pool):
                    continue
                try:
                    deletion = await self._take(pool)
                except OSError as error:  # the folder may show it later
                    self._failed.add(pool.name)
                    pool.failure = _unread(pool.name, pool.versions, error)
                    self._tell(pool.name, pool.failure)
                except Exception as error:
                    if not isinstance(error, PoolError):
                        logger.exception("sglang_ext: pool %s of the shared folder", pool.name)
                    self._failed.add(pool.name)
                    if self._has(pool) and pool.behind:
                        await self._fail(pool, str(error))
            if deletion is not None:
                await self._met(pool.name, deletion)
            if pool.name in self._failed:
                return

    def _may_take(self, pool: Pool) -> bool:
        return pool.behind and pool.change is None and self._has(pool)

    async def _take(self, pool: Pool) -> int | None:
        """Encode the newest version of a pool, and serve it from then on; nothing where a change comes between.

        Returns:
            The number of a deletion, where that is what the folder has by now.
        """
        name = pool.name
        try:
            number, definition = await self._read(name, pool.versions)
            self._judge(name, None)
        except Damaged as error:
            self._judge(name, error)
            raise PoolError(error.told, 503) from error
        if definition is None:
            return number
        loaded = await self._service.workers.apart(Definition.load, definition)
        if self._may_take(pool):
            self._seen[name] = pool.versions = max(number, pool.versions)
            self._taking.add(name)
            try:
                await self._service.bring_in(name, number, loaded)
            finally:
                self._taking.discard(name)
            pool.failure = None
        return None

    async def _fail(self, pool: Pool, why: str) -> None:
        """The newest version cannot be served here; an older one must not be served in its place."""
        failure = f"version {pool.versions} of pool {pool.name!r} cannot be served here: {why}"
        if pool.failure != failure:
            logger.error("sglang_ext: %s", failure)
        pool.failure = failure
        await self._service.withdraw(pool)

    def _judge(self, name: str, damaged: Damaged | None) -> None:
        """Note what is wrong with the file of a pool's newest version, or that nothing is."""
        if damaged is None:
            self._problems.pop(name, None)
        else:
            self._tell(name, f"{damaged}; it stays where it is: put the pool again, or have a newer server read it")

    def _tell(self, name: str, problem: str) -> None:
        if self._problems.get(name) != problem:
            logger.error("sglang_ext: %s", problem)
        self._problems[name] = problem

    # ---- changing ----

    async def save(self, pool: Pool, version: Version) -> None:
        await self._claim(version.name, version.number, version.definition.dump(), "changed")
        pool.stored, pool.versions, pool.failure = True, max(pool.versions, version.number), None
        self._failed.discard(pool.name)

    async def delete(self, pool: Pool) -> None:
        await self._claim(pool.name, pool.versions + 1, None, "deleted")

    async def _claim(self, name: str, number: int, definition: JsonObject | None, done: str) -> None:
        try:
            await asyncio.to_thread(self._store.claim, name, number, definition)
        except OSError as error:
            logger.error("sglang_ext: pool %s is not %s: %s", name, done, error)
            raise PoolError(
                f"pool {name!r} is not {done}: its version {number} cannot be written to the folder that the servers"
                f" share ({reason_of(error)}); make room there, or have the folder mended, and send the change again",
                503,
            ) from error
        except PoolError:
            self._service.workers.background(self._met(name, number))
            raise
        self._seen[name] = max(number, self.last(name))
        self._judge(name, None)

    async def _met(self, name: str, number: int) -> None:
        """Another server has claimed this version, whether or not a look into the folder shows it already."""
        async with self._looking:
            if number > self.last(name):
                await self._found(name, number)
        await self.look()


def _unread(name: str, number: int, error: OSError) -> str:
    said = f"version {number} of pool {name!r} cannot be read from the folder that the servers share yet"
    return f"{said} ({reason_of(error)})"


def folder_of(service: PoolService, directory: str | None) -> Folder:
    """Where the pools of a server are kept.

    Raises:
        ValueError: the server's settings do not go with the folder, or with what is in it.
    """
    settings = service.settings
    seconds = settings.pool_scan_seconds
    if directory is None:
        if seconds is not None:
            raise ValueError(
                f"--pool-scan-seconds {seconds} without --pool-dir: name the folder that the servers share, or leave"
                " the setting out"
            )
        return Folder()
    if seconds is None:
        return OwnFolder(service, PoolStore(directory), settings.strict_pool_dir)
    return SharedFolder(service, VersionStore(directory), seconds, settings)


def _refuse_damaged(store: VersionStore, problems: list[str]) -> None:
    """ValueError for files in the folder that this version of sglang_ext cannot read."""
    found = list(problems)
    for name, number in sorted(store.newest().items()):
        try:
            store.read(name, number)
        except Damaged as error:
            found.append(str(error))
        except (Replaced, OSError):  # another server is changing it
            continue
    if found:
        raise ValueError("; ".join(found) + "; mend them or move them away")
