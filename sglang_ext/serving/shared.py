"""What the pools of all tenants of a server share: its threads, its way to the schedulers, and its KV cache."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_ext import compat
from sglang_ext.names import TokenizerManager
from sglang_ext.serving.channel import Channel
from sglang_ext.serving.encoder import Encoder
from sglang_ext.serving.grammar import LabelCheck
from sglang_ext.serving.pool import Version
from sglang_ext.serving.workers import Workers

if TYPE_CHECKING:
    from sglang_ext.serving.pools import PoolService

SCORING_REQUESTS = 4  # requests whose labels are scored at one time: others come between their passes


class Shared:
    """One a server.

    Attributes:
        services: the pools of each tenant, by its name; those that are nobody's (the operator's) under "".
        scoring: places of requests whose labels are scored.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self.services: dict[str, PoolService] = {}
        self.workers = Workers(manager)
        self.channel = Channel(manager, self.workers)
        self.encoder = Encoder(manager, self.channel, self._served, self._reencoded)
        self.scoring = asyncio.Semaphore(SCORING_REQUESTS)

    @functools.cached_property
    def label_check(self) -> LabelCheck:
        """What looks at the labels of pools, made in the thread that prepares them: a large vocabulary takes long."""
        config, server_args = self._manager.model_config, compat.resolved(self._manager.server_args)
        tokenizer = self.workers.tokenizer()
        return LabelCheck(tokenizer, config.vocab_size, config.hf_eos_token_id, server_args.grammar_backend)

    def _served(self) -> Iterator[Version]:
        """The versions that requests are served from."""
        for service in list(self.services.values()):
            for pool in list(service.pools.values()):
                if pool.current is not None:
                    yield pool.current

    def _reencoded(self, version: Version, blocks: int, missed: int) -> None:
        self.services[version.tenant].reencoded(version.name, blocks, missed)
