"""The pools of one server: creating, changing, encoding and leasing them. Runs in SGLang's tokenizer process."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import fastapi

from sglang_ext import compat
from sglang_ext.cache import carried
from sglang_ext.cache.rows import INTERNAL
from sglang_ext.config import PoolOptions, RequestOptions, check_name
from sglang_ext.serving.access import may_see_definitions
from sglang_ext.serving.change import PREPARING, Change, Progress
from sglang_ext.serving.encode import Run, plan_runs
from sglang_ext.serving.errors import BlocksLost, PoolError, UnknownPool
from sglang_ext.serving.grammar import LabelCheck
from sglang_ext.serving.label_tree import LabelTokens
from sglang_ext.serving.labels import check_labels, label_tokens
from sglang_ext.serving.layout import (
    Layout,
    bos,
    group_demonstrations,
    lay_out,
    parse_demonstrations,
)
from sglang_ext.serving.memory import give_back
from sglang_ext.serving.messages import ExtAdminReqInput
from sglang_ext.serving.metrics import TokenizerMetrics
from sglang_ext.serving.plan import ROOM_FOR_REQUESTS, beyond_context, describe
from sglang_ext.serving.pool import CHAT, COMPLETION, Definition, Version
from sglang_ext.serving.store import PoolStore, Stored
from sglang_ext.serving.submitted import Source, Submitted
from sglang_ext.settings import server_settings
from sglang_ext.systems.registry import systems

logger = logging.getLogger(__name__)

WAIT_FOR_ROOM_SECONDS = 120
ENCODING = f"{INTERNAL}encode-"
IDLE_CHUNKS = 4  # of one encoding request while no client waits: between two requests the GPU has nothing to do
COUNTED_TIMES, COUNTED_AT_LEAST = 4, 1 << 18  # tokens of a pool that are counted before it is refused: see _countable
ENCODE_TRIALS = 8  # of a new version, each time the cache is emptied between two requests of its encoding

SCORED_AT_ONCE = 4  # requests whose labels are scored at one time: others come between their passes

T = TypeVar("T")
Define = Callable[[int], tuple[Definition, bool]]
"""From the most tokens that may be counted to (what a pool is to hold, whether who asked waits for it)."""


@dataclass(eq=False)
class Pool:
    """A name, the version requests are served from, and the change under way.

    Attributes:
        progress: of the last change that was made.
        error: why the last change was not made, after it had been accepted.
        versions: number of the last version.
        seconds: what making the current version took.
        deletion: the pool is being deleted; no change begins any more.
    """

    name: str
    current: Version | None = None
    change: Change | None = None
    progress: Progress | None = None
    error: str | None = None
    versions: int = 0
    seconds: float = 0.0
    deletion: asyncio.Task[None] | None = None

    @property
    def status(self) -> str:
        """`encoding` while a change is under way, else `ready`, or `failed` where there is no version to serve."""
        if self.change is not None:
            return "encoding"
        if self.current is not None:
            return "ready"
        return "failed" if self.error else "cancelled"


@dataclass
class Made:
    """What a change has come to so far.

    Attributes:
        version: the new version, once it is laid out.
        begin: when the change began, by `time.perf_counter`, in seconds.
    """

    begin: float
    version: Version | None = None


class PoolService:
    """All pools of a server. Its methods run on the tokenizer manager's event loop."""

    def __init__(self, manager: Any, directory: str | None = None) -> None:
        self.manager = manager
        self.settings = server_settings()
        self.pools: dict[str, Pool] = {}
        system = systems()[manager.server_args.attention_backend]
        self.policy_options = system.make_policy().request_options
        self._streams = system.streams
        self.counters = {"requests": 0, "reencoded_blocks": 0, "retrieval_seconds": 0.0, "stitched_tokens": 0}
        self.metrics = TokenizerMetrics(
            manager.enable_metrics, manager.server_args.served_model_name, self.settings.pool_metrics
        )
        self.store = PoolStore(directory) if directory else None
        self._restore, self.damaged = self.store.load(self.settings.strict_pool_dir) if self.store else ({}, [])
        for problem in self.damaged:
            logger.error("sglang_ext: %s", problem)
        self._restoring: asyncio.Task[None] | None = None
        self._admin_lock = asyncio.Lock()
        self._encoding = asyncio.Lock()
        self._flushes = 0
        self._turns = 0  # of pools that are read, tokenized or encoded
        self._promised: dict[str, int] = {}  # version's owner -> tokens that its encoding under way has yet to write
        self.headers: dict[str, tuple[int, ...]] = {}  # of chat requests, by name (serving.chat)
        self._versions: weakref.WeakSet[Version] = weakref.WeakSet()
        tokenizer = getattr(manager, "tokenizer", None)  # of each thread its own: copying a large one takes a second
        self._own_tokenizer: Any = copy.deepcopy(tokenizer)
        self._label_check: LabelCheck | None = None
        self._thread = ThreadPoolExecutor(1, "sglang-ext-layout")
        self._request_tokenizer: Any = copy.deepcopy(tokenizer)
        self._request_thread = ThreadPoolExecutor(1, "sglang-ext-requests")
        self.scoring = asyncio.Semaphore(SCORED_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.bytes_per_token = 0

    # ---- reading ----

    def get(self, name: str) -> Pool:
        """The pool of that name, or UnknownPool (404) with the names there are, for those who may see them."""
        if name not in self.pools:
            if name in self._restore:
                raise PoolError(f"pool {name!r} is being restored from disk; retry", 503)
            raise UnknownPool(str(name), list(self.pools) if may_see_definitions(self.manager) else None)
        return self.pools[name]

    def version(self, name: str) -> Version:
        """The version of a pool that requests are served from now."""
        pool = self.get(name)
        if pool.status == "failed":
            why = pool.error if may_see_definitions(self.manager) else f"pool {name!r} could not be made"
            raise PoolError(f"{why}; put it again, or delete it", 409)
        if pool.current is None:
            raise PoolError(f"pool {name!r} is still being encoded; wait until GET /v1/pools/{name} says ready", 409)
        return pool.current

    async def info(self, name: str, tokens: bool = False) -> dict[str, Any]:
        """What is in a pool: options, labels, blocks with their demonstrations, residency and hits."""
        return await self._info(self.get(name), tokens)

    async def _info(self, pool: Pool, tokens: bool = False) -> dict[str, Any]:
        info = self._summary(pool)
        version = pool.current
        if version is None:
            return info
        layout = version.layouts[COMPLETION]
        state = await self.admin("blocks", keys=[block.key for block in layout.blocks])
        info["blocks"] = [
            {
                "id": number,
                "key": block.key,
                "demonstrations": list(block.demonstrations),
                "tokens": len(block.token_ids),
                "position": block.position,
                "resident": resident,
                "hits": hits,
            }
            | ({"token_ids": list(block.token_ids), "spans": [list(s) for s in block.spans]} if tokens else {})
            for number, (block, resident, hits) in enumerate(
                zip(layout.blocks, state["resident"], state["hits"], strict=True)
            )
        ]
        return info

    def list(self) -> list[dict[str, Any]]:
        """A line for each pool."""
        return [self._summary(self.pools[name]) for name in sorted(self.pools)]

    def _summary(self, pool: Pool) -> dict[str, Any]:
        info: dict[str, Any] = {
            "name": pool.name,
            "version": pool.current.number if pool.current else 0,
            "status": pool.status,
            "error": pool.error,
            "setup_seconds": round(pool.seconds, 3),
        }
        if pool.change is not None:
            info["phase"] = pool.change.phase
        progress = pool.change.progress if pool.change is not None else pool.progress
        if progress is not None:
            info["progress"] = vars(progress).copy()
        if pool.current:
            definition, layout = pool.current.definition, pool.current.layouts[COMPLETION]
            info |= {
                "options": vars(definition.options).copy(),
                "labels": list(definition.labels),
                "demonstrations": len(definition.demonstrations) - len(definition.deleted),
                "deleted": sorted(definition.deleted),
                "num_blocks": len(layout.blocks),
                "tokens": layout.tokens,
                "bytes": layout.tokens * self.bytes_per_token,
                "requests_in_flight": pool.current.users,
            }
        return info

    # ---- changing ----

    async def put(
        self, name: str, demonstrations: Iterable[Any], options: Mapping[str, Any], wait: bool = True
    ) -> dict[str, Any]:
        """Create or replace a pool. Until the new blocks are encoded, requests are served from the old version."""
        return await self.put_from(name, lambda: Submitted(demonstrations, options, wait))

    async def put_from(self, name: str, source: Source) -> dict[str, Any]:
        """`put` of what `source` reads, away from the event loop."""
        check_name(name)
        self._refuse_streams()

        def define(limit: int) -> tuple[Definition, bool]:
            submitted = source()
            parsed = PoolOptions.parse(submitted.options)
            return self._define(submitted.demonstrations, parsed, limit), submitted.wait

        return await self._change(name, define)

    async def append(self, name: str, demonstrations: Iterable[Any], wait: bool = True) -> dict[str, Any]:
        """Add demonstrations as new blocks; the blocks there are stay as they are."""
        return await self.append_from(name, lambda: Submitted(demonstrations, {}, wait))

    async def append_from(self, name: str, source: Source) -> dict[str, Any]:
        """`append` of what `source` reads, away from the event loop."""
        definition = self.version(name).definition

        def define(limit: int) -> tuple[Definition, bool]:
            submitted = source()
            if submitted.options:
                names = ", ".join(sorted(submitted.options))
                raise ValueError(f"{names}: a pool's options are set when it is put, not on appending")
            return self._grown(definition, submitted.demonstrations, limit), submitted.wait

        return await self._change(name, define)

    async def delete_demonstration(self, name: str, id: str, purge: bool = False, wait: bool = True) -> dict[str, Any]:
        """Leave a demonstration out of retrieval and views at once; with `purge`, encode again all it reached."""
        definition = self.version(name).definition
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

    async def delete(self, name: str) -> dict[str, Any]:
        """Delete a pool. Requests in flight finish on it; its blocks are freed after the last one."""
        pool = self.get(name)
        if pool.deletion is None:
            pool.deletion = self.background(self._delete(pool))
        await asyncio.shield(pool.deletion)
        return {"name": name, "status": "deleted"}

    async def _delete(self, pool: Pool) -> None:
        try:
            if pool.change is not None:
                pool.change.cancel()
                await pool.change.ended()
            if self.pools.get(pool.name) is not pool:
                return  # its first change was cancelled: it never was a pool
            if self.store:
                try:
                    await asyncio.to_thread(self.store.delete, pool.name)
                except OSError as error:
                    why = f"pool {pool.name!r} is not deleted: its file cannot be removed ({error}); retry"
                    raise PoolError(why, 503) from error
            del self.pools[pool.name]
            self.metrics.changed(pool.name, 0, 0, 0.0)
            if pool.current:
                await self._retire(pool.current)
        finally:
            pool.deletion = None

    async def cancel(self, name: str) -> dict[str, Any]:
        """Stop the encoding under way; the pool stays as it was before, and vanishes if it never was ready."""
        pool = self.get(name)
        if pool.change is not None:
            pool.change.cancel()
            await pool.change.ended()
        return self._summary(pool)

    async def plan(self, source: Source) -> dict[str, Any]:
        """Tokens, bytes and blocks a pool would take, and how many such pools fit in an empty KV cache."""
        self._refuse_streams()
        with self._turn():
            state = await self.admin("state")
            return await self._read(self._plan, source, state)

    def _plan(self, source: Source, state: Mapping[str, Any]) -> dict[str, Any]:
        submitted = source()
        parsed = PoolOptions.parse(submitted.options)
        definition = self._define(submitted.demonstrations, parsed, _countable(state))
        layout = self._lay_out(definition)
        return describe(layout, parsed, state["bytes_per_token"], self.manager.context_len, state["total_tokens"])

    def _define(self, demonstrations: Iterable[Any], options: PoolOptions, limit: int) -> Definition:
        """A new pool of demonstrations in blocks. Takes up to seconds: for `_apart`."""
        items = parse_demonstrations(demonstrations, most=self.settings.max_demonstrations)
        groups = group_demonstrations(items, options, self._tokenizer(), limit)
        return Definition(options, {item.id: item for item in items}, tuple(map(tuple, groups)))

    def _grown(self, definition: Definition, demonstrations: Iterable[Any], limit: int) -> Definition:
        """A pool's definition with demonstrations added in blocks of their own; likewise."""
        most = self.settings.max_demonstrations - len(definition.demonstrations)
        items = parse_demonstrations(demonstrations, taken=definition.demonstrations, most=most)
        return definition.grown(items, group_demonstrations(items, definition.options, self._tokenizer(), limit))

    def _refuse_streams(self) -> None:
        if self._streams:
            chosen = self.manager.server_args.attention_backend
            raise PoolError(
                f"every request of this server is a stream, and there are no pools (--attention-backend {chosen}):"
                " serve them with another backend"
            )

    def _refuse_busy(self, name: str) -> None:
        pool = self.pools.get(name)
        if pool is not None and pool.deletion is not None:
            raise PoolError(f"pool {name!r} is being deleted; put it again when GET /v1/pools/{name} answers 404", 409)
        if pool is not None and pool.change is not None:
            raise PoolError(
                f"pool {name!r} is being changed already; wait for it, or cancel it with POST /v1/pools/{name}/cancel",
                409,
            )
        if pool is None and len(self.pools) >= self.settings.max_pools:
            raise PoolError(
                f"the server has {len(self.pools)} pools, as many as it may (--max-pools {self.settings.max_pools}):"
                " delete one first",
                413,
            )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """A place in the queue of those that have a pool read, tokenized or encoded; PoolError (429) without one."""
        most = 1 + self.settings.max_waiting_encodings
        if self._turns >= most:
            raise PoolError(
                f"{self._turns} changes of pools are under way or wait, as many as may (--max-waiting-encodings"
                f" {self.settings.max_waiting_encodings} beside one): retry when GET /v1/pools shows fewer",
                429,
            )
        self._turns += 1
        try:
            yield
        finally:
            self._turns -= 1

    async def _change(self, name: str, define: Define) -> dict[str, Any]:
        """Make what `define` defines the pool's next version: lay out, check, encode, store, switch over."""
        self._refuse_busy(name)
        place = contextlib.ExitStack()
        place.enter_context(self._turn())
        # Nothing was awaited since the checks: of two changes at once, one finds the other.
        pool = self.pools.setdefault(name, Pool(name))
        change, made = Change(), Made(time.perf_counter())
        pool.change = change

        async def settle() -> None:
            with place:
                await self._settle(pool, change, made)

        work = self._make(pool, change, made, define)
        self.background(change.start(work, settle, lambda error: _explained(pool, change, error)))
        try:
            await change.accepted()
            if not change.wait:
                return self._summary(pool)
            await change.made()
        except asyncio.CancelledError:
            change.leave()
            raise
        return await self._info(pool)

    async def _make(self, pool: Pool, change: Change, made: Made, define: Define) -> None:
        """Lay out and encode a new version. Whatever it did until it failed or was cancelled, `_settle` undoes."""
        state = await self.admin("state")
        version, wait = await self._read(self._prepare, pool, change, define, _countable(state))
        made.version = version
        self._versions.add(version)
        change.prepared(wait)
        missing = await self._missing(version)
        needed = _tokens(version, missing)
        async with self._encoding:  # between two runs: what a run has written is held, and still promised
            await self._check_memory(version, needed)
            self._promised[version.owner] = needed
        layouts = version.layouts.values()
        progress = Progress(sum(len(each.blocks) for each in layouts), sum(each.tokens for each in layouts))
        change.accept(progress)
        # While the blocks are encoded: no request waits for it.
        indexed = self.background(self._apart(version.retriever, RequestOptions(version.name), pool.current))
        flushes = await self._encode_all(version, missing, progress)
        if flushes == self._flushes:  # else the first request finds what is missing, and encodes it
            version.resident.update(version.layouts)
        await asyncio.shield(indexed)

    def _prepare(self, pool: Pool, change: Change, define: Define, limit: int) -> tuple[Version, bool]:
        """The new version with its blocks tokenized, and whether who asked waits for it."""
        change.phase = PREPARING
        definition, wait = define(limit)
        version = Version(pool.name, pool.versions + 1, definition)
        self._lay_out_all(version, pool.current)
        return version, wait

    async def _settle(self, pool: Pool, change: Change, made: Made) -> None:
        """Serve the pool from the version that was made; where it was not, leave everything as it was."""
        version, accepted = made.version, change.progress is not None
        try:
            if change.error is None and version is not None and self.store:
                try:
                    await asyncio.to_thread(self.store.save, version.name, version.number, version.definition.dump())
                except Exception as error:
                    change.error = _explained(pool, change, error).fresh()
            if change.error is None and version is not None:
                await self._switch(pool, version, change, time.perf_counter() - made.begin)
            else:
                if accepted and not change.cancelled:
                    pool.error = str(change.error)
                if version is not None:
                    await self.admin("release", owner=version.owner, drop=True)
        finally:
            if version is not None:
                self._promised.pop(version.owner, None)
            pool.change = None
            # Who waited knows why; others find the pool as `failed`.
            told = change.wait is not False or not accepted or change.cancelled
            if pool.current is None and told and self.pools.get(pool.name) is pool:
                del self.pools[pool.name]

    async def _switch(self, pool: Pool, version: Version, change: Change, seconds: float) -> None:
        """From now on requests are served from `version`; the version before it is freed after its last request."""
        old, pool.current, pool.versions = pool.current, version, version.number
        pool.progress, pool.error, pool.seconds = change.progress, None, seconds
        if pool.progress is not None:
            self.metrics.changed(pool.name, pool.progress.tokens, pool.progress.blocks, seconds)
        if not version.definition.options.pinned:
            version.resident.clear()
            await self.release(version.owner)
        if old is not None:
            await self._retire(old)

    async def _missing(self, version: Version) -> dict[str, Sequence[int]]:
        """Hold what is resident of a version for its owner; returns the other blocks of each variant."""
        return {
            variant: sorted(await self._hold(version.owner, layout, range(len(layout.blocks))))
            for variant, layout in version.layouts.items()
        }

    async def _encode_all(self, version: Version, missing: Mapping[str, Sequence[int]], progress: Progress) -> int:
        """Encode the missing blocks of a new version; returns how often the cache had been emptied before.

        Between two requests of an encoding the scheduler is idle, and whoever empties the cache then takes the blocks
        that the next one attends to: what is missing is encoded again.

        Raises:
            BlocksLost: they were taken `ENCODE_TRIALS` times.
        """
        trials = 0
        while True:
            trials += 1
            progress.blocks_done = progress.blocks - sum(map(len, missing.values()))
            progress.tokens_done = progress.tokens - sum(
                version.layouts[variant].lengths[block] for variant, blocks in missing.items() for block in blocks
            )
            flushes = self._flushes
            try:
                for variant, layout in version.layouts.items():
                    await self._encode(version, layout, missing[variant], version.owner, progress)
                return flushes
            except BlocksLost:
                if trials == ENCODE_TRIALS:
                    raise
            missing = await self._missing(version)
            self._promised[version.owner] = _tokens(version, missing)

    # ---- leases: a version lives until its last request has ended ----

    def lease(self, version: Version) -> None:
        """A request begins on `version`."""
        version.users += 1

    def end_lease(self, version: Version) -> None:
        """A request on `version` has ended."""
        version.users -= 1
        if version.retired and version.users == 0:
            self.background(self._free(version))

    async def _retire(self, version: Version) -> None:
        version.retired = True
        if version.users == 0:
            await self._free(version)

    async def _free(self, version: Version) -> None:
        await self.admin("release", owner=version.owner, drop=True)

    # ---- encoding ----

    async def ensure(self, version: Version, variant: str, blocks: Collection[int], owner: str) -> bool:
        """See that `blocks` of a variant are in the KV cache; encode those that are not.

        Returns:
            Whether `owner` now holds the blocks and must let go of them (`release`).
        """
        if variant in version.resident:
            return False
        layout = version.layouts[variant]
        pinned = version.definition.options.pinned
        wanted = range(len(layout.blocks)) if pinned else blocks
        holder = version.owner if pinned else owner
        deadline = time.monotonic() + WAIT_FOR_ROOM_SECONDS
        while True:
            async with self._encoding:
                if variant in version.resident:
                    return False
                flushes = self._flushes
                try:
                    held = await self._make_resident(version, layout, wanted, holder)
                except BlocksLost:  # running requests needed the room
                    held = False
                    if not pinned:
                        await self.release(holder)
                if held:
                    if flushes != self._flushes:
                        continue  # the cache was emptied meanwhile
                    if pinned:
                        version.resident.add(variant)
                    return not pinned
            # What other requests hold fills the cache. They let go of it when they finish.
            if time.monotonic() > deadline:
                raise PoolError(
                    f"no room in the KV cache for the blocks of pool {version.name!r} within {WAIT_FOR_ROOM_SECONDS} s:"
                    " other requests hold it; retry, lower the ratio or raise --max-total-tokens",
                    503,
                )
            await asyncio.sleep(0.02)

    async def _make_resident(self, version: Version, layout: Layout, wanted: Collection[int], holder: str) -> bool:
        """Hold `wanted`, encoding what is missing; False, and nothing held, when other requests fill the cache."""
        pattern = version.definition.options.block_sparse
        held = set(wanted)
        while True:
            missing = await self._hold(holder, layout, sorted(held))
            # What a missing block attends to must be there while it is encoded, and may be missing itself.
            context = {other for block in missing for other in pattern.attended(block)}
            if context <= held:
                break
            held |= context
        if not missing:
            return True
        needed = sorted(missing)
        tokens = sum(layout.lengths[block] for block in needed)
        state = await self.admin("state")
        pinned = version.definition.options.pinned
        if tokens > state["total_tokens"] - state["held_tokens"] - self._owed(version) - ROOM_FOR_REQUESTS:
            if not pinned:
                await self.release(holder)
            await self._check_memory(version, tokens, state["total_tokens"] - state["held_by_pools"])
            return False
        self.counters["reencoded_blocks"] += len(needed)
        self.metrics.reencoded(version.name, len(needed))
        await self._encode(version, layout, needed, holder, None, locked=True)
        spare = held - set(wanted)
        if spare and not pinned:
            await self.admin("release", owner=holder, keys=[layout.blocks[block].key for block in sorted(spare)])
        return True

    async def release(self, owner: str) -> None:
        """Let go of what `ensure` held for a request."""
        await self.admin("release", owner=owner)

    def release_later(self, owner: str) -> None:
        """`release`, without waiting for the answer."""
        self.background(self.release(owner))

    async def prepare_retriever(self, version: Version, options: RequestOptions) -> None:
        """Build the retriever a request asks for beside the event loop: a dense one may load a model."""
        if not version.has_retriever(options):
            await self._apart(version.retriever, options)

    async def label_tokens(self, version: Version, lead: str, end: str) -> LabelTokens:
        """Tokens of a version's labels between `lead` and `end`: made once, beside the event loop."""
        known = version.label_tokens.get((lead, end))
        if known is None:
            known = await self._apart(label_tokens, self._tokenizer(), version.definition.labels, lead, end)
            version.label_tokens[lead, end] = known
        return known

    def flushed(self) -> None:
        """The KV cache was or will be emptied: what is resident must be looked up again before it is used."""
        self._flushes += 1
        for version in self._versions:
            version.resident.clear()

    async def variant(self, version: Version, header: Sequence[int] | None) -> str:
        """The variant behind a chat header, laid out when it is first asked for; None is the completion variant."""
        if header is None:
            return COMPLETION
        known = version.layouts.get(CHAT)
        if known is None or known.header != tuple(header):  # a template may put today's date there
            layout = await self._apart(self._lay_out, version.definition, tuple(header))
            self._check_context(version, layout)
            version.layouts[CHAT] = layout
            version.resident.discard(CHAT)
            if known is not None:
                keys = [block.key for block in known.blocks]
                self.background(self.admin("release", owner=version.owner, keys=keys, drop=True))
        return CHAT

    async def _hold(self, owner: str, layout: Layout, blocks: Iterable[int]) -> set[int]:
        """Hold what is resident of `blocks`; returns the numbers of those that are not."""
        numbers = list(blocks)
        keys = [layout.blocks[block].key for block in numbers]
        deadline = time.monotonic() + WAIT_FOR_ROOM_SECONDS
        while True:
            answer = await self.admin("hold", owner=owner, keys=keys)
            if not answer.get("busy"):
                break
            if time.monotonic() > deadline:
                raise PoolError("a long prompt takes all of the KV cache; retry", 503)
            await asyncio.sleep(0.01)
        absent = set(answer["missing"])
        return {block for block in numbers if layout.blocks[block].key in absent}

    async def _encode(
        self,
        version: Version,
        layout: Layout,
        blocks: Sequence[int],
        owner: str,
        progress: Progress | None,
        locked: bool = False,
    ) -> None:
        state = await self.admin("state")
        chunk = state["chunked_prefill_size"]
        pattern = version.definition.options.block_sparse

        def run_tokens() -> int:
            if not chunk:  # SGLang cuts nothing: a run is one batch
                return 8192
            return int(chunk) * (1 if compat.others_run(self.manager, ENCODING) else IDLE_CHUNKS)

        runs = plan_runs(layout, pattern, blocks, owner, run_tokens, state["max_req_input_len"] - 1)
        while True:
            async with contextlib.nullcontext() if locked else self._encoding:
                run = next(runs, None)  # its size is chosen when its turn has come
                if run is None:
                    return
                await self._encode_run(run)
                if version.owner in self._promised:
                    self._promised[version.owner] -= run.new_tokens
            if progress:
                progress.blocks_done += len(run.row.new)
                progress.tokens_done += run.new_tokens

    async def _encode_run(self, run: Run) -> None:
        """One encoding request through SGLang's scheduler; aborted there when this task is cancelled."""
        request = carried.encode_request(ENCODING + uuid.uuid4().hex, list(run.token_ids), run.row)
        try:
            async for out in compat.generate(self.manager, request):
                reason = out["meta_info"].get("finish_reason") or {}
                if reason.get("type") == "abort":  # SGLang's own abort of everything: the blocks are not written
                    raise PoolError(f"aborted: {reason.get('message')}", 503)
        except asyncio.CancelledError:
            self.manager.abort_request(rid=request.rid)
            raise
        except Exception as error:
            if isinstance(error, fastapi.HTTPException) and compat.blocks_were_missing(error):
                raise BlocksLost from error
            raise PoolError(f"encoding failed: {error}", 503) from error

    def _owed(self, version: Version) -> int:
        """Tokens that others than `version` have a right to and do not hold yet.

        They are what encodings under way have still to write, and pinned pools whose blocks a flush took.
        """
        flushed = {
            block.key: len(block.token_ids)
            for pool in self.pools.values()
            if pool.current not in (None, version) and pool.current.definition.options.pinned
            for variant, layout in pool.current.layouts.items()
            if variant not in pool.current.resident
            for block in layout.blocks
        }
        return sum(self._promised.values()) + sum(flushed.values())

    async def _check_memory(self, version: Version, needed: int, room: int | None = None) -> None:
        """PoolError (413) when `needed` tokens exceed `room`, by default what nobody holds."""
        state = await self.admin("state")
        available = (state["total_tokens"] - state["held_tokens"] if room is None else room) - ROOM_FOR_REQUESTS
        available -= self._owed(version)
        if needed > available:
            raise PoolError(
                f"pool {version.name!r} needs {needed} tokens of KV cache, {max(available, 0)} are available"
                f" ({state['total_tokens']} in all, {state['held_tokens']} held, {ROOM_FOR_REQUESTS} kept for"
                " requests); nothing was changed. Use fewer demonstrations, delete a pool or raise --max-total-tokens",
                413,
            )

    def _check_context(self, version: Version, layout: Layout) -> None:
        """Positions must stay inside the model's context."""
        problem = beyond_context(layout, version.definition.options, self.manager.context_len)
        if problem:
            raise PoolError(f"pool {version.name!r}: {problem}")

    # ---- plumbing ----

    async def admin(self, op: str, **payload: Any) -> dict[str, Any]:
        """One operation on the schedulers (serving.admin.Admin)."""
        # A caller that is cancelled must not leave its answer behind for the next one: the exchange goes on without it.
        return await asyncio.shield(self.background(self._exchange(op, payload)))

    async def _exchange(self, op: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        self.manager.auto_create_handle_loop()
        async with self._admin_lock:
            answers = await self.manager.ext_admin_communicator(ExtAdminReqInput(op=op, payload=json.dumps(payload)))
        result: dict[str, Any] = json.loads(answers[0].payload)
        if "error" in result:
            raise PoolError(f"sglang_ext: {op} failed: {result['error']}", 503)
        if op == "state":
            self.bytes_per_token = result["bytes_per_token"]
        return result

    async def _apart(self, work: Callable[..., T], *args: Any) -> T:
        """Tokenizing and grouping a pool takes up to seconds: done in a thread (one: tokenizers are not shared)."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _read(self, work: Callable[..., T], *args: Any) -> T:
        """`_apart`, of work that reads what a client submitted; the memory that it took and freed is given back."""
        try:
            return await self._apart(work, *args)
        finally:
            self._thread.submit(give_back)

    async def with_tokenizer(self, work: Callable[[Any], T]) -> T:
        """What `work` makes of a text that is too long for the event loop, beside the thread that prepares pools."""
        self._tokenizer()  # or an error
        return await self.beside(work, self._request_tokenizer)

    async def beside(self, work: Callable[..., T], *args: Any) -> T:
        """Work of a request that takes too long for the event loop, in a thread of its own."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._request_thread, work, *args)
        finally:
            self._request_thread.submit(give_back)

    def _tokenizer(self) -> Any:
        """A tokenizer of our own: layouts are made in a thread, and two users of one fast tokenizer collide."""
        if self.manager.tokenizer is None:
            raise PoolError("the server runs with --skip-tokenizer-init: pools are text and need the tokenizer")
        return self._own_tokenizer

    def _lay_out_all(self, version: Version, old: Version | None) -> None:
        """Blocks of every variant that the pool serves: a chat's stay known when the pool is changed."""
        known = old.layouts if old is not None and version.definition.extends(old.definition) else {}
        version.layouts[COMPLETION] = self._lay_out(version.definition, known=known.get(COMPLETION))
        chat = old.layouts.get(CHAT) if old is not None else None  # read once: a request may put another in its place
        if old is not None and chat is not None and old.definition.options.system == version.definition.options.system:
            version.layouts[CHAT] = self._lay_out(version.definition, chat.header, chat if CHAT in known else None)
        for layout in version.layouts.values():
            self._check_context(version, layout)
        if self._label_check is None:
            self._label_check = LabelCheck(
                self._tokenizer(),
                self.manager.model_config.vocab_size,
                self.manager.model_config.hf_eos_token_id,
                self.manager.server_args.grammar_backend,
            )
        check_labels(self._label_check, version.definition, old.definition if old is not None else None)

    def _lay_out(
        self, definition: Definition, header: Sequence[int] | None = None, known: Layout | None = None
    ) -> Layout:
        tokenizer = self._tokenizer()
        if header is None:
            header = bos(tokenizer)
        return lay_out(
            definition.groups,
            definition.demonstrations,
            definition.options,
            tokenizer,
            header,
            self.model_name(),
            known.blocks if known else (),
        )

    def model_name(self) -> str:
        """Names the weights and cache format that block states belong to."""
        args = self.manager.server_args
        return f"{self.manager.model_path}@{args.revision}:{args.dtype}:{args.kv_cache_dtype}:{args.quantization}"

    def background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that goes on whoever waits for it; the loop keeps only weak references to tasks."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- start ----

    async def restored(self) -> None:
        """Encode the pools of `--pool-dir`, once; requests wait for it."""
        if self._restoring is None:
            if not self._restore:
                return
            self._restoring = asyncio.create_task(self._restore_all())
        await asyncio.shield(self._restoring)

    async def _restore_all(self) -> None:
        for name, stored in list(self._restore.items()):
            try:
                self._refuse_streams()
                await self._restore_one(name, stored)
            except Exception as error:  # one pool that no longer fits must not take the others away
                logger.error("sglang_ext: pool %s of the pool directory cannot be served: %s", name, error)
                why = f"pool {name!r} cannot be restored: {error}"
                self.pools[name] = Pool(name, error=why, versions=stored.version)
            del self._restore[name]

    async def _restore_one(self, name: str, stored: Stored) -> None:
        """Encode a stored pool again, under the number that its version had."""
        self.pools[name] = Pool(name, versions=stored.version - 1)
        try:
            await self._change(name, lambda _limit: (Definition.load(stored.definition), True))
        finally:
            if (pool := self.pools.get(name)) is not None and pool.current is None:
                del self.pools[name]


def _countable(state: Mapping[str, Any]) -> int:
    """How many tokens of a pool are counted before it is refused: enough to say how much too large most are."""
    return max(int(state["total_tokens"]) * COUNTED_TIMES, COUNTED_AT_LEAST)


def _explained(pool: Pool, change: Change, error: BaseException) -> PoolError:
    """What users are told of an exception that ended a change."""
    if isinstance(error, asyncio.CancelledError):
        return PoolError(f"the change of pool {pool.name!r} was cancelled; the pool is as it was before", 409)
    if change.progress is None:
        if isinstance(error, PoolError):
            return error
        if isinstance(error, ValueError):
            return PoolError(str(error))
    logger.error("sglang_ext: encoding pool %s: %s", pool.name, error, exc_info=not isinstance(error, PoolError))
    return PoolError(f"encoding pool {pool.name!r} failed: {error}", 503)


def _tokens(version: Version, blocks: Mapping[str, Sequence[int]]) -> int:
    """Tokens of blocks of a version's variants, shared ones counted once."""
    lengths = {
        version.layouts[variant].blocks[block].key: version.layouts[variant].lengths[block]
        for variant, numbers in blocks.items()
        for block in numbers
    }
    return sum(lengths.values())
