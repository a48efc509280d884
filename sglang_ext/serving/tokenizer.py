"""What runs inside SGLang's tokenizer manager: the one place where a request meets its pool.

/generate, the OpenAI routes, `Engine.generate` and the frontend language all end in
`TokenizerManager.generate_request` and tokenize each prompt in `_tokenize_one_request`: composing there serves all.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import fastapi
from starlette.requests import Request

from sglang_ext import compat
from sglang_ext.cache import carried
from sglang_ext.cache.rows import REQUEST_OWNER, WIRE_KEY, Row
from sglang_ext.config import RequestOptions
from sglang_ext.names import Passed, RequestInput, RequestState, TokenizerManager
from sglang_ext.serving import checks
from sglang_ext.serving.access import check_explain, check_reading, may_read
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.explain import explained, used
from sglang_ext.serving.grammar import Ending
from sglang_ext.serving.labels import ASKED, AskedLabels, Prompt
from sglang_ext.serving.layout import Layout
from sglang_ext.serving.likely import Labels, Whole, shows_tokens
from sglang_ext.serving.placing import check_fits, check_rebase, row_of
from sglang_ext.serving.pool import Version
from sglang_ext.serving.pools import PoolService
from sglang_ext.serving.question import own_tokens
from sglang_ext.serving.requests import CHAT_KEY, check_ids, check_tokens, count_prompts
from sglang_ext.serving.select import BlockSelection, selected
from sglang_ext.serving.tenancy import pools_of
from sglang_ext.settings import POOL_DIR_ENV
from sglang_ext.types import Json, JsonObject

Generate = Callable[..., AsyncGenerator[Json, None]]  # yields an answer, or a list of those to a batch
Client = Request | None  # None: the offline engine
MAX_RETRIES = 8  # of a question whose blocks were evicted before it ran


@dataclass
class Lease:
    """What one prompt uses of a pool until its answer is complete.

    Attributes:
        end: what SGLang leaves at the end of a constrained answer's text and is no part of it.
        whole: the answer, where it was known before it was generated.
        variant: of the version's layouts, as `Layouts.variant` gave it.
        endings: what takes that end off, by the number of the answer (`n`).
    """

    version: Version
    meta: JsonObject
    options: RequestOptions
    layout: Layout
    row: Row
    own: list[int]
    selection: BlockSelection
    holds: str | None = None
    end: str = ""
    whole: Whole | None = None
    variant: str | None = None
    endings: dict[int, Ending] = field(default_factory=dict)

    def prompt(self) -> list[int]:
        """Token ids of the whole prompt, which only the schedulers put together otherwise."""
        return [*self.layout.tokens_of(self.row.prefix), *self.own]

    def said(self, complete: bool) -> JsonObject:
        """What an answer says of the pool; only its end explains, for texts would go out with every token."""
        explains = self.options.explain and complete
        return self.meta | ({"selection": explained(self.version, self.layout, self.selection)} if explains else {})


def after_init(_result: None, manager: TokenizerManager, *_args: Passed, **_kwargs: Passed) -> None:
    """AFTER TokenizerManager.__init__: the server's pools, when one of our backends was chosen."""
    manager.ext_pools = None
    manager.ext_leases = {}
    manager.ext_keys = None  # serving.access sets them where the server takes requests over HTTP
    if checks.is_active(manager.server_args):
        manager.ext_pools = PoolService(manager, os.environ.get(POOL_DIR_ENV) or None)


def custom_params(obj: RequestInput) -> list[JsonObject]:
    """The custom_params of every prompt of a request, empty ones left out."""
    params = getattr(obj, "sampling_params", None)
    listed = params if isinstance(params, list) else [params]
    return [item for item in ((each or {}).get("custom_params") for each in listed) if isinstance(item, dict) and item]


def scored(obj: RequestInput) -> int:
    """How many prompts of a request have labels scored."""
    wanted = sum(bool(custom.get("label_probs") or custom.get("choose")) for custom in custom_params(obj))
    return wanted if isinstance(obj.sampling_params, list) else wanted * count_prompts(obj)


def around_generate_request(
    original: Generate, manager: TokenizerManager, obj: RequestInput, request: Client = None
) -> AsyncGenerator[Json, None]:
    """AROUND TokenizerManager.generate_request: leases end with the request, answers say what they used."""
    if any("pool" in custom for custom in custom_params(obj)):
        return _generate(original, manager, obj, request)
    return original(manager, obj, request)


async def _generate(
    original: Generate, manager: TokenizerManager, obj: RequestInput, request: Client
) -> AsyncGenerator[Json, None]:
    service = pools_of(manager)
    client = None if getattr(obj, "background", False) else request  # nobody waits for the answer at its connection
    ASKED.set(AskedLabels(client, scored(obj)))
    await service.restored()
    # SGLang refuses an id that is in use; the lease under it is somebody else's then.
    others = set(compat.logical_rids(obj)) & set(manager.ext_leases)
    asked, begun, attempt, trials = copy.copy(obj), False, obj, 0
    streams = getattr(obj, "stream", False)

    def end_leases() -> None:
        for owner in _end_leases(service, manager, obj, others):
            service.channel.release_later(owner)

    try:
        while True:
            try:
                async for out in _answers(service, original, manager, attempt, request):
                    begun = True
                    if not streams:
                        # The routes take the one answer and drop this generator: `finally` comes whenever asyncio
                        # collects it. Whoever has the answer may rely on the lease being over.
                        end_leases()
                    yield out
                return
            except fastapi.HTTPException as error:
                if not compat.blocks_were_missing(error):
                    if isinstance(error, PoolError) and request is not None and not streams:
                        # The completions route answers every ValueError with 400: keep the error's own status.
                        raise fastapi.HTTPException(error.status_code, error.detail) from error
                    raise
                # The KV cache was emptied behind our back (new weights, say), or running requests needed the room.
                # What is resident is looked up again; a single question is asked again, so that nobody sees it.
                service.encoder.flushed()
                trials += 1
                if begun or not obj.is_single or trials > MAX_RETRIES:
                    raise
                for owner in _end_leases(service, manager, obj, others):
                    await service.channel.release(owner)  # before the next attempt holds under the same name
                attempt = copy.copy(asked)
                attempt.rid = obj.rid
                await asyncio.sleep(0.05 * trials)
    finally:
        end_leases()


async def _answers(
    service: PoolService, original: Generate, manager: TokenizerManager, obj: RequestInput, request: Client
) -> AsyncGenerator[Json, None]:
    """SGLang's answers with what they used of the pool; blocks that were missing raise in a stream too."""
    async for out in original(manager, obj, request):
        for item in out if isinstance(out, list) else [out]:
            reason = (item.get("meta_info") or {}).get("finish_reason")
            if isinstance(reason, dict) and compat.is_missing_message(str(reason.get("message") or "")):
                raise fastapi.HTTPException(503, reason["message"])
        _annotate(manager, obj, manager.ext_leases, out)
        yield out


def _end_leases(service: PoolService, manager: TokenizerManager, obj: RequestInput, others: set[str]) -> list[str]:
    """End the leases of a request's prompts; returns the names under which they held blocks, to be released."""
    mine = [rid for rid in compat.logical_rids(obj) if rid not in others]
    ended = [lease for lease in (manager.ext_leases.pop(rid, None) for rid in mine) if lease is not None]
    for lease in ended:
        service.end_lease(lease.version, lease.variant)
    return [lease.holds for lease in ended if lease.holds]


def around_wait_one_response(
    original: Generate, manager: TokenizerManager, obj: RequestInput, request: Client = None
) -> AsyncGenerator[Json, None]:
    """AROUND TokenizerManager._wait_one_response: an answer may come before it is waited for.

    SGLang looks up a request's state when it begins to wait, which in a batch is after the last prompt was tokenized,
    and forgets the state when the answer is complete. Composing a prompt may take a while (blocks to encode), so the
    state is kept from the moment the request was sent.
    """
    return _wait(original, manager, obj, request, manager.rid_to_state.get(obj.rid))


async def _wait(
    original: Generate, manager: TokenizerManager, obj: RequestInput, request: Client, state: RequestState | None
) -> AsyncGenerator[Json, None]:
    early = state is not None and obj.rid not in manager.rid_to_state
    if early:
        manager.rid_to_state[obj.rid] = state
    try:
        async for out in original(manager, obj, request):
            _refuse_aborted(manager, obj.rid, state, out)
            yield out
    except fastapi.HTTPException as error:
        if error.status_code == 413 and request is None and not isinstance(error, PoolError):
            # SGLang 0.5.23 raises by itself, what routes answer with; who calls an engine expects a ValueError.
            raise PoolError(str(error.detail), 413) from error
        raise
    finally:
        if early:
            manager.rid_to_state.pop(obj.rid, None)


def _refuse_aborted(manager: TokenizerManager, rid: str, state: RequestState | None, out: JsonObject) -> None:
    """PoolError where the scheduler ended a request, and SGLang says so in a field beside an empty text.

    400 for an answer whose grammar ended it, 413 for a stream that is too long. Other aborts stay as SGLang has them.
    """
    reason = out["meta_info"].get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return
    if (status := reason.get("status_code")) == 413:
        raise PoolError(reason["message"], 413)
    lease = manager.ext_leases.get(compat.logical_rid(manager, rid))
    constrained = lease is not None and lease.options.labelled and lease.whole is None  # else there is no grammar
    if lease is None or not constrained or compat.abort_was_asked(manager, rid, state):
        return
    if status in (None, 400) or compat.grammar_failed(str(reason.get("message"))):
        why = reason.get("message") if status else "the server's grammar does not go with the model's tokenizer"
        raise PoolError(f"the answer could not be constrained to the labels of pool {lease.version.name!r}: {why}")


def _annotate(manager: TokenizerManager, obj: RequestInput, leases: dict[str, Lease], out: Json) -> None:
    """Put meta_info["sglang_ext"] into every answer of `out`, and take off its text what is no part of a label."""
    rids = compat.logical_rids(obj)
    for place, item in enumerate(out if isinstance(out, list) else [out]):
        lease = leases.get(rids[compat.prompt_index(obj, item, place)])
        if lease is None:
            continue
        if lease.whole is not None:
            lease.whole.put(item)
        if lease.end and isinstance(item.get("text"), str):
            ending = lease.endings.setdefault(compat.answer_index(obj, item, place), Ending(lease.end))
            shown = ending.part if compat.streams_parts(manager, obj) else ending.whole
            item["text"] = shown(item["text"], item["meta_info"].get("finish_reason"))
        if item.get("prompt_token_ids") is not None:  # SGLang has seen the request's own tokens only
            item["prompt_token_ids"] = lease.prompt()
        item["meta_info"]["sglang_ext"] = lease.said(item["meta_info"].get("finish_reason") is not None)


async def around_tokenize_one_request(
    original: Callable[..., Passed], manager: TokenizerManager, obj: RequestInput
) -> Passed:
    """AROUND TokenizerManager._tokenize_one_request: the prompt becomes stitched blocks and own tokens."""
    params = getattr(obj, "sampling_params", None) or {}
    custom = params.get("custom_params")
    if not isinstance(custom, dict) or "pool" not in custom:
        return await original(manager, obj)
    lease = await compose(manager, obj, dict(custom))
    if obj.rid not in manager.rid_to_state:  # the rest of its batch failed while this prompt was composed
        pools_of(manager).end_lease(lease.version, lease.variant)
        if lease.holds:
            pools_of(manager).channel.release_later(lease.holds)
        raise ValueError(f"request {obj.rid} was given up")
    previous = manager.ext_leases.get(obj.rid)
    manager.ext_leases[obj.rid] = lease
    if previous is not None:
        pools_of(manager).end_lease(previous.version, previous.variant)
    return await original(manager, obj)


def around_validate_one_request(
    original: Callable[..., None], manager: TokenizerManager, obj: RequestInput, input_ids: list[int]
) -> None:
    """AROUND TokenizerManager._validate_one_request: the blocks' tokens count against the model's context.

    Raises:
        ValueError: prompt and answer exceed the context, or see `serving.requests.check_ids` and `check_tokens`.
    """
    stitched = carried.stitched_tokens(obj)
    total = stitched + len(input_ids or ())
    if manager.ext_facts is not None and not carried.is_internal(obj):
        sent = input_ids is not None and input_ids is obj.input_ids and obj.rid not in manager.ext_leases
        if not sent:  # they come from a text, a question over a pool, or an image: `check` has not seen them
            check_ids(input_ids, manager.ext_facts.vocabulary)
        check_tokens(obj, total, manager.ext_facts)
    if not stitched:
        return original(manager, obj, input_ids)
    if total >= manager.context_len:
        raise ValueError(
            f"the request has {len(input_ids)} tokens of its own and {stitched} stitched ones; together they must stay"
            f" below the model's context of {manager.context_len} tokens: shorten it or lower the ratio"
        )
    original(manager, obj, range(total))  # only its length is looked at


async def compose(manager: TokenizerManager, obj: RequestInput, custom: JsonObject) -> Lease:
    """Retrieve, and rewrite `obj` in place: its own token ids, constraint, and what the schedulers need to know.

    Raises:
        ValueError: (PoolError and UnknownPool among them) the request cannot be served; says what to change.
    """
    service = pools_of(manager)
    chat = service.layouts.header(custom.pop(CHAT_KEY)) if CHAT_KEY in custom else None
    passed_on = {name: custom.pop(name) for name in service.policy_options if name in custom}
    options = RequestOptions.parse(custom)
    if getattr(obj, "session_params", None) or getattr(obj, "lora_path", None) or getattr(obj, "input_embeds", None):
        raise ValueError("a request with a pool takes no session, LoRA or input_embeds")
    version = await service.needed(options.pool)
    check_reading(manager, obj, version.name, version.definition.options)
    check_explain(manager, options, version.definition.options)
    check_rebase(service, version, options)
    service.lease(version)
    holds = variant = None
    try:
        variant = await service.layouts.variant(version, chat)
        layout = version.layouts[variant]
        begin = time.perf_counter()
        own, lead, query = await own_tokens(service, obj, version, options)
        tokenization = time.perf_counter() - begin
        if len(own) >= manager.context_len:  # before anybody looks for blocks that go with so long a text
            raise ValueError(f"the question has {len(own)} tokens, the context {manager.context_len}: shorten it")
        # (white space before the answer, what ends it): in a chat it is a turn of its own, and its end is the turn's.
        answer = ("", "") if chat else (lead, version.definition.options.answer_end)
        await service.prepare_retriever(version, options)
        begin = time.perf_counter()
        selection = await selected(service.workers, version, layout, options, query)
        retrieval = time.perf_counter() - begin
        labels = Labels(service, version, options, *answer)
        await labels.prepare(obj.sampling_params)
        owner = REQUEST_OWNER + obj.rid
        holds = None if version.pinned(variant) else owner  # let go of, however far `ensure` comes
        await service.encoder.ensure(version, variant, layout, selection.blocks, owner)
        stitched = selection.tokens
        row = row_of(selection, layout, options)
        check_fits(manager, row, len(own))
        obj.input_ids, obj.text = own, None
        carried.set_stitched_tokens(obj, stitched)
        params = copy.copy(obj.sampling_params)
        params["custom_params"] = {WIRE_KEY: row.dump(), **passed_on}
        prompt = Prompt(row, own, obj.extra_key, obj.priority)
        labelled = await labels.answer(prompt, params, shown=bool(passed_on) or shows_tokens(obj))
        obj.sampling_params = labelled.params
        if getattr(obj, "return_logprob", False) and obj.logprob_start_len is not None and obj.logprob_start_len >= 0:
            # Users count in their own prompt; the stitched tokens have no log-probabilities to give.
            obj.logprob_start_len += stitched
    except BaseException:
        service.end_lease(version, variant)
        if holds:
            service.channel.release_later(holds)
        raise
    service.metrics.answered(version.name, stitched, retrieval)
    service.counters["requests"] += 1
    service.counters["stitched_tokens"] += stitched
    service.counters["retrieval_seconds"] += retrieval
    meta = used(version, selection, may_read(manager, version.definition.options))
    meta |= {"retrieval_ms": round(retrieval * 1e3, 4), "tokenization_ms": round(tokenization * 1e3, 4)}
    meta |= labelled.said
    return Lease(
        version,
        meta,
        options,
        layout,
        row,
        own,
        selection,
        holds,
        end=labelled.end,
        whole=labelled.whole,
        variant=variant,
    )
