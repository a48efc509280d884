"""The pools of one tenant: creating, changing, encoding and leasing them. Runs in SGLang's tokenizer process.

A server without tenants has one such service; with tenants (`serving.tenancy`), one for each, whose names are its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

from sglang_ext.config import PoolOptions, RequestOptions, check_name, split_name
from sglang_ext.names import TokenizerManager
from sglang_ext.serving.access import check_retriever, may_see_definitions
from sglang_ext.serving.change import PREPARING, Change, Progress, Queue
from sglang_ext.serving.errors import PoolError, UnknownPool
from sglang_ext.serving.fleet import folder_of
from sglang_ext.serving.layouts import Layouts
from sglang_ext.serving.metrics import TenantMetrics, TokenizerMetrics, labels_of
from sglang_ext.serving.plan import countable
from sglang_ext.serving.pool import COMPLETION, Definition, Version
from sglang_ext.serving.poolless import no_pools
from sglang_ext.serving.quota import Quota
from sglang_ext.serving.shared import Shared
from sglang_ext.serving.standing import Made, Pool, blocks_of, explained, numbered, refuse_busy, serving, summary
from sglang_ext.serving.submitted import Source, Submitted
from sglang_ext.settings import server_settings
from sglang_ext.systems.registry import systems
from sglang_ext.types import Json, JsonObject, Options

Define = Callable[[int], tuple[Definition, bool]]
"""Takes the tokens beyond which a pool is refused; gives (its definition, whether the client waits for it)."""


class PoolService:
    """All pools of one tenant. Its methods run on the tokenizer manager's event loop.

    Args:
        manager: SGLang's tokenizer manager.
        directory: where the pools are kept; None for nowhere.
        tenant: whose they are; "" for nobody's: the operator's, or everybody's where there are no tenants.
        shared: what the server's services share; a new one for the first of them.
    """

    def __init__(
        self, manager: TokenizerManager, directory: str | None = None, tenant: str = "", shared: Shared | None = None
    ) -> None:
        self.manager = manager
        self.settings = server_settings()
        self.pools: dict[str, Pool] = {}
        policy = systems()[manager.server_args.attention_backend].make_policy()
        self.policy_options, self.as_written = policy.request_options, policy.as_written
        counted = ("requests", "reencoded_blocks", "missed_blocks", "stitched_tokens")
        self.counters: dict[str, float] = {**dict.fromkeys(counted, 0), "retrieval_seconds": 0.0}
        self.tenant, self.quota = tenant, Quota()
        labels = labels_of(manager, self.settings, tenant)
        self.metrics = TokenizerMetrics(manager.enable_metrics, labels, self.settings.pool_metrics)
        self.usage = TenantMetrics(manager.enable_metrics, labels)
        self.shared = shared or Shared(manager)
        self.workers, self.channel = self.shared.workers, self.shared.channel
        self.encoder, self.scoring = self.shared.encoder, self.shared.scoring
        self.layouts = Layouts(manager, self.shared, self.settings, self.metrics, tenant)
        self.queue = Queue(self.settings.max_waiting_encodings)
        self.folder = folder_of(self, directory)
        if shared is None:  # else who makes it adds it to the others, in the thread of the event loop
            self.shared.services[tenant] = self

    async def restored(self) -> None:
        """Wait until pools can be asked for: what is in `--pool-dir` is known, or served."""
        await self.folder.started()

    def reencoded(self, name: str, blocks: int, missed: int) -> None:
        """So many blocks of a pool are encoded again, for a request, which needs `missed` of them itself."""
        self.counters["reencoded_blocks"] += blocks
        self.counters["missed_blocks"] += missed
        self.metrics.reencoded(name, blocks, missed)

    @property
    def tokens(self) -> int:
        """Of all pools, those of versions that are being made among them."""
        return sum(pool.tokens for pool in self.pools.values())

    # ---- reading ----

    def get(self, name: str) -> Pool:
        """The pool of that name, or UnknownPool (404) with the names there are, for those who may see them."""
        if name not in self.pools:
            if self.folder.restores(name):
                raise PoolError(f"pool {name!r} is being restored from disk; retry", 503)
            raise UnknownPool(str(name), list(self.pools) if may_see_definitions(self.manager) else None)
        return self.pools[name]

    async def needed(self, asked: str) -> Version:
        """The version that a request over `asked` is answered from, once it is served here.

        Args:
            asked: a pool's name, or with the number of a version (`config.split_name`).

        Raises:
            ValueError: (PoolError and UnknownPool among them) there is none; says why.
        """
        await self.folder.ready(*split_name(asked))
        return self.version(asked)

    async def prepare(self, custom: Json) -> None:
        """Wait as `needed` does, before SGLang handles a request with these `custom_params` where nothing can wait."""
        asked = custom.get("pool") if isinstance(custom, dict) else None
        if isinstance(asked, str):
            with contextlib.suppress(ValueError):  # `version` says what is wrong, where the request is composed
                await self.folder.ready(*split_name(asked))

    def version(self, asked: str) -> Version:
        """The version of a pool that a request that names it so is answered from now; raises what `needed` does."""
        name, number = split_name(asked)
        pool, told = self.get(name), may_see_definitions(self.manager)
        return serving(pool, told) if number is None else numbered(pool, number, told)

    async def info(self, name: str, tokens: bool = False) -> JsonObject:
        """What is in a pool: options, labels, blocks with their demonstrations, residency and hits."""
        if name not in self.pools:
            await self.folder.look()
        pool = self.get(name)
        return await self._info(pool, pool.current, tokens)

    async def _info(self, pool: Pool, version: Version | None, tokens: bool = False) -> JsonObject:
        info = summary(pool, version, self.channel.bytes_per_token)
        if version is not None:
            keys = [block.key for block in version.layouts[COMPLETION].blocks]
            info["blocks"] = blocks_of(version, await self.channel.ask("blocks", keys=keys), tokens)
        return info

    def _summary(self, pool: Pool) -> JsonObject:
        return summary(pool, pool.current, self.channel.bytes_per_token)

    def list(self) -> list[JsonObject]:
        """A line for each pool."""
        return [self._summary(self.pools[name]) for name in sorted(self.pools)]

    # ---- changing ----

    async def put(self, name: str, demonstrations: Iterable[Json], options: Options, wait: bool = True) -> JsonObject:
        """Create or replace a pool. Until the new blocks are encoded, requests are served from the old version."""
        return await self.put_from(name, lambda: Submitted(demonstrations, options, wait))

    async def put_from(self, name: str, source: Source) -> JsonObject:
        """`put` of what `source` reads, away from the event loop."""
        check_name(name)
        self.refuse_without_pools()
        await self.folder.free(name)

        def define(limit: int) -> tuple[Definition, bool]:
            submitted = source()
            parsed = PoolOptions.parse(submitted.options)
            return self.layouts.define(submitted.demonstrations, parsed, limit), submitted.wait

        return await self._change(name, define)

    async def append(self, name: str, demonstrations: Iterable[Json], wait: bool = True) -> JsonObject:
        """Add demonstrations as new blocks; the blocks there are stay as they are."""
        return await self.append_from(name, lambda: Submitted(demonstrations, {}, wait))

    async def append_from(self, name: str, source: Source) -> JsonObject:
        """`append` of what `source` reads, away from the event loop."""
        await self.folder.current(name)
        definition = serving(self.get(name), may_see_definitions(self.manager)).definition

        def define(limit: int) -> tuple[Definition, bool]:
            submitted = source()
            if submitted.options:
                names = ", ".join(sorted(submitted.options))
                raise ValueError(f"{names}: a pool's options are set when it is put, not on appending")
            return self.layouts.grown(definition, submitted.demonstrations, limit), submitted.wait

        return await self._change(name, define)

    async def delete_demonstration(self, name: str, id: str, purge: bool = False, wait: bool = True) -> JsonObject:
        """Leave a demonstration out of retrieval and views at once; with `purge`, encode again all it reached."""
        await self.folder.current(name)
        definition = serving(self.get(name), may_see_definitions(self.manager)).definition
        if id not in definition.demonstrations:
            raise PoolError(f"pool {name!r} has no demonstration {id!r}", 404)
        if id in definition.deleted and not purge:
            raise PoolError(
                f"demonstration {id!r} of pool {name!r} is deleted already; purge=true encodes again what it reached",
                404,
            )

        def define(_limit: int) -> tuple[Definition, bool]:
            smaller = definition.without(id)
            if not smaller.live():
                raise PoolError(f"{id!r} is the last demonstration of pool {name!r}: delete the pool instead", 409)
            return (smaller.purged() if purge else smaller), wait

        return await self._change(name, define)

    async def delete(self, name: str) -> JsonObject:
        """Delete a pool. Requests in flight finish on it; its blocks are freed after the last one."""
        await self.folder.look()
        pool = self.get(name)
        if pool.deletion is None:
            pool.deletion = self.workers.background(self._delete(pool))
        await asyncio.shield(pool.deletion)
        return {"name": name, "status": "deleted"}

    async def drop(self, pool: Pool) -> None:
        """Delete a pool that the folder has no longer."""
        if pool.deletion is None:
            pool.deletion = self.workers.background(self._delete(pool, kept=False))
        await asyncio.wait([pool.deletion])

    async def _delete(self, pool: Pool, kept: bool = True) -> None:
        try:
            if pool.change is not None:
                pool.change.cancel()
                await pool.change.ended()
            if self.pools.get(pool.name) is not pool:
                return  # its first change was cancelled: it never was a pool
            if kept:
                await self.folder.delete(pool)
            del self.pools[pool.name]
            await self.withdraw(pool)
        finally:
            pool.deletion = None

    async def withdraw(self, pool: Pool) -> None:
        """Serve no request from a pool any more; those in flight finish on it."""
        self.metrics.changed(pool.name, 0, 0, 0.0)
        version, pool.current = pool.current, None
        if version is not None:
            await self._retire(version)

    async def cancel(self, name: str) -> JsonObject:
        """Stop the encoding under way; the pool stays as it was before, and vanishes if it never was ready."""
        pool = self.get(name)
        if pool.change is not None:
            pool.change.cancel()
            await pool.change.ended()
        return self._summary(pool)

    def refuse_without_pools(self) -> None:
        """PoolError on a server that has no pools."""
        if why := no_pools(self.manager):
            raise PoolError(why)

    def _refuse_busy(self, name: str) -> None:
        pool = self.pools.get(name)
        if pool is not None:
            return refuse_busy(pool)
        self.quota.check_pools(len(self.pools))
        if len(self.pools) >= self.settings.max_pools:
            raise PoolError(
                f"the server has {len(self.pools)} pools, as many as it may (--max-pools {self.settings.max_pools}):"
                " delete one first",
                413,
            )

    async def bring_in(self, name: str, number: int, definition: Definition) -> None:
        """Serve a version that the folder has of a pool that is there."""
        self.refuse_without_pools()
        await self._change(name, lambda _limit: (definition, True), number)

    async def _change(self, name: str, define: Define, incoming: int | None = None) -> JsonObject:
        """Make what `define` defines the pool's next version: lay out, check, encode, store, switch over.

        Args:
            incoming: the number of a version that the folder has already: who brings it in waits elsewhere.
        """
        self._refuse_busy(name)
        place = contextlib.ExitStack()
        if incoming is None:
            place.enter_context(self.queue.place())
        # Nothing was awaited since the checks: of two changes at once, one finds the other.
        pool = self.pools.setdefault(name, Pool(name, versions=self.folder.last(name)))
        change, made = Change(), Made(incoming or pool.versions + 1, incoming is not None)
        pool.change = change

        async def settle() -> None:
            with place:
                await self._settle(pool, change, made)

        work = self._make(pool, change, made, define)
        self.workers.background(change.start(work, settle, lambda error: explained(pool, change, error)))
        try:
            await change.accepted()
            if not change.wait:
                return self._summary(pool)
            await change.made()
        except asyncio.CancelledError:
            change.leave()
            raise
        return {**await self._info(pool, made.version), "status": "ready"}  # the next change may be under way already

    async def _make(self, pool: Pool, change: Change, made: Made, define: Define) -> None:
        """Lay out and encode a new version. Whatever it did until it failed or was cancelled, `_settle` undoes."""
        state = await self.channel.ask("state")
        version, wait = await self.workers.read(self._prepare, pool, change, made, define, countable(state))
        del define  # it holds the body of the request, which nobody counts any more
        made.version, pool.making = version, version.tokens
        if not made.incoming:
            self.quota.check_tokens(pool.name, version.tokens, self.tokens - pool.tokens)
        self.encoder.know(version)
        change.prepared(wait)
        missing = await self.encoder.missing(version)
        await self.encoder.promise(version, missing)
        layouts = version.layouts.values()
        progress = Progress(sum(len(each.blocks) for each in layouts), sum(each.tokens for each in layouts))
        change.accept(progress)
        # While the blocks are encoded: no request waits for it.
        indexed = self.workers.background(
            self.workers.apart(version.retriever, RequestOptions(version.name), pool.current)
        )
        if await self.encoder.encode_all(version, missing, progress):  # else the first request finds what is missing
            version.resident.update(version.layouts)
        await asyncio.shield(indexed)

    def _prepare(self, pool: Pool, change: Change, made: Made, define: Define, limit: int) -> tuple[Version, bool]:
        """The new version with its blocks tokenized, and whether who asked waits for it."""
        change.phase = PREPARING
        definition, wait = define(limit)
        version = Version(pool.name, made.number, definition, tenant=self.tenant)
        self.layouts.lay_out_all(version, pool.current)
        return version, wait

    async def _settle(self, pool: Pool, change: Change, made: Made) -> None:
        """Serve the pool from the version that was made; where it was not, leave everything as it was."""
        version, accepted = made.version, change.progress is not None
        try:
            if change.error is None and version is not None and not made.incoming:
                try:
                    await self.folder.save(pool, version)
                except PoolError as error:
                    change.error = error.fresh()
                except Exception as error:
                    change.error = explained(pool, change, error).fresh()
            if change.error is None and version is not None:
                await self._switch(pool, version, change, made)
            else:
                if accepted and not change.cancelled and not made.incoming:
                    pool.error = str(change.error)
                if version is not None:
                    await self.encoder.forget(version)
        finally:
            if version is not None:
                self.encoder.promised.pop(version.owner, None)
            pool.change, pool.making = None, 0
            # Who waited knows why; others find the pool as `failed`.
            told = change.wait is not False or not accepted or change.cancelled
            if pool.current is None and told and not pool.stored and self.pools.get(pool.name) is pool:
                del self.pools[pool.name]

    async def _switch(self, pool: Pool, version: Version, change: Change, made: Made) -> None:
        """From now on requests are served from `version`; the version before it is freed after its last request."""
        old, pool.current, pool.versions = pool.current, version, max(pool.versions, version.number)
        pool.progress, pool.seconds = change.progress, time.perf_counter() - made.begin
        if not made.incoming:  # else the last change of a client's may have failed all the same
            pool.error = None
        if old is not None and old.users:
            pool.kept[old.number] = old
        if pool.progress is not None:
            self.metrics.changed(pool.name, pool.progress.tokens, pool.progress.blocks, pool.seconds)
        if not version.definition.options.pinned:
            version.resident.clear()
            await self.channel.release(version.owner)
        if old is not None:
            if not old.users:  # its last request has ended meanwhile
                pool.kept.pop(old.number, None)
            await self._retire(old)

    # ---- leases: a version lives until its last request has ended ----

    def lease(self, version: Version) -> None:
        """A request begins on `version`."""
        version.users += 1
        version.requests += 1

    def end_lease(self, version: Version, variant: str | None = None) -> None:
        """A request on `version` has ended; `variant` is what `Layouts.variant` gave it, if it came so far."""
        version.users -= 1
        if variant in version.headers:
            version.headers[variant].users -= 1
        if version.retired and version.users == 0:
            pool = self.pools.get(version.name)
            if pool is not None and pool.kept.get(version.number) is version:
                del pool.kept[version.number]
            self.workers.background(self.encoder.forget(version))

    async def _retire(self, version: Version) -> None:
        version.retired = True
        if version.users == 0:
            await self.encoder.forget(version)

    async def prepare_retriever(self, version: Version, options: RequestOptions) -> None:
        """Build the retriever a request asks for beside the event loop: a dense one may load a model.

        Raises:
            PoolError: see `access.check_retriever`.
        """
        check_retriever(self.manager, options.retriever)
        if not version.has_retriever(options):
            await self.workers.apart(version.retriever, options)
