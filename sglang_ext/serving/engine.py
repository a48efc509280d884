"""SGLang's offline engine with pools."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sglang.srt.entrypoints.engine import Engine as SglangEngine

from sglang_ext.config import ATTENTION_BACKEND, POLICY_ENV, RADIX_CACHE_BACKEND
from sglang_ext.names import Passed
from sglang_ext.serving.explain import would_select
from sglang_ext.serving.planned import would_take
from sglang_ext.serving.submitted import Submitted
from sglang_ext.serving.tenancy import pools_of
from sglang_ext.settings import POOL_DIR_ENV, SETTINGS_ENV, settings_with
from sglang_ext.types import Json, JsonObject, Options

T = TypeVar("T")


def server_defaults() -> dict[str, str]:
    """Arguments that make a server one of ours; what follows from them is set by `serving.checks`.

    The radix cache is among them so that another attention backend is refused, not served without pools.
    """
    return {"attention_backend": ATTENTION_BACKEND, "radix_cache_backend": RADIX_CACHE_BACKEND}


@contextmanager
def _in_environment(
    pool_dir: str | os.PathLike[str] | None, policy: Options | None, settings: Options | None
) -> Iterator[None]:
    """The environment from which an engine's processes read their options, while they start.

    An engine without a `pool_dir` keeps no pools, whatever the environment says. A policy and settings that are not
    given stay as they are.
    """
    given: dict[str, str] = {POOL_DIR_ENV: "" if pool_dir is None else os.fspath(pool_dir)}
    if policy is not None:
        given[POLICY_ENV] = json.dumps(dict(policy))
    if settings is not None:
        given[SETTINGS_ENV] = settings_with(settings)
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Engine(SglangEngine):
    """`sglang.Engine` that serves pools of demonstrations.

    Takes SGLang's arguments (`sglang.srt.server_args.ServerArgs`), `pool_dir`, a folder in which pools are kept,
    `policy`, options of the policy that `attention_backend` names (for `double_p`: `sglang_ext.policies.options`), and
    `settings`, limits of the engine (`sglang_ext.settings.ServerSettings`).
    Requests name a pool in `sampling_params["custom_params"]` (see `sglang_ext.config.RequestOptions`).
    """

    def __init__(
        self,
        pool_dir: str | os.PathLike[str] | None = None,
        policy: Options | None = None,
        settings: Options | None = None,
        **kwargs: Passed,
    ) -> None:
        if "server_args" not in kwargs:
            kwargs = {**server_defaults(), **kwargs}
        with _in_environment(pool_dir, policy, settings):
            super().__init__(**kwargs)
        self._pools = pools_of(self.tokenizer_manager)
        self._run(self._pools.restored())

    def _run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(work)

    def create_pool(self, name: str, demonstrations: Iterable[Options], **options: Json) -> JsonObject:
        """Encode demonstrations (objects with `input` and `output`) into the pool `name`, replacing it if it is there.

        Options are those of `sglang_ext.config.PoolOptions`. Returns the pool's description.
        """
        return self._run(self._pools.put(name, demonstrations, options))

    def append(self, name: str, demonstrations: Iterable[Options]) -> JsonObject:
        """Add demonstrations to a pool; only the new blocks are encoded."""
        return self._run(self._pools.append(name, demonstrations))

    def delete(self, name: str, demonstration_id: str | None = None, purge: bool = False) -> JsonObject:
        """Delete a pool, or one demonstration: at once for retrieval, with `purge` from every block it reached."""
        if demonstration_id is None:
            return self._run(self._pools.delete(name))
        return self._run(self._pools.delete_demonstration(name, demonstration_id, purge))

    def pools(self) -> list[JsonObject]:
        """A line for each pool."""
        return self._pools.list()

    def pool(self, name: str, tokens: bool = False) -> JsonObject:
        """One pool with its blocks; with `tokens`, each block's token ids and the span of each demonstration."""
        return self._run(self._pools.info(name, tokens))

    def select(self, name: str, text: str | None = None, **options: Json) -> JsonObject:
        """What a question selects of a pool, with scores and demonstrations; the model is not asked.

        Options are those in `sglang_ext.serving.explain.SELECTS`; with `block_ids`, no text is needed.
        """
        return self._run(would_select(self._pools, name, {"text": text, **options}))

    def cancel(self, name: str) -> JsonObject:
        """Stop the encoding under way."""
        return self._run(self._pools.cancel(name))

    def plan_pool(self, demonstrations: Iterable[Options], **options: Json) -> JsonObject:
        """Tokens, bytes and blocks a pool would take, and how many such pools fit."""
        return self._run(would_take(self._pools, lambda: Submitted(demonstrations, options)))
