"""From the text of a request over a pool to the tokens that follow the blocks."""

from __future__ import annotations

from sglang_ext.config import RequestOptions
from sglang_ext.names import RequestInput
from sglang_ext.serving.layout import encode_text
from sglang_ext.serving.pool import Version
from sglang_ext.serving.pools import PoolService
from sglang_ext.serving.requests import check_characters
from sglang_ext.serving.texts import LONG


async def own_tokens(
    service: PoolService, obj: RequestInput, version: Version, options: RequestOptions
) -> tuple[list[int], str, str | None]:
    """(the request's own tokens, the white space its answer starts with, the text to retrieve with).

    Raises:
        ValueError: the question is empty, or too long however it is tokenized.
    """
    definition = version.definition
    if obj.input_ids is not None:
        lead = definition.options.render_query("")[1]
        return list(obj.input_ids), lead, options.query
    check_characters(max(len(obj.text or ""), len(options.query or "")), service.manager.context_len)
    if not isinstance(obj.text, str) or not obj.text.strip():
        raise ValueError("the question is empty: send it as text, or as input_ids")
    if options.raw:
        text, lead = obj.text, definition.options.render_query("")[1]
        if text != text.rstrip():
            lead = ""
    else:
        text, lead = definition.options.render_query(obj.text)
    if len(text) > LONG:
        own = await service.workers.with_tokenizer(lambda tokenizer: encode_text(tokenizer, text))
    else:
        own = encode_text(service.manager.tokenizer, text)
    return own, lead, options.query or obj.text
