"""Every generation request is looked at where it comes in, so that a mistake is a 400 and never reaches the schedulers.

What is looked at is said in `serving.requests`; here are SGLang's places where it is done.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import fastapi
from pydantic import BaseModel
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_ext.attention.select import server_policy
from sglang_ext.cache import carried
from sglang_ext.names import OpenAIHandler, OpenAIRequest, Passed, RequestInput, TokenizerManager
from sglang_ext.serving.answers import noting
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.requests import check, check_characters, check_ids, facts_of
from sglang_ext.serving.texts import LONG, characters, is_long, run_beside
from sglang_ext.systems.registry import system_of
from sglang_ext.types import Json


def after_init(_result: None, manager: TokenizerManager, *_args: Passed, **_kwargs: Passed) -> None:
    """AFTER TokenizerManager.__init__: the policy of the server, and what it can serve, when it is one of ours.

    Runs after the hooks that give the manager its pools and a stream's context.
    """
    manager.ext_system, manager.ext_policy, manager.ext_facts = system_of(manager.server_args), None, None
    manager.ext_reserved = set()
    if manager.ext_system is not None:
        manager.ext_policy = server_policy(manager.server_args, manager.ext_system)
        manager.ext_facts = facts_of(manager, manager.ext_policy, manager.ext_pools.settings)


def around_generate_request(
    original: Callable[..., AsyncGenerator[Json, None]],
    manager: TokenizerManager,
    obj: RequestInput,
    request: fastapi.Request | None = None,
) -> AsyncGenerator[Json, None]:
    """AROUND TokenizerManager.generate_request: all that is wrong with a request is said before anything is sent.

    Raises:
        ValueError: says what to change; `PoolError` with its HTTP status.
    """
    if manager.ext_facts is None or carried.is_internal(obj):
        return original(manager, obj, request)
    try:
        rids = _check(manager, obj)
    except ValueError as error:
        abort_none(obj)
        if not isinstance(error, PoolError):
            raise
        if request is None or in_answer(obj, request):
            raise
        # The OpenAI routes answer every ValueError with 400: keep the error's own status.
        raise fastapi.HTTPException(error.status_code, error.detail) from error
    answers = noting(original(manager, obj, request), obj)
    return answers if obj.rid is None else _reserved(manager, answers, obj, rids)


def abort_none(obj: RequestInput) -> None:
    """Take away the ids that SGLang aborts two seconds after a stream of this request.

    They may be another client's: this request was refused, or it is answered, and its ids may be used again.
    """
    obj.is_single, obj.rid = False, []


def in_answer(obj: RequestInput, request: fastapi.Request) -> bool:
    """Whether an answer to this request has begun when it is looked at: /generate streams tell errors as an event."""
    return bool(getattr(obj, "stream", False)) and request.url.path in ("/generate", "/vertex_generate")


def _check(manager: TokenizerManager, obj: RequestInput) -> list[str]:
    """The ids of the prompts of a request that can be served."""
    if isinstance(obj, GenerateReqInput):
        rids = check(obj, manager.ext_facts)
        _refuse_taken(manager, rids)
        return rids
    if manager.is_generation:
        raise ValueError(
            "this server generates text: it has no embeddings, classes or ranks; ask a server with --is-embedding"
        )
    return []


def _refuse_taken(manager: TokenizerManager, rids: Sequence[str]) -> None:
    taken = [rid for rid in rids if rid in manager.rid_to_state or rid in manager.ext_reserved]
    if taken:
        raise ValueError(f"rid {taken[0]!r} is in use: wait for its answer, or choose another")


async def _reserved(
    manager: TokenizerManager, answers: AsyncGenerator[Json, None], obj: RequestInput, rids: Sequence[str]
) -> AsyncGenerator[Json, None]:
    """The answers to a request that names ids, which nobody else may name until all of its prompts are answered.

    SGLang forgets each id of a batch when its own prompt is answered, and with `n` before any is. What belongs to a
    prompt is found by its id for as long as the batch runs: another request of that name would get it.
    """
    try:
        _refuse_taken(manager, rids)  # another one may have come since these were looked at
    except ValueError:
        abort_none(obj)
        raise
    own = set(rids)
    manager.ext_reserved |= own

    def free() -> None:
        manager.ext_reserved.difference_update(own)
        own.clear()

    try:
        async with aclosing(answers):
            async for out in answers:
                if not getattr(obj, "stream", False):
                    free()  # the routes take the one answer and drop this generator, whose `finally` comes some time
                yield out
        if getattr(obj, "stream", False):
            abort_none(obj)
    finally:
        free()


async def around_open_session(
    original: Callable[..., Passed], manager: TokenizerManager, obj: Passed, request: Passed = None
) -> Passed:
    """AROUND TokenizerControlMixin.open_session: sessions go on from prefixes that our caches do not keep for them."""
    if manager.ext_facts is not None:
        raise ValueError(
            f"sessions are not served with --attention-backend {manager.server_args.attention_backend}: send the whole"
            " prompt; what is the same as before is found in the cache"
        )
    return await original(manager, obj, request)


async def around_tokenize(
    original: Callable[..., Passed],
    handler: OpenAIHandler,
    adapted_request: Passed,
    request: OpenAIRequest,
    raw_request: fastapi.Request,
) -> Passed:
    """AROUND OpenAIServingTokenize._handle_non_streaming_request: long texts are bounded, and tokenized in a thread."""
    facts = getattr(handler.tokenizer_manager, "ext_facts", None)
    if facts is not None:
        check_characters(characters(request.prompt), facts.context)  # a chat is looked at where it is rendered
    if not is_long(handler.tokenizer_manager, request):
        return await original(handler, adapted_request, request, raw_request)
    return await run_beside(handler, lambda own: _written(original(own, adapted_request, request, raw_request)))


async def around_detokenize(
    original: Callable[..., Passed],
    handler: OpenAIHandler,
    adapted_request: Passed,
    request: OpenAIRequest,
    raw_request: fastapi.Request,
) -> Passed:
    """AROUND OpenAIServingDetokenize._handle_non_streaming_request: ids that the tokenizer cannot hold are refused.

    Many are decoded in a thread.
    """
    facts = getattr(handler.tokenizer_manager, "ext_facts", None)
    if facts is None or not request.tokens:
        return await original(handler, adapted_request, request, raw_request)
    listed = request.tokens if isinstance(request.tokens[0], list) else [request.tokens]
    for ids in filter(None, listed):
        check_ids(ids, facts.vocabulary)
    if sum(map(len, listed)) <= LONG:
        return await original(handler, adapted_request, request, raw_request)
    return await run_beside(handler, lambda own: _written(original(own, adapted_request, request, raw_request)))


async def _written(answering: Awaitable[Passed]) -> Passed:
    """The answer as a response with its bytes: FastAPI would visit each of its tokens, on the event loop."""
    answer = await answering
    if not isinstance(answer, BaseModel):
        return answer
    return fastapi.Response(answer.model_dump_json(), media_type="application/json")


async def around_score(
    original: Callable[..., Passed],
    handler: OpenAIHandler,
    adapted_request: Passed,
    request: OpenAIRequest,
    raw_request: fastapi.Request,
) -> Passed:
    """AROUND OpenAIServingScore._handle_non_streaming_request: SGLang finds late that there is nothing to score."""
    if getattr(handler.tokenizer_manager, "ext_facts", None) is not None and not request.label_token_ids:
        return handler.create_error_response("label_token_ids is empty: name at least one token to score")
    return await original(handler, adapted_request, request, raw_request)
