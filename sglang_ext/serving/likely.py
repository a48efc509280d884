"""Answers that are a pool's label: how the request chooses it, and the answer where it is known before it is generated.

A request may have the labels constrain what is generated (`grammar`), all of them scored (`labels`), or the most likely
one searched for (`label_search`). Where the label is known before the answer begins, the schedulers are asked for one
token only, whose place the label takes: nobody waits for tokens that are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang_ext import compat
from sglang_ext.config import RequestOptions
from sglang_ext.names import RequestInput, TokenizerManager
from sglang_ext.serving.grammar import constrain, refuse_others
from sglang_ext.serving.label_search import COMPUTED_AT_ONCE, Search, SearchPass
from sglang_ext.serving.label_tree import LabelTokens
from sglang_ext.serving.labels import (
    ASKED,
    SCORED_AT_ONCE,
    ClientGone,
    Prompt,
    check_labels_fit,
    check_quota,
    label_probabilities,
    scored_row,
)
from sglang_ext.serving.plan import ROOM_FOR_REQUESTS
from sglang_ext.serving.pool import Version
from sglang_ext.serving.pools import PoolService
from sglang_ext.types import JsonObject, Options

LIKELY = 'choose="likely"'
SHOWN = "leave out log-probabilities, hidden states and options of the system, for which a label must be generated"
"""What a request with `choose` can do where its answer cannot be constrained."""


@dataclass(frozen=True)
class Whole:
    """An answer that is known before it is generated.

    Attributes:
        text: of the answer.
        token_ids: of the answer and what ends it.
        matched: what ends it: a text, or the token that ends a sequence.
    """

    text: str
    token_ids: tuple[int, ...]
    matched: str | int | None

    def put(self, item: JsonObject) -> None:
        """Take the place of the one token that SGLang has generated; an answer that was aborted stays as it is."""
        meta = item["meta_info"]
        reason = meta.get("finish_reason")
        if reason is None or reason.get("type") == "abort":
            return
        if isinstance(item.get("text"), str):
            item["text"] = self.text
        item["output_ids"] = list(self.token_ids)
        meta["completion_tokens"] = len(self.token_ids)
        meta["finish_reason"] = {"type": "stop", "matched": self.matched}


@dataclass(frozen=True)
class Chosen:
    """The most likely label.

    Attributes:
        label: the text.
        log_prob: natural logarithm of its probability, with what ends it.
        passes: how many it took to find.
        tokens: of labels, that these passes computed.
    """

    label: str
    log_prob: float
    passes: int
    tokens: int

    def said(self) -> JsonObject:
        """What an answer says of it."""
        return {"log_prob": self.log_prob, "passes": self.passes, "tokens": self.tokens}


@dataclass(frozen=True)
class LabelAnswer:
    """What a request's labels make of its answer.

    Attributes:
        params: SGLang's sampling parameters.
        said: what the answer says of its labels.
        end: what SGLang leaves at the end of the answer's text and is no part of it.
        whole: the answer itself, where it is known.
    """

    params: JsonObject
    said: JsonObject
    end: str = ""
    whole: Whole | None = None


def shows_tokens(obj: RequestInput) -> bool:
    """Whether a request asks for what only the generation of each token of its answer tells."""
    return bool(getattr(obj, "return_logprob", False) or getattr(obj, "return_hidden_states", False))


class Labels:
    """The labels of a version as answers to one prompt.

    Args:
        service: the server's pools.
        version: whose labels they are.
        options: of the request.
        lead: the white space that an answer begins with.
        end: what ends an answer; empty in a chat, where the end of the sequence does.
    """

    def __init__(self, service: PoolService, version: Version, options: RequestOptions, lead: str, end: str) -> None:
        self._service, self._version, self._options = service, version, options
        self._lead, self._end = lead, end
        self._tokens: LabelTokens | None = None

    async def prepare(self, params: Options) -> None:
        """Tokenize the labels, where they are scored.

        Raises:
            ValueError: parameters that do not go with how the label is chosen.
            PoolError: (413) they have more tokens than the server scores.
        """
        options, labels = self._options, self._version.definition.labels
        if options.choose is not None:
            refuse_others(params, LIKELY)
            if params.get("temperature"):
                raise ValueError(
                    f"{LIKELY} and temperature={params['temperature']}: the most likely label is not sampled; leave one"
                    " of them out"
                )
        if not options.label_probs and options.choose is None:
            return
        quota, named = self._service.settings.max_label_tokens, "label_probs" if options.label_probs else LIKELY
        check_quota(len(labels), len(labels), quota, self._version.name, named)
        self._tokens = await self._service.layouts.label_tokens(self._version, self._lead, self._end)
        check_quota(len(labels), self._tokens.tree_tokens, quota, self._version.name, named)

    async def answer(self, prompt: Prompt, params: JsonObject, shown: bool) -> LabelAnswer:
        """Score what is to be scored, and have the answer be a label where the request asks for one.

        Args:
            prompt: what the labels follow.
            params: its sampling parameters, which are changed.
            shown: whether the request asks for what only the generation of an answer shows.
        """
        options, labels = self._options, self._version.definition.labels
        said: JsonObject = {}
        if self._tokens is not None and options.label_probs:
            manager = self._service.manager
            async with self._service.scoring:
                state = await self._service.channel.ask("state")
                probs = await label_probabilities(manager, labels, self._tokens, prompt, state)
            said["label_probs"] = probs
            if not params.get("temperature"):
                labels = (max(probs, key=probs.__getitem__),)  # what is constrained is this one, and not the greedy one
        elif self._tokens is not None:
            chosen = await self._search(self._tokens, prompt)
            said["choice"], labels = chosen.said(), (chosen.label,)
        if not options.labelled:
            return LabelAnswer(params, said)
        if options.choose is not None and self._tokens is not None and not shown:
            return LabelAnswer(_one_token(params), said, whole=self._whole(labels[0], self._tokens, params))
        backend = compat.resolved(self._service.manager.server_args).grammar_backend
        why = (LIKELY, SHOWN) if options.choose is not None else ()
        end = constrain(params, labels, self._lead, self._end, backend, *why)
        return LabelAnswer(params, said, "" if params.get("no_stop_trim") else end)

    async def _search(self, tokens: LabelTokens, prompt: Prompt) -> Chosen:
        """The most likely label, a pass for each level of the tree that has to be looked at."""
        service, labels = self._service, self._version.definition.labels
        tree = await service.layouts.label_tree(tokens)
        state = await service.channel.ask("state")
        search, position = Search(tree), prompt.row.prefix_tokens + prompt.row.shift + len(prompt.own)
        passes = computed = 0
        while (level := search.level(position, _most(tokens, prompt, state, passes))) is not None:
            own, asked = await _pass(service.manager, level, prompt)
            search.learn(level, own, asked)
            passes, computed = passes + 1, computed + len(level.token_ids)
        at = next(at for at, ids in enumerate(tokens.token_ids) if tree.ends[ids] == search.best)
        return Chosen(labels[at], search.score, passes, computed)

    def _whole(self, label: str, tokens: LabelTokens, params: Options) -> Whole:
        at = self._version.definition.labels.index(label)
        ids = tokens.token_ids[at]
        shown = self._end if params.get("no_stop_trim") else ""
        return Whole(self._lead + label + shown, ids, self._end or (ids[-1] if ids else None))


def _one_token(params: Options) -> JsonObject:
    """Sampling parameters of a request whose answer is known: what would end or bend it has nothing to do."""
    kept = {name: params[name] for name in ("n", "custom_params") if name in params}
    return {**kept, "max_new_tokens": 1, "temperature": 0.0}


def _most(tokens: LabelTokens, prompt: Prompt, state: Options, passes: int) -> int:
    """Tokens of labels in the next pass: at least as many as the longest label has, where there is room.

    Each pass takes twice as many as the one before, for a model that prefers no label leaves nothing out.
    """
    wanted = min(COMPUTED_AT_ONCE << min(passes, 8), SCORED_AT_ONCE)
    longest = max(len(ids) for ids in tokens.token_ids)
    own = len(prompt.own)
    check_labels_fit(prompt.row, own, longest, state["max_req_input_len"])
    free = state["total_tokens"] - state["held_tokens"] - own - ROOM_FOR_REQUESTS
    columns = state["max_req_input_len"] - prompt.row.reach - own - 1
    return max(1, min(max(wanted, longest), free, columns))


async def _pass(
    manager: TokenizerManager, level: SearchPass, prompt: Prompt
) -> tuple[list[float], list[Mapping[int, float]]]:
    """What `Search.learn` takes in, of one scoring request.

    Raises:
        ClientGone: the client hung up.
    """
    client = ASKED.get().client
    if client is not None and await client.is_disconnected():
        raise ClientGone
    row = replace(prompt.row, new=tuple(level.blocks), own=len(prompt.own) if level.blocks else None)
    first = prompt.row.prefix_tokens + len(prompt.own) - 1
    meta = await scored_row(manager, client, prompt.own + level.token_ids, row, first, prompt, level.asked)
    own = [value or 0.0 for value, *_ in meta["input_token_logprobs"]]
    # Of each column but the last, in the place of the one after it; of the last one, as for a token to generate.
    told = [*meta["input_token_ids_logprobs"][1:], *meta["output_token_ids_logprobs"]]
    if len(own) != len(told) or len(told) != len(level.token_ids) + 1:
        raise RuntimeError(f"log-probabilities behind {len(told)} of {len(level.token_ids) + 1} columns")
    return own, [{token: value for value, token, *_ in each} for each in told]
