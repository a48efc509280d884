"""The one way into SGLang's tokenizer manager: what is done with a generation request there, from outside to inside."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial

import fastapi

from sglang_ext.hooks import check_called, was_checked
from sglang_ext.names import RequestInput, TokenizerManager
from sglang_ext.serving import checks, conversations, logs, options, tenant_requests, texts, tokenizer
from sglang_ext.types import Json


def around_generate_request(
    original: Callable[..., AsyncGenerator[Json, None]],
    manager: TokenizerManager,
    obj: RequestInput,
    request: fastapi.Request | None = None,
) -> AsyncGenerator[Json, None]:
    """AROUND TokenizerManager.generate_request: looked at, counted, given the key of its
    conversation, then over its pool.

    One hook, so that the order stands here: SGLang warns of several, whose order is that of their registration.
    """
    texts.keep_time(obj)
    over_pools = partial(tokenizer.around_generate_request, original)
    keyed = partial(conversations.around_generate_request, over_pools)
    counted = partial(tenant_requests.around_generate_request, keyed)
    answers = logs.logged(options.around_generate_request(counted, manager, obj, request), manager, obj)
    return answers if was_checked("main") or not checks.is_active(manager.server_args) else _looked_at(answers)


async def _looked_at(answers: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
    """The answers to the first request, which came through all hooks that they had to."""
    async for answer in answers:
        if answer:  # a batch of no prompt goes nowhere
            check_called("main")
        yield answer
