"""Long texts are tokenized in a thread: SGLang does it on the event loop, where everybody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LONG = 1 << 14  # characters that take so long, some 10 ms, that others must not wait for them


async def around_tokenize_texts(
    original: Callable[..., Any], manager: Any, texts: str | list[Any], is_cross_encoder: bool = False
) -> Any:
    """AROUND TokenizerManager._tokenize_texts: the same tokens, with a tokenizer of our own where a text is long.

    Returns:
        (token ids of the one text, None) where `texts` is one text; all else is SGLang's.
    """
    if manager.ext_pools is None or is_cross_encoder or not isinstance(texts, str) or len(texts) <= LONG:
        await asyncio.sleep(0)  # between two of many prompts others have their turn
        return await original(manager, texts, is_cross_encoder)
    return await manager.ext_pools.with_tokenizer(lambda tokenizer: tokenizer([texts])["input_ids"][0]), None
