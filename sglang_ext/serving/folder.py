"""Where a server's pools are kept: nowhere, in a folder of its own, or (`serving.fleet`) in one that servers share."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from sglang_ext.serving.errors import PoolError, reason_of
from sglang_ext.serving.pool import Definition, Version
from sglang_ext.serving.standing import Pool
from sglang_ext.serving.store import PoolStore

if TYPE_CHECKING:
    from sglang_ext.serving.pools import PoolService

logger = logging.getLogger(__name__)


class Folder:
    """What a server without a folder does: pools are in its memory alone, and nobody else changes them."""

    @property
    def damaged(self) -> list[str]:
        """What is wrong with files in the folder, for users."""
        return []

    async def started(self) -> None:
        """Wait until pools can be asked for."""

    def restores(self, name: str) -> bool:
        """Whether pool `name` is there and cannot be asked for yet."""
        return False

    def waits_for(self) -> str | None:
        """What is still to be done before the server is ready, in words that name no pool; None: nothing."""
        return None

    def stop(self) -> None:
        """Encode nothing more of what nobody asks for: the server ends."""

    async def look(self) -> None:
        """See what others have changed until now."""

    def last(self, name: str) -> int:
        """Number of the newest version of a pool that was seen in a shared folder, a deletion, too; 0 without any."""
        return 0

    async def free(self, name: str) -> None:
        """See what others have changed, and wait while a change of theirs is made here, before a pool is replaced."""

    async def current(self, name: str) -> None:
        """Have the newest version of a pool served here, before it is changed.

        Raises:
            PoolError: (503) it cannot be served here.
        """

    async def ready(self, name: str, number: int | None) -> None:
        """Wait for what a request needs: a pool that is not encoded here yet, or a version that was not seen yet.

        Whether it is there is for the caller to look at.

        Raises:
            PoolError: waiting was in vain; says why.
        """

    async def save(self, pool: Pool, version: Version) -> None:
        """Keep a new version, before requests are served from it.

        Raises:
            Exception: it is not kept, and must not be served.
        """

    async def delete(self, pool: Pool) -> None:
        """Keep a pool no longer.

        Raises:
            PoolError: it is still kept.
        """


class OwnFolder(Folder):
    """A folder of one server's own: its pools are encoded when the server starts.

    Args:
        service: the server's pools.
        store: the folder.
        strict: whether a damaged file is an error.

    Raises:
        ValueError: see `PoolStore.load`.
    """

    def __init__(self, service: PoolService, store: PoolStore, strict: bool) -> None:
        self._service, self._store = service, store
        self._restore, self._damaged = store.load(strict)
        for problem in self._damaged:
            logger.error("sglang_ext: %s", problem)
        self._restoring: asyncio.Task[None] | None = None

    @property
    def damaged(self) -> list[str]:
        return self._damaged

    async def started(self) -> None:
        """Encode the pools of the folder, once; requests wait for it."""
        if self._restoring is None:
            if not self._restore:
                return
            self._restoring = asyncio.create_task(self._restore_all())
        if self._restoring.cancelled():
            raise PoolError("the server is about to end, and its pools were not all encoded: ask another one", 503)
        await asyncio.shield(self._restoring)

    def restores(self, name: str) -> bool:
        return name in self._restore

    def waits_for(self) -> str | None:
        left = len(self._restore)
        return f"pools of the pool directory are still to be encoded: {left}" if left else None

    def stop(self) -> None:
        if self._restoring is not None:
            self._restoring.cancel()

    async def save(self, pool: Pool, version: Version) -> None:
        await asyncio.to_thread(self._store.save, version.name, version.number, version.definition.dump())

    async def delete(self, pool: Pool) -> None:
        try:
            await asyncio.to_thread(self._store.delete, pool.name)
        except OSError as error:
            logger.error("sglang_ext: pool %s is not deleted: %s", pool.name, error)
            why = f"pool {pool.name!r} is not deleted: its file cannot be removed ({reason_of(error)}); retry"
            raise PoolError(why, 503) from error

    async def _restore_all(self) -> None:
        pools = self._service.pools
        for name, stored in list(self._restore.items()):
            pools[name] = Pool(name)
            try:
                definition = await self._service.workers.apart(Definition.load, stored.definition)
                await self._service.bring_in(name, stored.version, definition)
            except Exception as error:  # one pool that no longer fits must not take the others away
                logger.error("sglang_ext: pool %s of the pool directory cannot be served: %s", name, error)
                why = f"pool {name!r} cannot be restored: {error}"
                pools[name] = Pool(name, error=why, versions=stored.version)
            del self._restore[name]
