"""How a pool stands: the version it is served from, the change under way, and what users are told of both."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from sglang_ext.serving.change import Change, Progress
from sglang_ext.serving.errors import PoolError, reason_of
from sglang_ext.serving.pool import COMPLETION, Version
from sglang_ext.types import JsonObject, Options

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Pool:
    """A name, the version requests are served from, and the change under way.

    Attributes:
        progress: of the last change that was made.
        error: why the last change was not made, after it had been accepted.
        versions: number of the last version; in a shared folder, of the newest one that was seen there.
        seconds: what making the current version took.
        deletion: the pool is being deleted; no change begins any more.
        stored: a shared folder has the pool: what is not served here yet can be encoded from there.
        failure: why the newest version of a shared folder cannot be served here.
        kept: versions that were replaced, by number, while requests run on them.
        making: tokens of the version that is being made.
    """

    name: str
    current: Version | None = None
    change: Change | None = None
    progress: Progress | None = None
    error: str | None = None
    versions: int = 0
    seconds: float = 0.0
    deletion: asyncio.Task[None] | None = None
    stored: bool = False
    failure: str | None = None
    kept: dict[int, Version] = field(default_factory=dict)
    making: int = 0

    @property
    def tokens(self) -> int:
        """Of the version that is served, or of the one that is being made where that has more."""
        return max(self.making, self.current.tokens if self.current else 0)

    @property
    def status(self) -> str:
        """`encoding` while a change is under way, else `ready`, or `failed` where there is no version to serve.

        `stored`: a shared folder has it, and no request has needed it here.
        """
        if self.change is not None:
            return "encoding"
        if self.current is not None:
            return "ready"
        if self.stored and self.failure is None:
            return "stored"
        return "failed" if self.failure or self.error else "cancelled"

    @property
    def behind(self) -> bool:
        """Whether a shared folder has a newer version than the one that is served here."""
        return self.stored and (self.current is None or self.current.number < self.versions)

    def numbered(self, number: int) -> Version | None:
        """The version of that number, if it is served here, or requests still run on it."""
        if self.current is not None and self.current.number == number:
            return self.current
        return self.kept.get(number)


@dataclass
class Made:
    """What a change has come to so far.

    Attributes:
        number: of the new version. It is fixed when the change begins: it says which version the change replaces.
        incoming: whether the folder has the version already.
        begin: when the change began, by `time.perf_counter`, in seconds.
        version: the new version, once it is laid out.
    """

    number: int
    incoming: bool
    begin: float = field(default_factory=time.perf_counter)
    version: Version | None = None


def summary(pool: Pool, version: Version | None, bytes_per_token: int) -> JsonObject:
    """A line on a pool: how it stands, and the options, the labels and the size of one of its versions."""
    info: JsonObject = {
        "name": pool.name,
        "version": version.number if version else 0,
        "status": pool.status,
        "error": pool.error or pool.failure,
        "setup_seconds": round(pool.seconds, 3),
    }
    if pool.stored:
        info["newest"] = pool.versions
        served = [*pool.kept.values(), *([pool.current] if pool.current else [])]
        info["versions"] = [
            {"version": each.number, "requests": each.requests, "requests_in_flight": each.users} for each in served
        ]
    if pool.change is not None:
        info["phase"] = pool.change.phase
    progress = pool.change.progress if pool.change is not None else pool.progress
    if progress is not None:
        info["progress"] = vars(progress).copy()
    if version:
        definition, layout = version.definition, version.layouts[COMPLETION]
        info |= {
            "options": vars(definition.options).copy(),
            "labels": list(definition.labels),
            "demonstrations": len(definition.demonstrations) - len(definition.deleted),
            "deleted": sorted(definition.deleted),
            "num_blocks": len(layout.blocks),
            "tokens": layout.tokens,
            "bytes": layout.tokens * bytes_per_token,
            "requests_in_flight": version.users,
            "headers": [
                {
                    "tokens": len(version.layouts[variant].header),
                    "requests": use.requests,
                    "requests_in_flight": use.users,
                }
                for variant, use in version.headers.items()
            ],
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


def serving(pool: Pool, told: bool) -> Version:
    """The version of a pool that requests are served from now.

    Args:
        pool: which.
        told: whether who asks may know why there is none.

    Raises:
        PoolError: (409; 503 where it may be served by another server) there is none.
    """
    name = pool.name
    if pool.status == "failed":
        raise _failed(pool, told)
    if pool.current is None:
        raise PoolError(f"pool {name!r} is still being encoded; wait until GET /v1/pools/{name} says ready", 409)
    return pool.current


def _failed(pool: Pool, told: bool) -> PoolError:
    """What requests are told of a pool whose newest version is not served here."""
    why = (pool.failure or pool.error) if told else f"pool {pool.name!r} could not be made"
    return PoolError(f"{why}; put it again, or delete it", 503 if pool.failure else 409)


def numbered(pool: Pool, number: int, told: bool) -> Version:
    """The version of a pool that a request names by its number; see `serving`.

    Raises:
        PoolError: (409; 503 where it may be served by another server) it is not served here.
    """
    version = pool.numbered(number)
    if version is not None:
        return version
    if pool.failure is not None and number == pool.versions:
        raise _failed(pool, told)
    if pool.current is None:
        what = f"and no other version is: wait until GET /v1/pools/{pool.name} says that it is ready"
    else:
        what = f"it is at version {pool.current.number}: name that one, or leave the version out"
    raise PoolError(f"version {number} of pool {pool.name!r} is not served here, {what}", 409)


def refuse_busy(pool: Pool) -> None:
    """PoolError (409) for a pool that is being changed or deleted."""
    name = pool.name
    if pool.deletion is not None:
        raise PoolError(f"pool {name!r} is being deleted; put it again when GET /v1/pools/{name} answers 404", 409)
    if pool.change is not None:
        raise PoolError(
            f"pool {name!r} is being changed already; wait for it, or cancel it with POST /v1/pools/{name}/cancel",
            409,
        )


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
    return PoolError(f"encoding pool {pool.name!r} failed: {reason_of(error)}", 503)
