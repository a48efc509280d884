"""Pools in chat requests: the demonstrations take their place inside the model's chat template.

The conversation is rendered by the template with a mark before the first user message. What stands before the mark
(BOS, system prompt, the user turn's header) becomes the head of the pool's first block; the demonstrations follow it,
inside the user turn; what stands after the mark are the request's own tokens. A chat with instructions or tools of its
own has a header of its own, behind which the pool's blocks are encoded once more.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, overload

from jinja2 import TemplateError

from sglang_ext.config import RequestOptions
from sglang_ext.names import OpenAIHandler, OpenAIRequest, Passed, TemplateManager, Tokenizer, TokenizerManager
from sglang_ext.serving.access import may_read
from sglang_ext.serving.layout import encode_text
from sglang_ext.serving.layouts import ChatHeader
from sglang_ext.serving.requests import CHAT_KEY, check_characters
from sglang_ext.serving.tenancy import pools_of
from sglang_ext.serving.texts import characters
from sglang_ext.types import Json, JsonObject

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionMessageParam

INSTRUCTIONS = ("system", "developer")
"""Roles of messages that may stand before the first user message."""

_MARK = "\ue000sglang-ext-demonstrations\ue000"  # private-use characters: no one's text
_PLACE = "sglang-ext-place-4c1f"  # ASCII: templates write tools as JSON, which may spell other characters as escapes
_PLACES = re.compile(rf"{_PLACE}-(\d+);")


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
        ValueError: the request has what pools do not serve (images, instructions that the template does not place
            before the demonstrations), or no user message.
    """
    service = pools_of(manager)
    custom = {name: value for name, value in request.custom_params.items() if name not in service.policy_options}
    options = RequestOptions.parse(custom)
    definition = service.version(options.pool).definition
    if templates.chat_template_name is not None:
        raise ValueError(
            f"--chat-template {templates.chat_template_name} is one of SGLang's legacy templates: pools need the"
            " model's own (Jinja) chat template"
        )
    first, messages = _turns([_plain(message) for message in request.messages])
    system = definition.options.system
    standing = [] if system is None else [{"role": "system", "content": system}]
    question: str = messages[first]["content"]
    shown = question if options.raw else definition.options.render_query(question)[0]
    messages[first] = {"role": "user", "content": _MARK + shown}
    if not first:
        messages, first = standing + messages, len(standing)

    tokenizer, variables = manager.tokenizer, dict(request.chat_template_kwargs or {})
    tools = _tools(request)
    if tools:
        variables["tools"] = tools
    variables["add_generation_prompt"] = not request.continue_final_message
    variables["continue_final_message"] = request.continue_final_message
    brought = messages[:first] != standing or bool(tools)
    before, after = _split(rendered(tokenizer, messages, **variables))
    own = before != _split(rendered(tokenizer, [*standing, messages[first]]))[0]
    if brought or own:
        if not service.settings.max_headers:
            theirs = f"is {system!r}" if may_read(manager, definition.options) else "may be another one"
            raise ValueError(
                "the chat has a system prompt, a developer message, tools or chat_template_kwargs of its own, and this"
                " server encodes pools behind their own system prompt alone (--max-headers 0); that of the pool"
                f" {theirs}: leave yours out, or put a pool with that `system`"
            )
        _check_placed(tokenizer, messages, first, variables)
    request.input_ids = encode_text(tokenizer, after)
    header = ChatHeader(tuple(encode_text(tokenizer, before)), definition.options, own)
    name = service.layouts.keep_header(header)
    # Every turn retrieves with the first question, so that a later turn finds the earlier ones in the cache.
    request.custom_params = {**request.custom_params, "query": options.query or question, CHAT_KEY: name}


def _turns(messages: list[JsonObject]) -> tuple[int, list[JsonObject]]:
    """(the place of the first user message, the messages); ValueError where others than instructions precede it."""
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError("a chat request with a pool needs a user message")
    if any(message["role"] not in INSTRUCTIONS for message in messages[:first]):
        raise ValueError(
            "only system and developer messages may stand before the first user message of a chat over a pool"
        )
    late = next((message["role"] for message in messages[first:] if message["role"] in INSTRUCTIONS), None)
    if late is not None:
        raise ValueError(
            f"a {late} message stands behind the first user message: in a chat over a pool it must stand before it, for"
            " the demonstrations follow the instructions"
        )
    return first, messages


def _tools(request: OpenAIRequest) -> list[JsonObject]:
    """The tools that SGLang would have the template render."""
    if not request.tools or request.tool_choice == "none":
        return []
    tools = [tool.model_dump() for tool in request.tools]
    if isinstance(request.tool_choice, str):
        return tools
    return [tool for tool in tools if tool["function"]["name"] == request.tool_choice.function.name]


def _split(text: str) -> tuple[str, str]:
    """What a rendered chat has before the place of the demonstrations, and behind it."""
    if text.count(_MARK) != 1:
        raise ValueError("the model's chat template changes the first user message: demonstrations cannot be placed")
    before, after = text.split(_MARK)
    return before, after


def _check_placed(tokenizer: Tokenizer, messages: list[JsonObject], first: int, variables: JsonObject) -> None:
    """Refuse instructions and tools that the model's chat template does not place before the demonstrations.

    Raises:
        ValueError: names them.
    """
    if first:
        marked = [
            {**message, "content": f"{message['content']}{_PLACE}-{place};"}
            for place, message in enumerate(messages[:first])
        ]  # all at once: a chat may bring thousands
        before, after = _split(rendered(tokenizer, [*marked, *messages[first:]], **variables))
        once, late = Counter(_PLACES.findall(before)), set(_PLACES.findall(after))
        for place, message in enumerate(messages[:first]):
            if once[str(place)] == 1 and str(place) not in late:
                continue
            hint = "send it as a system message, or " if message["role"] == "developer" else ""
            raise ValueError(
                f"the model's chat template does not place a {message['role']} message before the first user message,"
                f" where the demonstrations of a pool stand: {hint}leave it out"
            )
    if tools := variables.get("tools"):
        marked_tools = [
            {**tool, "function": {**tool["function"], "name": tool["function"]["name"] + _PLACE}} for tool in tools
        ]
        before, after = _split(rendered(tokenizer, messages, **{**variables, "tools": marked_tools}))
        if before.count(_PLACE) < len(tools) or _PLACE in after:
            raise ValueError(
                "the model's chat template does not place tools before the first user message, where the demonstrations"
                " of a pool stand: leave out the tools or the pool"
            )


@overload
def rendered(
    tokenizer: Tokenizer, messages: list[JsonObject], tokenize: Literal[False] = False, **variables: Json
) -> str: ...


@overload
def rendered(
    tokenizer: Tokenizer, messages: list[JsonObject], tokenize: Literal[True], **variables: Json
) -> list[int]: ...


def rendered(
    tokenizer: Tokenizer, messages: list[JsonObject], tokenize: bool = False, **variables: Json
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


def _plain(message: ChatCompletionMessageParam) -> JsonObject:
    """A message as a template takes it: role and text, and what an assistant or a tool has beside them."""
    data = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    content, calls = data.get("content"), data.get("tool_calls")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("messages with images, audio or video cannot be combined with a pool")
        content = "".join(part["text"] for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"a message of role {data.get('role')!r} has no text content")
    plain: JsonObject = {"role": data["role"], "content": content}
    plain |= {name: data[name] for name in ("name", "tool_call_id") if name in data and data["role"] == "tool"}
    return plain | ({"tool_calls": [_call(call) for call in calls]} if calls else {})


def _call(call: JsonObject) -> JsonObject:
    """A tool call with its arguments as an object, as templates expect them; clients send them as a JSON text."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"the arguments of a call of {function.get('name')!r} are not JSON: {error}") from None
    return {**call, "function": {**function, "arguments": arguments or {}}}
