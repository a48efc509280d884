"""How a pool stands: the version it is served from, the change under way, and what users are told of both."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from sglang_ext.serving.change import Change, Progress
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.pool import COMPLETION, Version
from sglang_ext.types import JsonObject, Options

logger = logging.getLogger(__name__)


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


def summary(pool: Pool, bytes_per_token: int) -> JsonObject:
    """A line on a pool: how it stands, its options, its labels and what it takes."""
    info: JsonObject = {
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
            "bytes": layout.tokens * bytes_per_token,
            "requests_in_flight": pool.current.users,
        }
    return info


def blocks_of(version: Version, state: Options, tokens: bool) -> list[JsonObject]:
    """What users are told of a version's blocks.

    Args:
        version: whose.
        state: the schedulers' answer on its blocks: `resident` and `hits` of each.
        tokens: whether the token ids are wanted, too.
    """
    return [
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
            zip(version.layouts[COMPLETION].blocks, state["resident"], state["hits"], strict=True)
        )
    ]


def explained(pool: Pool, change: Change, error: BaseException) -> PoolError:
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
