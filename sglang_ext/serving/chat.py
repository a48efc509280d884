"""Pools in chat requests: the demonstrations take their place inside the model's chat template.

The conversation is rendered by the template with a mark before the first user message. What stands before the mark
(BOS, system prompt, the user turn's header) becomes the head of the pool's first block; the demonstrations follow it,
inside the user turn; what stands after the mark are the request's own tokens.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, overload

from jinja2 import TemplateError

from sglang_ext.config import RequestOptions
from sglang_ext.names import OpenAIHandler, OpenAIRequest, Passed, TemplateManager, Tokenizer, TokenizerManager
from sglang_ext.serving.access import may_read
from sglang_ext.serving.layout import encode_text
from sglang_ext.serving.layouts import ChatHeader
from sglang_ext.serving.requests import CHAT_KEY, check_characters
from sglang_ext.serving.texts import characters
from sglang_ext.serving.tokenizer import pools_of
from sglang_ext.types import Json, JsonObject

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionMessageParam

_MARK = "\ue000sglang-ext-demonstrations\ue000"  # private-use characters: no one's text


def around_process_messages(
    original: Callable[..., Passed], handler: OpenAIHandler, request: OpenAIRequest, *args: Passed, **kwargs: Passed
) -> Passed:
    """AROUND OpenAIServingChat._process_messages: a chat request with a pool brings its own tokens.

    What is too long for the model anyway is refused before it is rendered.
    """
    manager = handler.tokenizer_manager
    if manager.ext_facts is not None:
        check_template_kwargs(manager.tokenizer, request.chat_template_kwargs)
        beside = characters([request.tools, request.chat_template_kwargs])
        check_characters(sum(map(_characters, request.messages)) + beside, manager.ext_facts.context)
    custom = request.custom_params
    if isinstance(custom, dict) and "pool" in custom and CHAT_KEY not in custom:  # else it has been composed before
        compose_chat(handler.tokenizer_manager, handler.template_manager, request)
        label_temperature(request)
    return original(handler, request, *args, **kwargs)


def check_template_kwargs(tokenizer: Tokenizer | None, given: JsonObject | None) -> None:
    """Refuse variables that are no variables of the model's chat template but arguments of what renders it.

    A template of a client's own is a program: it may run for ever, and show what it is given to render.

    Raises:
        ValueError: names them.
    """
    if not given or tokenizer is None:
        return
    reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"kwargs"}
    found = sorted(reserved.intersection(given))
    if found:
        raise ValueError(
            f"chat_template_kwargs: {', '.join(found)}: expected variables of the model's own chat template; leave"
            f" {'it' if len(found) == 1 else 'them'} out"
        )


def around_build_sampling_params(
    original: Callable[..., Passed], handler: OpenAIHandler, request: OpenAIRequest
) -> Passed:
    """AROUND OpenAIServingCompletion._build_sampling_params: see `label_temperature`."""
    if isinstance(request.custom_params, dict) and "pool" in request.custom_params:
        label_temperature(request)
    return original(handler, request)


def label_temperature(request: OpenAIRequest) -> None:
    """A label is the most likely one unless the request names a temperature, as on /generate; OpenAI's default is 1."""
    if wants_labels(request.custom_params) and "temperature" not in request.model_fields_set:
        request.temperature = 0.0


def wants_labels(custom: JsonObject) -> bool:
    """Whether the answer must be one of the pool's labels."""
    return custom.get("constrain") == "labels" or custom.get("choose") is not None


def compose_chat(manager: TokenizerManager, templates: TemplateManager, request: OpenAIRequest) -> None:
    """Replace the messages of `request` by token ids, and note the header for `serving.tokenizer.compose`.

    Raises:
        ValueError: the request has what pools do not serve (images, tools, another system prompt), or no user message.
    """
    service = pools_of(manager)
    custom = {name: value for name, value in request.custom_params.items() if name not in service.policy_options}
    options = RequestOptions.parse(custom)
    definition = service.version(options.pool).definition
    if request.tools:
        raise ValueError("tools with a pool are not supported: leave out the tools or the pool")
    if templates.chat_template_name is not None:
        raise ValueError(
            f"--chat-template {templates.chat_template_name} is one of SGLang's legacy templates: pools need the"
            " model's own (Jinja) chat template"
        )
    messages = [_plain(message) for message in request.messages]
    system = [message["content"] for message in messages if message["role"] == "system"]
    if system and system != [definition.options.system]:
        theirs = f"is {definition.options.system!r}" if may_read(manager, definition.options) else "is another one"
        raise ValueError(
            f"the request's system prompt is {system[0]!r}, the pool's {theirs}: the blocks are encoded behind it, so"
            " put the pool with that `system`, or leave the system message out"
        )
    if definition.options.system is not None and not system:
        messages.insert(0, {"role": "system", "content": definition.options.system})
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError("a chat request with a pool needs a user message")
    if any(message["role"] != "system" for message in messages[:first]):
        raise ValueError("only a system message may stand before the first user message of a chat over a pool")
    question = messages[first]["content"]
    shown = question if options.raw else definition.options.render_query(question)[0]
    messages[first] = {"role": "user", "content": _MARK + shown}

    tokenizer = manager.tokenizer
    text = rendered(
        tokenizer,
        messages,
        add_generation_prompt=not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        **(request.chat_template_kwargs or {}),
    )
    if text.count(_MARK) != 1:
        raise ValueError("the model's chat template changes the first user message: demonstrations cannot be placed")
    before, after = text.split(_MARK)
    plain = rendered(tokenizer, messages[: first + 1])
    if plain.split(_MARK)[0] != before:
        raise ValueError(
            "chat_template_kwargs change what stands before the first user message, and the pool's blocks are encoded"
            " behind the template's own: leave them out"
        )
    header = ChatHeader(tuple(encode_text(tokenizer, before)), definition.options)
    name = hashlib.blake2b(repr(header).encode(), digest_size=8).hexdigest()
    service.headers[name] = header
    request.input_ids = encode_text(tokenizer, after)
    # Every turn retrieves with the first question, so that a later turn finds the earlier ones in the cache.
    request.custom_params = {**request.custom_params, "query": options.query or question, CHAT_KEY: name}


@overload
def rendered(
    tokenizer: Tokenizer, messages: list[dict[str, str]], tokenize: Literal[False] = False, **variables: Json
) -> str: ...


@overload
def rendered(
    tokenizer: Tokenizer, messages: list[dict[str, str]], tokenize: Literal[True], **variables: Json
) -> list[int]: ...


def rendered(
    tokenizer: Tokenizer, messages: list[dict[str, str]], tokenize: bool = False, **variables: Json
) -> str | list[int]:
    """The text of a chat, or its token ids; ValueError, without the template's own words, where it refuses the chat."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, return_dict=False, **variables)
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"the model's chat template cannot render this chat ({type(error).__name__}): change its messages or its"
            " chat_template_kwargs"
        ) from None


def _characters(message: ChatCompletionMessageParam) -> int:
    """Characters of what is rendered of a message, of all its parts; an image in the message is no text."""
    content = message.content
    parts = [getattr(part, "text", None) for part in content] if isinstance(content, list) else content
    beside = [getattr(message, name, None) for name in ("tool_calls", "reasoning_content")]
    return characters([parts, beside])


def _plain(message: ChatCompletionMessageParam) -> dict[str, str]:
    """A message as role and text."""
    data = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    content = data.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("messages with images, audio or video cannot be combined with a pool")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"a message of role {data.get('role')!r} has no text content")
    return {"role": data["role"], "content": content}
