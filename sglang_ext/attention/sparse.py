"""What policies share that read a long row sparsely while decoding.

Prompts are attended to densely, by SGLang itself; so are rows shorter than `min_tokens`. Requests over pools are DBSA's
unless a policy says otherwise. Served by the PyTorch backend, and where a policy has clusters by kernels.

A request may ask for `dense: true`, and for `attention_report: true`: each decoding step is then measured against dense
attention, which costs a dense pass, and `meta_info["attention_report"]` holds for each generated token lists with a
figure a layer. A token whose step was dense has the reason instead, as `dense`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from sglang_ext import compat
from sglang_ext.attention.dbsa import DbsaPolicy
from sglang_ext.attention.policy import Caches, LayerView, Request, RequestRows, RowViews
from sglang_ext.attention.tokens import token_logits
from sglang_ext.compat.ranks import least_over_ranks, mean_over_ranks
from sglang_ext.config import policy_options
from sglang_ext.names import Req
from sglang_ext.policies.clustering import Middle
from sglang_ext.types import JsonObject, Options

REPORT = "attention_report"  # in custom_params and in meta_info
DENSE = "dense"
ALWAYS = frozenset({REPORT, DENSE})
OF_PROMPT = "the prompt's pass gave this token, and prompts are attended to densely"
OF_POOL = "answers over pools are not read sparsely with this attention backend"
ASKED_DENSE = "the request asks for dense attention"

OptionsT = TypeVar("OptionsT", bound=Middle)


@dataclass
class Asked(Generic[OptionsT]):
    """What one request wants, and the pass it is in.

    Attributes:
        config: the server's options, and the request's own in their place.
        dense: whether it wants dense attention.
        report: whether it wants to be measured.
        note: where the pass's figures go; None for a pass that is not measured.
    """

    config: OptionsT
    dense: bool
    report: bool
    note: JsonObject | None = None


class SparsePolicy(DbsaPolicy, Generic[OptionsT]):
    """Base class of policies whose decoding steps choose what they read.

    Attributes:
        options: the server's options; numbers among them that `request_options` names may be set per request.
        over_pools: whether answers over pools are read sparsely, too.
    """

    options: type[OptionsT]
    request_options = ALWAYS
    as_written = False  # clusters of blocks are read at new positions
    over_pools = False

    def __init__(self) -> None:
        self.config = policy_options(self.options)
        self._asked: dict[int, Asked[OptionsT]] = {}
        self._drafts = False

    def step(self, asked: Asked[OptionsT], rows: RequestRows) -> LayerView | None:
        """What a decoding step reads in each layer; None for everything, and the report says why (`read_all`)."""
        raise NotImplementedError

    def draft(self, tokens: int) -> None:
        """What lies before the window stays: a token that a verification may replace must lie within."""
        if self.config.window < tokens:
            raise ValueError(
                f"window={self.config.window} with --speculative-num-draft-tokens {tokens}: what is drafted must lie"
                f" within the window; set it to {tokens} or more (--policy), or verify fewer tokens"
            )
        self._drafts = True

    # ---- requests ----

    def check(self, options: Options) -> None:
        if self._parse(options).report and self._drafts:
            raise ValueError(
                f"custom_params: {REPORT}=true on a server whose sparse steps only draft tokens"
                " (--speculative-algorithm): dense attention gives the answer; ask a server without it"
            )

    def _parse(self, options: Options) -> Asked[OptionsT]:
        for name in ALWAYS:
            if not isinstance(options.get(name, False), bool):
                raise ValueError(f"custom_params: {name}={options[name]!r}: expected true or false")
        given = {name: options[name] for name in self.request_options - ALWAYS if name in options}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"custom_params: {name}={value!r}: expected a number")
        try:
            config = replace(self.config, **given)
        except ValueError as error:
            raise ValueError(f"custom_params: {error} (what is not given is the server's)") from error
        return Asked(config, bool(options.get(DENSE, False)), bool(options.get(REPORT, False)))

    def start(self, request: Request) -> None:
        row = request.row
        if row is None or (self.over_pools and not row.new):
            self._asked[request.slot] = self._parse(request.options)

    def finish(self, request: Request) -> None:
        self._asked.pop(request.slot, None)

    def before_pass(self, request: Request, req: Req, begin: int, end: int, decode: bool) -> None:
        asked = self._asked.get(request.slot)
        if asked is not None:
            asked.note = None
        if not request.options.get(REPORT):
            return
        note = compat.answer_note(req, REPORT, end)
        if note is None:
            return
        why = self._why_dense(asked, begin, decode)
        if why is not None:
            note[DENSE] = why
        elif asked is not None:
            asked.note = note

    def _why_dense(self, asked: Asked[OptionsT] | None, begin: int, decode: bool) -> str | None:
        """Why a pass is dense whatever the row holds, in words for users; None where it need not be."""
        if not decode:
            return OF_PROMPT
        if asked is None:
            return OF_POOL
        if asked.dense:
            return ASKED_DENSE
        if begin < self.config.min_tokens:
            return f"the row has {begin} tokens before this one, fewer than min_tokens={self.config.min_tokens}"
        return None

    def read_all(self, asked: Asked[OptionsT], why: str) -> None:
        """Say in the report why a decoding step reads everything after all."""
        if asked.note is not None:
            asked.note[DENSE], asked.note = why, None

    def note(self, slot: int) -> JsonObject | None:
        """Where the figures of the pass at hand go, of the request in `slot`; None where it is not measured."""
        asked = self._asked.get(slot)
        return None if asked is None else asked.note

    def views(self, rows: RequestRows) -> RowViews | None:
        asked = self._asked.get(rows.request.slot)
        if asked is None or asked.dense or rows.begin < self.config.min_tokens:
            return super().views(rows)
        self.before_views(asked, rows)
        view = self.step(asked, rows) if rows.decode else None
        return super().views(rows) if view is None else [(rows.begin, rows.end, view)]

    def before_views(self, asked: Asked[OptionsT], rows: RequestRows) -> None:
        """A pass over a long row that is not to be dense begins: a prompt's, or a decoding step."""


def grouped(query: torch.Tensor, caches: Caches) -> torch.Tensor:
    """The query of a decoding step by key-value head: [kv_heads, group, head_dim], float32 or float64."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query[0].view(caches.keys.shape[1], -1, query.shape[2]).to(dtype)


def measure(
    note: JsonObject,
    rows: RequestRows,
    caches: Caches,
    query: torch.Tensor,
    read: torch.Tensor,
    kept: torch.Tensor | None = None,
    approximated: torch.Tensor | None = None,
) -> None:
    """Add a layer's figures to a report.

    Args:
        note: name -> a figure a layer: `exact` and `kept`, shares of the row's tokens that were read one by one, and
            those with the tokens of approximated clusters, mean over key-value heads; `approximated_clusters`, a share;
            `recovered` and `recovered_least`, mean and least over query heads of the share of dense attention that
            falls on kept tokens. The heads are those of all tensor-parallel ranks, which measure the same steps.
        rows, caches, query: of the step; query [kv_heads, group, head_dim].
        read: [kv_heads, columns] bool.
        kept: likewise; None: the same.
        approximated: [kv_heads] share of the clusters; None where there are none.
    """
    kept = read if kept is None else kept
    mass = (torch.softmax(token_logits(rows, caches, query), dim=-1) * kept.unsqueeze(1)).sum(-1)
    means = {"exact": read.float().mean(), "kept": kept.float().mean(), "recovered": mass.mean()}
    if approximated is not None:
        means["approximated_clusters"] = approximated.float().mean()
    found = dict(zip(means, mean_over_ranks(torch.stack([*means.values()])).tolist(), strict=True))
    for name, value in {**found, "recovered_least": float(least_over_ranks(mass.min()))}.items():
        note.setdefault(name, []).append(value)
