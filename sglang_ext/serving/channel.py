"""Operations on the schedulers' blocks, from the tokenizer process."""

from __future__ import annotations

import asyncio
import json

from sglang_ext.names import TokenizerManager
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.messages import ExtAdminReqInput
from sglang_ext.serving.workers import Workers
from sglang_ext.types import Json, JsonObject, Options


class Channel:
    """Asks the schedulers, one operation after the other.

    Attributes:
        bytes_per_token: of the KV cache; 0 until the schedulers were asked for their state.
    """

    def __init__(self, manager: TokenizerManager, workers: Workers) -> None:
        self.manager, self._workers = manager, workers
        self._lock = asyncio.Lock()
        self.bytes_per_token = 0

    async def ask(self, op: str, **payload: Json) -> JsonObject:
        """One operation on the schedulers (serving.admin.Admin)."""
        # A caller that is cancelled must not leave its answer behind for the next one: the exchange goes on without it.
        return await asyncio.shield(self._workers.background(self._exchange(op, payload)))

    async def _exchange(self, op: str, payload: Options) -> JsonObject:
        self.manager.auto_create_handle_loop()
        async with self._lock:
            answers = await self.manager.ext_admin_communicator(ExtAdminReqInput(op=op, payload=json.dumps(payload)))
        result: JsonObject = json.loads(answers[0].payload)
        if "error" in result:
            raise PoolError(f"sglang_ext: {op} failed: {result['error']}", 503)
        if op == "state":
            self.bytes_per_token = result["bytes_per_token"]
        return result

    async def release(self, owner: str) -> None:
        """Let go of all blocks that `owner` holds."""
        await self.ask("release", owner=owner)

    def release_later(self, owner: str) -> None:
        """`release`, without waiting for the answer."""
        self._workers.background(self.release(owner))
