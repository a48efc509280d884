"""What a generation request may say, looked at once, before anything of it reaches the schedulers.

Every route and `Engine.generate` end in `TokenizerManager.generate_request` with SGLang's `GenerateReqInput`: `check`
looks at all of it there. When a prompt is tokenized, `check_ids` looks at token ids that did not come with the request,
and `check_tokens` at the limits that depend on the prompt's length. SGLang's schedulers trust what they are sent: a
wrong type does not decode, a token id outside the vocabulary or a number that a tensor cannot hold raises in the middle
of a batch, and each of these ends the server for everybody.

Types are SGLang's own annotations, so that a field which a later version adds is known with its type. Only fields in
`SERVED` may be set: the others are SGLang's own (addresses of its processes, what other servers computed) or belong to
features that servers of ours refuse at start.
"""

from __future__ import annotations

import copy
import functools
import reprlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np

from sglang_ext import compat
from sglang_ext.cache.conversation import NAMESPACE
from sglang_ext.cache.rows import INTERNAL, WIRE_KEY
from sglang_ext.config import RequestOptions, check_text, unknown_names
from sglang_ext.names import RequestInput, TokenizerManager
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.namespaces import join_salt
from sglang_ext.serving.sampling import check_id, check_sampling
from sglang_ext.types import Json, Options

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from sglang_ext.attention.policy import Policy
    from sglang_ext.settings import ServerSettings

CHAT_KEY = "_chat_header"  # in custom_params, set by serving.chat: names the tokens before the first user message

MAX_LISTED = 10_000  # entries of a list or an object in a request, of those that have no other limit
CHARACTERS_A_TOKEN = 16  # more than a text has in the mean
INT64 = 1 << 63

MEDIA = ("image_data", "video_data", "audio_data")
SERVED = frozenset(
    {
        *MEDIA,
        "background",
        "conversation_id",
        "custom_labels",
        "custom_logit_processor",
        "external_trace_header",
        "extra_key",
        "image_max_dynamic_patch",
        "images_config",
        "input_ids",
        "log_metrics",
        "logprob_start_len",
        "lora_path",
        "max_dynamic_patch",
        "max_thinking_tokens",
        "min_dynamic_patch",
        "mm_hashes",
        "modalities",
        "no_logs",
        "priority",
        "received_time",
        "require_reasoning",
        "return_flat_raw_top_logprobs",
        "return_flat_raw_top_logprobs_b64",
        "return_hidden_states",
        "return_logprob",
        "return_prompt_token_ids",
        "return_text_in_logprobs",
        "rid",
        "routed_dp_rank",
        "routing_key",
        "sampling_params",
        "session_id",
        "stream",
        "text",
        "token_ids_logprob",
        "top_logprobs_num",
        "use_audio_in_video",
        "video_max_dynamic_patch",
    }
)


@dataclass(frozen=True)
class Facts:
    """What a server can serve.

    Attributes:
        vocabulary: tokens that the model has an embedding for; ids are 0 to that, less one.
        context: tokens of a prompt and its answer together.
        policy: of the server, whose options `custom_params` may name.
        media: whether the server reads images, audio or video: not of a hybrid linear model, with which nobody tried.
        max_prompts, max_logprobs, default_max_new_tokens: see `settings.ServerSettings`.
    """

    vocabulary: int
    context: int
    policy: Policy
    media: bool
    max_prompts: int
    max_logprobs: int
    default_max_new_tokens: int


def facts_of(manager: TokenizerManager, policy: Policy, settings: ServerSettings) -> Facts:
    """What the server of a TokenizerManager can serve."""
    return Facts(
        vocabulary=manager.model_config.vocab_size,
        context=manager.context_len,
        policy=policy,
        media=manager.mm_processor is not None and not any(compat.listed_states(manager.model_config)),
        max_prompts=settings.max_prompts,
        max_logprobs=settings.max_logprobs,
        default_max_new_tokens=settings.default_max_new_tokens,
    )


# ---- a request ----


def check(request: RequestInput, facts: Facts) -> list[str]:
    """Look at a GenerateReqInput as it came, whose fields get the types that they are annotated with.

    Returns:
        The id of each prompt; a new one where the request names none.

    Raises:
        ValueError: (PoolError among them, with its status) something in it cannot be served; says what to change.
    """
    check_sizes(request, facts)
    join_salt(request)
    _check_fields(request)
    for params in _listed(request):
        check_sampling(params or {}, facts.vocabulary)
    check_count(request, facts.max_prompts)
    prompts = _prompts(request)
    for prompt in prompts:
        check_prompt(prompt, facts)
    return [prompt.rid for prompt in prompts]


def check_sizes(request: RequestInput, facts: Facts) -> None:
    """PoolError for lists that are so long that to look at what is in them would hold everybody up."""
    params = request.sampling_params
    listed = params if isinstance(params, list) else [params]
    _check_size("sampling_params", listed, facts.max_prompts)
    _check_size("token_ids_logprob", request.token_ids_logprob, MAX_LISTED)
    for each in listed:
        if isinstance(each, dict):
            _check_size("sampling_params", each, MAX_LISTED)
            for name in ("logit_bias", "stop_token_ids"):
                _check_size(name, each.get(name), MAX_LISTED)
            if _entries(each.get("custom_params"), MAX_LISTED) > MAX_LISTED:
                raise PoolError(f"custom_params has more than {MAX_LISTED} entries; expected at most so many", 413)
    if isinstance(request.input_ids, list):
        nested = request.input_ids and isinstance(request.input_ids[0], list)
        for ids in request.input_ids if nested else [request.input_ids]:
            _check_size("input_ids", ids, facts.context)


def _check_size(name: str, value: Json, most: int) -> None:
    if isinstance(value, (list, dict)) and len(value) > most:
        raise PoolError(f"{name} has {len(value)} entries; expected at most {most}", 413 if most == MAX_LISTED else 400)


def _entries(value: Json, most: int) -> int:
    """Entries of the lists and objects in a value of a request, however deep. Counting ends beyond `most`."""
    found, left = 0, [value]
    while left and found <= most:
        each = left.pop()
        if isinstance(each, (list, dict)):
            found += len(each)
            left += each.values() if isinstance(each, dict) else each
    return found


def check_count(request: RequestInput, most: int) -> None:
    """PoolError where a request asks for too many answers."""
    asked = count_answers(request)
    if asked > most:
        raise PoolError(
            f"the request asks for {asked} answers (prompts times n); the server gives at most {most} a request:"
            " send several requests, or raise --max-prompts",
            413,
        )


def count_answers(request: RequestInput) -> int:
    """How many answers a GenerateReqInput asks for: its prompts, times `n`."""
    return count_prompts(request) * max([(item or {}).get("n") or 1 for item in _listed(request)], default=1)


def _listed(request: RequestInput) -> Sequence[Options | None]:
    params = request.sampling_params
    return params if isinstance(params, list) else [params]


def count_prompts(request: RequestInput) -> int:
    """How many prompts a GenerateReqInput has, normalised or not."""
    prompts = next((value for value in (request.text, request.input_ids) if value is not None), "")
    batch = isinstance(prompts, list) and (prompts is request.text or isinstance((prompts or [0])[0], list))
    return len(prompts) if batch else 1


def check_characters(characters: int, context: int) -> None:
    """ValueError for a text that is too long for the model, however it is tokenized: it is not tokenized then."""
    most = context * CHARACTERS_A_TOKEN
    if characters > most:
        raise ValueError(
            f"the text has {characters} characters; expected at most {most}, {CHARACTERS_A_TOKEN} for each token of the"
            f" model's context of {context}: shorten it"
        )


def check_prompt(prompt: RequestInput, facts: Facts) -> None:
    """One prompt of a normalised request."""
    _check_sent(prompt)
    if prompt.input_ids is not None:
        check_ids(prompt.input_ids, facts.vocabulary)
    elif not isinstance(prompt.text, str):
        raise ValueError(f"text={reprlib.repr(prompt.text)}: expected a text for each prompt")
    media = [name for name in MEDIA if any(item is not None for item in _flat(getattr(prompt, name, None)))]
    if media and not facts.media:
        raise ValueError(f"{', '.join(media)}: this server reads text only; leave it out")
    if not media and prompt.input_ids is None and not prompt.text:
        raise ValueError("the prompt is empty: send at least one character of text, or one token id")
    if prompt.rid.startswith(INTERNAL):
        raise ValueError(
            f"rid={prompt.rid!r}: ids that begin with {INTERNAL!r} are for the server's own requests; choose another"
        )
    check_logprobs(prompt, facts.vocabulary)
    check_options(prompt, facts.policy)


def check_ids(ids: Json, vocabulary: int) -> None:
    """Token ids that the model has an embedding for, at least one.

    Prompts have up to a million of them, and nobody else is answered meanwhile: so each is converted once, and Python
    compares none of them.
    """
    if not isinstance(ids, (list, range)):
        raise ValueError(f"input_ids={reprlib.repr(ids)}: expected a list of whole numbers for each prompt")
    if not ids:
        raise ValueError("input_ids is empty: a request needs at least one token of its own")
    try:
        numbers = np.frombuffer(array("q", ids), dtype=np.int64)
    except (TypeError, OverflowError):
        raise ValueError(f"input_ids={reprlib.repr(ids)}: expected whole numbers (int64) alone") from None
    if numbers.min() < 0 or numbers.max() >= vocabulary:
        strange = [id for id in ids if not 0 <= id < vocabulary]
        raise ValueError(f"input_ids {strange[:4]}: the model's vocabulary has ids 0 to {vocabulary - 1}")


def check_logprobs(prompt: RequestInput, vocabulary: int) -> None:
    """What a prompt asks of log-probabilities."""
    start, top = prompt.logprob_start_len, prompt.top_logprobs_num
    if start is not None and start < -1:
        raise ValueError(
            f"logprob_start_len={start}: expected -1 (the answer's tokens alone) or the number of a prompt's token"
        )
    if top is not None and not 0 <= top <= vocabulary:
        raise ValueError(f"top_logprobs_num={top}: expected 0 to {vocabulary}, the size of the vocabulary")
    for id in prompt.token_ids_logprob or ():
        check_id(id, vocabulary, "token_ids_logprob")


def check_options(prompt: RequestInput, policy: Policy) -> None:
    """The options in `custom_params`: of the server's policy, and of pools where the request names one."""
    params = prompt.sampling_params or {}
    custom = params.get("custom_params")
    if not custom:
        return
    if ours := {WIRE_KEY, NAMESPACE}.intersection(custom):
        raise ValueError(f"custom_params[{min(ours)!r}] is for the server's own requests")
    of_pools = {field.name for field in fields(RequestOptions)}
    if "pool" in custom or not prompt.custom_logit_processor:  # a processor has options that nobody else knows
        found = set(custom) - ({CHAT_KEY} if "pool" in custom else set())
        problem = unknown_names(found, of_pools | policy.request_options, "custom_params")
        if problem:
            raise problem
        alone = sorted(of_pools.intersection(custom) - policy.request_options)
        if "pool" not in custom and alone:
            raise ValueError(
                f"custom_params: {', '.join(alone)} without a pool: name one (pool), or leave {', '.join(alone)} out"
            )
    policy.check(custom)
    if "conversation" in policy.request_options and custom.get("conversation") and (params.get("n") or 1) > 1:
        raise ValueError(
            f"n={params['n']} with custom_params: conversation={custom['conversation']!r}: a conversation goes on from"
            " one answer; send n=1, or leave conversation out"
        )


# ---- a prompt's tokens ----


def check_tokens(prompt: RequestInput, total: int, facts: Facts) -> None:
    """What a prompt has become; a request without a limit of its own gets the server's.

    Args:
        prompt: GenerateReqInput of one prompt.
        total: its tokens, with what stands before them.
        facts: of the server.
    """
    start = prompt.logprob_start_len
    if prompt.return_logprob and start is not None and start > total:
        raise ValueError(f"logprob_start_len={start}: the prompt has {total} tokens")
    params = prompt.sampling_params
    if "max_new_tokens" in params and params["max_new_tokens"] is None:
        room = max(0, facts.context - total)
        prompt.sampling_params = params = {**params, "max_new_tokens": min(facts.default_max_new_tokens, room)}
    if prompt.return_logprob:
        answer = params.get("max_new_tokens", 128)
        positions = answer + (total - start if start is not None and start >= 0 else 0)
        asked = positions * ((prompt.top_logprobs_num or 0) + len(prompt.token_ids_logprob or ()))
        if asked > facts.max_logprobs:
            raise PoolError(
                f"the request asks for {asked} log-probabilities of other tokens, at {positions} tokens of prompt and"
                f" answer; the server gives at most {facts.max_logprobs} a prompt: ask for fewer"
                " (top_logprobs_num, token_ids_logprob, logprob_start_len, max_new_tokens), or raise --max-logprobs",
                413,
            )


# ---- fields ----


@functools.cache
def _adapters() -> dict[str, tuple[Json, TypeAdapter[Json]]]:
    """(default, what checks the type) of every field of a GenerateReqInput."""
    from pydantic import ConfigDict, TypeAdapter
    from sglang.srt.managers.io_struct import GenerateReqInput

    hints = get_type_hints(GenerateReqInput, include_extras=True)
    config = ConfigDict(arbitrary_types_allowed=True)
    return {
        field.name: (field.default, TypeAdapter(hints[field.name], config=config)) for field in fields(GenerateReqInput)
    }


def _check_fields(request: RequestInput) -> None:
    """Names, types, texts and sizes of numbers; each value takes the type of its field."""
    from pydantic import ValidationError

    for name, (default, adapter) in _adapters().items():
        value = getattr(request, name)
        if value is None or value is default or (name == "input_ids" and _has_ids(value)):
            continue
        if name not in SERVED:
            if value != default and not (value is False and default is None):
                raise ValueError(f"{name} is not served by this server: leave it out")
            setattr(request, name, default)  # a chat says False of some fields whose default is None
            continue
        try:
            value = adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{name}={reprlib.repr(value)}: {error.errors()[0]['msg']}") from None
        setattr(request, name, value)
        _check_values(value, name)


def _has_ids(value: Json) -> bool:
    """Whether a value can be the ids of one prompt, or lists of several, all of which `check_ids` looks at later."""
    if not isinstance(value, list):
        return False
    return all(isinstance(ids, list) for ids in value) or all(isinstance(id, int) for id in value[:1])


def _check_values(value: Json, what: str) -> None:
    """Text that UTF-8 can spell and whole numbers of 64 bits, however deep: nothing else can be sent on."""
    if isinstance(value, str):
        check_text(value, what)
    elif isinstance(value, int):
        if not -INT64 <= value < INT64:
            raise ValueError(f"{what}={reprlib.repr(value)}: expected a whole number of at most 64 bits")
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_values(item, what)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_values(key, what)
            _check_values(item, f"{what}[{reprlib.repr(key)}]")


def _prompts(request: RequestInput) -> list[RequestInput]:
    """The prompts of a request, each with what the request says of it, as SGLang deals it out."""
    copied = copy.copy(request)
    try:
        copied.normalize_batch_and_arguments()
        return [copied] if copied.is_single else [copied[number] for number in range(copied.batch_size)]
    except ValueError:
        raise
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            "the request's lists do not fit its prompts: expected one value for all of them, or a list of one for each"
        ) from error


@functools.cache
def _sent_types() -> dict[str, Any]:
    """The type that a prompt's own value of a field has when it is sent to the schedulers."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    hints = get_type_hints(TokenizedGenerateReqInput)
    return {name: hint for name, hint in hints.items() if name in SERVED - {"input_ids", "sampling_params"}}


def _check_sent(prompt: RequestInput) -> None:
    """A field that may be a list beside a batch has one value for one prompt."""
    import msgspec

    for name, hint in _sent_types().items():
        value = getattr(prompt, name)
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}={reprlib.repr(value)} for one prompt: {error}") from None


# ---- sampling parameters ----


def _flat(value: Json) -> list[Json]:
    if isinstance(value, list):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]
