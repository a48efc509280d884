"""The tenants of a running server: the pools of each, and the file that says who they are, read again on SIGHUP.

A tenant's pools are a `PoolService` of its own, with a folder, names and block names of its own, so nothing behind
`pools_of` knows of tenants. What is not in a pool lies in a namespace of its own (`serving.tenant_requests`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from sglang_ext.names import TokenizerManager
from sglang_ext.serving.access import Keys, tenant_at_hand
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.pools import PoolService
from sglang_ext.serving.tenants import FOLDER, Tenants
from sglang_ext.types import JsonObject

logger = logging.getLogger(__name__)


def pools_of(manager: TokenizerManager) -> PoolService:
    """The pools that the caller at hand can name, or an error that says how to start a server that has pools."""
    service: PoolService | None = getattr(manager, "ext_pools", None)
    if service is None:
        raise PoolError(
            f"this server runs --attention-backend {manager.server_args.attention_backend}: pools need"
            " --attention-backend dbsa --radix-cache-backend sglang_ext (or: sglang-ext serve MODEL)"
        )
    tenant = tenant_at_hand()
    return service.shared.services[tenant] if tenant else service


def tenants_of(service: PoolService) -> dict[str, PoolService]:
    """The pools of each tenant of a server, by its name."""
    return {name: each for name, each in sorted(service.shared.services.items()) if name}


def standing(service: PoolService) -> JsonObject:
    """What a tenant takes, and what it may take (None: as much as there is)."""
    taken = {"pools": len(service.pools), "tokens": service.tokens, "requests": service.quota.running}
    return {"name": service.tenant, **taken, **asdict(service.quota.quotas)}


class Tenancy:
    """The tenants of one server.

    Args:
        manager: SGLang's tokenizer manager.
        own: the pools that are no tenant's.
        path: the file of `--tenants`.
        keys: of the server.
        directory: `--pool-dir`; None for none.

    Raises:
        ValueError: the file is no such file, or see `fleet.folder_of`.
        OSError: a tenant's folder cannot be made.
    """

    def __init__(
        self, manager: TokenizerManager, own: PoolService, path: str, keys: Keys, directory: str | None
    ) -> None:
        self._manager, self._own, self._path, self._keys, self._directory = manager, own, path, keys, directory
        self._tenants, self._rereading = Tenants(), asyncio.Lock()
        self._take(*self._read())

    def of_key(self, shown: str | None) -> str | None:
        """The tenant whose key was shown."""
        found = self._tenants.of_key(shown)
        return found.name if found is not None else None

    def known(self) -> Collection[str]:
        """Names of all tenants, those among them whose keys were taken away: their pools are still there."""
        return tenants_of(self._own)

    def begin(self) -> None:
        """Read the file again at each SIGHUP, from now on; for the thread of the server's event loop."""
        begin = self._own.workers.background
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: begin(self.reread()))

    async def reread(self) -> None:
        """Read the file again. One that is wrong changes nothing, and the log says why."""
        async with self._rereading:  # what was read last counts
            try:
                tenants, fresh = await asyncio.to_thread(self._read)
            except (ValueError, OSError) as error:
                logger.error("sglang_ext: the tenants stay as they were: %s", error)
                return
            self._take(tenants, fresh)
        logger.warning("sglang_ext: %s was read again: %d tenants", self._path, len(tenants.by_name))
        for service in fresh:
            self._own.workers.background(service.restored())

    def _read(self) -> tuple[Tenants, list[PoolService]]:
        """(the tenants in the file, the pools of those that are new); waits for the disk, and changes nothing."""
        tenants = Tenants.read(self._path, (self._keys.api, self._keys.admin))
        new = tenants.by_name.keys() - self._own.shared.services.keys()
        return tenants, [PoolService(self._manager, self._folder(name), name, self._own.shared) for name in new]

    def _take(self, tenants: Tenants, fresh: Collection[PoolService]) -> None:
        """Make these tenants the server's; `fresh` has the pools of the new ones."""
        services = self._own.shared.services
        services.update({service.tenant: service for service in fresh})
        for tenant in tenants.by_name.values():
            services[tenant.name].quota.quotas = tenant.quotas
        self._tenants = tenants

    def _folder(self, tenant: str) -> str | None:
        return None if self._directory is None else str(Path(self._directory) / FOLDER / tenant)
