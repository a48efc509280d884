"""Blocks into the KV cache: what is missing is encoded, one run after the other, through SGLang's scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import fastapi

from sglang_ext import compat
from sglang_ext.cache import carried
from sglang_ext.cache.rows import INTERNAL
from sglang_ext.compat.manager import abort_request
from sglang_ext.names import TokenizerManager
from sglang_ext.serving.change import Progress
from sglang_ext.serving.channel import Channel
from sglang_ext.serving.encode import EncodingRun, plan_runs
from sglang_ext.serving.errors import BlocksLost, PoolError
from sglang_ext.serving.layout import Layout
from sglang_ext.serving.plan import ROOM_FOR_REQUESTS
from sglang_ext.serving.pool import Version

WAIT_FOR_ROOM_SECONDS = 120
ENCODING = f"{INTERNAL}encode-"
IDLE_CHUNKS = 4  # in one encoding request while no client waits: longer requests leave fewer gaps without work
ENCODE_TRIALS = 8  # of a new version, each time the cache is emptied between two requests of its encoding


@dataclass(frozen=True)
class Missing:
    """What a new version has yet to write; its other blocks were held when they were looked up.

    Attributes:
        blocks: variant -> numbers of its blocks.
        flushes: how often the KV cache had been emptied before the first of them was looked up: where it has been
            emptied more often since, the others may be gone.
    """

    blocks: Mapping[str, Sequence[int]]
    flushes: int


class Encoder:
    """Encodes the blocks of pools, for one server.

    Args:
        manager: SGLang's tokenizer manager.
        channel: to the schedulers.
        served: the versions that requests are served from.
        reencoded: told of a version, how many of its blocks are encoded for a request, and how many of these the
            request itself needs.

    Attributes:
        flushes: how often the KV cache was emptied.
        promised: version's owner -> tokens that its encoding under way has yet to write.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        channel: Channel,
        served: Callable[[], Iterable[Version]],
        reencoded: Callable[[Version, int, int], None],
    ) -> None:
        self.manager, self._channel, self._served, self._reencoded = manager, channel, served, reencoded
        self._encoding = asyncio.Lock()
        self.flushes = 0
        self.promised: dict[str, int] = {}
        self._versions: weakref.WeakSet[Version] = weakref.WeakSet()

    # ---- versions ----

    def know(self, version: Version) -> None:
        """From now on a flush concerns this version, too."""
        self._versions.add(version)

    def flushed(self) -> None:
        """The KV cache was or will be emptied: what is resident must be looked up again before it is used."""
        self.flushes += 1
        for version in self._versions:
            version.resident.clear()

    async def promise(self, version: Version, missing: Missing) -> None:
        """Keep room for the missing blocks of a new version; PoolError (413) where there is none."""
        needed = _tokens(version, missing.blocks)
        async with self._encoding:  # between two runs: what a run has written is held, and still promised
            await self._check_memory(version, needed)
            self.promised[version.owner] = needed

    async def missing(self, version: Version) -> Missing:
        """Hold what is resident of a version for its owner; returns the other blocks."""
        flushes = self.flushes
        blocks = {
            variant: sorted(await self._hold(version, version.owner, layout, range(len(layout.blocks))))
            for variant, layout in version.layouts.items()
        }
        return Missing(blocks, flushes)

    async def forget(self, version: Version) -> None:
        """Free the blocks of a version that nobody is served from; those that no other one has leave the host, too."""
        kept = {block.key for other in self._served() for layout in other.layouts.values() for block in layout.blocks}
        gone = {block.key for layout in version.layouts.values() for block in layout.blocks} - kept
        await self._channel.ask("release", owner=version.owner, drop=True, gone=sorted(gone))

    async def encode_all(self, version: Version, missing: Missing, progress: Progress) -> bool:
        """Encode the missing blocks of a new version.

        Between two requests of an encoding the scheduler is idle, and whoever empties the cache then takes the blocks
        that the next one attends to: what is missing is encoded again.

        Returns:
            Whether all blocks are held; else the cache was emptied since it was last looked up what is missing.

        Raises:
            BlocksLost: they were taken `ENCODE_TRIALS` times.
        """
        trials = 0
        while True:
            trials += 1
            progress.blocks_done = progress.blocks - sum(map(len, missing.blocks.values()))
            progress.tokens_done = progress.tokens - sum(
                version.layouts[variant].lengths[block]
                for variant, blocks in missing.blocks.items()
                for block in blocks
            )
            try:
                for variant, layout in version.layouts.items():
                    await self._encode(version, layout, missing.blocks[variant], version.owner, progress)
                return missing.flushes == self.flushes
            except BlocksLost:
                if trials == ENCODE_TRIALS:
                    raise
            missing = await self.missing(version)
            self.promised[version.owner] = _tokens(version, missing.blocks)

    # ---- requests ----

    async def ensure(self, version: Version, variant: str, layout: Layout, blocks: Collection[int], owner: str) -> bool:
        """See that `blocks` of a variant are in the KV cache; encode those that are not.

        Args:
            layout: of the variant, when the request chose its blocks.

        Returns:
            Whether `owner` now holds the blocks and must let go of them (`release`).
        """
        if variant in version.resident:
            return False
        pinned = version.pinned(variant)
        wanted = range(len(layout.blocks)) if pinned else blocks
        holder = version.owner if pinned else owner
        deadline = time.monotonic() + WAIT_FOR_ROOM_SECONDS
        while True:
            async with self._encoding:
                if variant in version.resident:
                    return False
                flushes = self.flushes
                try:
                    held = await self._make_resident(version, layout, wanted, holder, pinned)
                except BlocksLost:  # running requests needed the room
                    held = False
                    if not pinned:
                        await self._channel.release(holder)
                if held:
                    if flushes != self.flushes:
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

    async def _make_resident(
        self, version: Version, layout: Layout, wanted: Collection[int], holder: str, pinned: bool
    ) -> bool:
        """Hold `wanted`, encoding what is missing; False, and nothing held, when other requests fill the cache."""
        pattern = version.definition.options.block_sparse
        held = set(wanted)
        while True:
            missing = await self._hold(version, holder, layout, sorted(held))
            # What a missing block attends to must be there while it is encoded, and may be missing itself.
            context = {other for block in missing for other in pattern.attended(block)}
            if context <= held:
                break
            held |= context
        if not missing:
            return True
        needed = sorted(missing)
        tokens = sum(layout.lengths[block] for block in needed)
        state = await self._channel.ask("state")
        if tokens > state["total_tokens"] - state["held_tokens"] - self._owed(version) - ROOM_FOR_REQUESTS:
            if not pinned:
                await self._channel.release(holder)
            await self._check_memory(version, tokens, state["total_tokens"] - state["held_by_pools"])
            return False
        self._reencoded(version, len(needed), len(missing.intersection(wanted)))
        await self._encode(version, layout, needed, holder, None, locked=True)
        spare = held - set(wanted)
        if spare and not pinned:
            await self._channel.ask("release", owner=holder, keys=[layout.blocks[block].key for block in sorted(spare)])
        return True

    # ---- blocks ----

    async def _hold(self, version: Version, owner: str, layout: Layout, blocks: Iterable[int]) -> set[int]:
        """Hold what is resident of `blocks`, or comes back from the host; returns the numbers of the others."""
        numbers = list(blocks)
        keys = [layout.blocks[block].key for block in numbers]
        deadline = time.monotonic() + WAIT_FOR_ROOM_SECONDS
        while True:
            spare = ROOM_FOR_REQUESTS + self._owed(version) - self.promised.get(version.owner, 0)
            answer = await self._channel.ask("hold", owner=owner, keys=keys, spare=spare)
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
        state = await self._channel.ask("state")
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
                if version.owner in self.promised:
                    self.promised[version.owner] -= run.new_tokens
            if progress:
                progress.blocks_done += len(run.row.new)
                progress.tokens_done += run.new_tokens

    async def _encode_run(self, run: EncodingRun) -> None:
        """One encoding request through SGLang's scheduler; aborted there when this task is cancelled.

        It comes before all answers: one of a high priority may wait for it, or for the runs that were begun before it.
        """
        rid, first = ENCODING + uuid.uuid4().hex, compat.first_priority(self.manager)
        request = carried.encode_request(rid, list(run.token_ids), run.row, first)
        try:
            async for out in compat.generate(self.manager, request):
                reason = out["meta_info"].get("finish_reason") or {}
                if reason.get("type") == "abort":  # SGLang's own abort of everything: the blocks are not written
                    raise PoolError(f"aborted: {reason.get('message')}", 503)
        except asyncio.CancelledError:
            abort_request(self.manager, request.rid)
            raise
        except Exception as error:
            if isinstance(error, fastapi.HTTPException) and compat.blocks_were_missing(error):
                raise BlocksLost from error
            raise PoolError(f"encoding failed: {error}", 503) from error

    # ---- memory ----

    def _owed(self, version: Version) -> int:
        """Tokens that others than `version` have a right to and do not hold yet.

        They are what encodings under way have still to write, and pinned pools whose blocks a flush took.
        """
        flushed = {
            block.key: len(block.token_ids)
            for other in self._served()
            if other is not version
            for variant, layout in other.layouts.items()
            if other.pinned(variant) and variant not in other.resident
            for block in layout.blocks
        }
        return sum(self.promised.values()) + sum(flushed.values())

    async def _check_memory(self, version: Version, needed: int, room: int | None = None) -> None:
        """PoolError (413) when `needed` tokens exceed `room`, by default what nobody holds."""
        state = await self._channel.ask("state")
        available = (state["total_tokens"] - state["held_tokens"] if room is None else room) - ROOM_FOR_REQUESTS
        available -= self._owed(version)
        if needed > available:
            raise PoolError(
                f"pool {version.name!r} needs {needed} tokens of KV cache, {max(available, 0)} are available"
                f" ({state['total_tokens']} in all, {state['held_tokens']} held, {ROOM_FOR_REQUESTS} kept for"
                " requests); nothing was changed. Use fewer demonstrations, delete a pool or raise --max-total-tokens",
                413,
            )


def _tokens(version: Version, blocks: Mapping[str, Sequence[int]]) -> int:
    """Tokens of blocks of a version's variants, shared ones counted once."""
    lengths = {
        version.layouts[variant].blocks[block].key: version.layouts[variant].lengths[block]
        for variant, numbers in blocks.items()
        for block in numbers
    }
    return sum(lengths.values())
