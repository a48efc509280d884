"""A whole model over a cascading cache, float32, by two routes that share no code.

*In strides*: as an engine works. Keys and values of each lane lie in cells, written once; a stride runs in
`transformers` over a `DynamicCache` of what is kept, rotated to positions 0, 1, 2, ...; scores and tokens move by
`kernels/score_update` and `kernels/cascade_update`. After some strides the rest comes token by token, as in decoding.

*All at once*: one forward over the whole sequence without a cache. Each layer's attention is written from the rules:
for every stride and head it looks up which tokens the rule (`ReferenceStream`) has kept, masks the others, and rotates
each key to the place at which the query sees it.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

from sglang_ext.kernels.cascade_update import CascadeState, cascade_update
from sglang_ext.kernels.score_update import CountedQueries, KeptScores, update_scores
from sglang_ext.policies.cascade import Cascade, ReferenceStream, decay
from tests.oracle import models, oracle

LENGTH, DECODED = 167, 37
TOLERANCE = 2e-5  # float32, log-probabilities; kept tokens must be the same


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return models.load_model(models.save_model("llama", tmp_path_factory.mktemp("cascade")))


@pytest.fixture(scope="module")
def sequence():
    return torch.randint(7, models.VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()


class InStrides:
    """What an engine keeps of one request, and its forward pass."""

    def __init__(self, model: torch.nn.Module, cascade: Cascade) -> None:
        self.model, self.cascade, self.seen = model, cascade, 0
        config = model.config
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.state = CascadeState.empty(self.layers, 2, cascade.lanes(self.kv_heads), cascade.rings, "cpu")
        shape = (self.layers, self.kv_heads, cascade.slots, config.head_dim)
        self.keys, self.values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))

    def _cells(self, layer: int, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cells = self.state.cell[layer, 1][:, entries.long()].long().expand(self.kv_heads, -1)
        return torch.arange(self.kv_heads).unsqueeze(1), cells

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary] of some tokens of one stride."""
        rings, stride = self.cascade.rings, self.cascade.stride
        begin, end = self.seen, self.seen + len(tokens)
        added = torch.tensor([begin // stride * stride])
        columns = rings.columns(added, torch.tensor([end]), rings.entries)
        before = rings.kept(int(added)) + begin - int(added)
        shown = columns[0, : before + len(tokens)]
        past, queries = DynamicCache(config=self.model.config), []
        for layer in range(self.layers):
            head, cells = self._cells(layer, shown[:before])
            if before:
                keys = oracle.rotate(self.model, self.keys[layer][head, cells], torch.arange(before))
                past.update(keys[None], self.values[layer][head, cells][None], layer)
        hooks = [
            block.self_attn.q_proj.register_forward_hook(lambda _m, _i, out: queries.append(out[0]))
            for block in self.model.model.layers
        ]
        allowed = torch.ones(len(tokens), before + len(tokens), dtype=torch.bool).tril(before)
        with oracle._capture(self.model) as (keys, values):
            logits = oracle._forward(self.model, tokens, torch.arange(before, before + len(tokens)), allowed, past)
        for hook in hooks:
            hook.remove()
        for layer in range(self.layers):
            head, cells = self._cells(layer, shown[before:])
            self.keys[layer][head, cells], self.values[layer][head, cells] = keys[layer], values[layer]
            self._score(layer, queries[layer], shown, columns, before, allowed)
        self.seen = end
        if end % stride == 0:
            cascade_update(
                self.state, torch.tensor([1]), added, torch.tensor([stride]), rings, selection=self.cascade.selection
            )
        return torch.log_softmax(logits, dim=-1)

    def _score(self, layer, query, shown, columns, before, allowed) -> None:
        head_dim, rows = self.model.config.head_dim, allowed.shape[0]
        query = query.view(rows, -1, head_dim).transpose(0, 1)
        query = oracle.rotate(self.model, query, torch.arange(before, before + rows)).transpose(0, 1)
        head, cells = self._cells(layer, shown)
        keys = oracle.rotate(self.model, self.keys[layer][head, cells], torch.arange(len(shown)))
        grouped = query.unflatten(1, (self.kv_heads, -1))
        logits = torch.einsum("thgd,hcd->thgc", grouped, keys) * head_dim**-0.5
        lse = logits.masked_fill(~allowed[:, None, None], float("-inf")).logsumexp(-1).flatten(1)
        update_scores(
            KeptScores(self.state.score[layer], columns[:, : len(shown)], torch.tensor([1])),
            CountedQueries(
                query[None].contiguous(),
                keys[None],
                lse[None],
                torch.tensor([before]),
                torch.tensor([rows]),
                scale=head_dim**-0.5,
            ),
            beta=self.cascade.beta,
            reduction=self.cascade.head_reduction,
        )

    def kept(self) -> list[list[list[int]]]:
        """Tokens kept by layer and lane, in view order, without the open stride's."""
        added = self.seen // self.cascade.stride * self.cascade.stride
        columns = self.cascade.rings.columns(torch.tensor([added]), torch.tensor([added]), self.cascade.slots)[0]
        return self.state.token[:, 1][..., columns[columns >= 0].long()].tolist()


class AllAtOnce:
    """Attention of one whole sequence under a cascade, from unrotated queries and keys."""

    def __init__(self, model: torch.nn.Module, cascade: Cascade) -> None:
        self.model, self.cascade = model, cascade
        self.kept: list[list[list[int]]] = []

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        AttentionInterface.register("cascade_by_definition", self.attend)
        self.kept = []
        self.model.set_attn_implementation("cascade_by_definition")
        try:
            # Position 0 everywhere: the model's own rotation is none.
            seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
            logits = oracle._forward(self.model, tokens, torch.zeros(len(tokens), dtype=torch.long), seen)
        finally:
            self.model.set_attn_implementation("eager")
        return torch.log_softmax(logits, dim=-1)

    def attend(self, module, query, key, value, mask, scaling, **_):
        cascade, (query, key, value) = self.cascade, (query[0], key[0], value[0])
        heads, length, _ = query.shape
        group = heads // key.shape[0]
        lanes = [list(range(heads))]
        if cascade.heads == "independent":
            lanes = [list(range(k * group, (k + 1) * group)) for k in range(key.shape[0])]
        out = torch.empty_like(query)
        kept = []
        for lane in lanes:
            stream, scores = ReferenceStream(cascade), torch.zeros(length, dtype=torch.float64)
            for begin in range(0, length, cascade.stride):
                end = min(begin + cascade.stride, length)
                old = [k.token for k in stream.kept()]
                if cascade.cascades == 1:  # StreamingLLM
                    assert old == [t for t in range(begin) if t < cascade.sinks or t >= begin - cascade.window]
                place = torch.tensor([*old, *range(begin, end)])
                attention = torch.zeros(end - begin, len(lane), length, dtype=torch.float64)
                for i, h in enumerate(lane):
                    own = torch.arange(len(old), len(place))
                    q = oracle.rotate(self.model, query[h : h + 1, begin:end], own)[0]
                    k = oracle.rotate(self.model, key[h // group, place][None], torch.arange(len(place)))[0]
                    logits = (q @ k.T * scaling).masked_fill(torch.arange(len(place)) > own[:, None], float("-inf"))
                    weights = torch.softmax(logits, dim=-1)
                    out[h, begin:end] = weights @ value[h // group, place]
                    attention[:, i, place] = weights.double()
                reduced = attention.mean(1) if cascade.head_reduction == "mean" else attention.amax(1)
                scores = decay(scores, reduced, cascade.beta)
                if end % cascade.stride == 0:
                    for token in stream.kept():
                        token.score = float(scores[token.token])
                    stream.add(scores[begin:end].tolist())
            kept.append([k.token for k in stream.kept()])
        self.kept.append(kept)
        return out.transpose(0, 1)[None], None


SETTINGS = {
    "streaming": Cascade(window=24, cascades=1, sinks=3, stride=16, beta=0.9),
    "cascades": Cascade(window=24, cascades=3, sinks=3, stride=16, beta=0.98),
    "maximum": Cascade(window=20, cascades=4, sinks=2, stride=7, beta=0.9, head_reduction="max"),
    "homogeneous": Cascade(window=20, cascades=2, sinks=0, stride=13, beta=0.9, heads="homogeneous"),
    "homogeneous maximum": Cascade(
        window=21, cascades=3, sinks=1, stride=25, beta=0.9, heads="homogeneous", head_reduction="max"
    ),
    "no selection": Cascade(window=24, cascades=3, sinks=3, stride=16, selection=False),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_strides_and_decoding_equal_one_forward_by_definition(model, sequence, name):
    cascade = SETTINGS[name]
    engine, definition = InStrides(model, cascade), AllAtOnce(model, cascade)
    want = definition(sequence)
    prompt = LENGTH - DECODED
    parts = [engine(sequence[a:b]) for a, b in cascade.strides(0, prompt)]
    parts += [engine([token]) for token in sequence[prompt:]]
    assert engine.kept() == definition.kept
    assert (torch.cat(parts) - want).abs().max() <= TOLERANCE
    lanes = {tuple(kept) for layer in definition.kept for kept in layer}
    if cascade.selection and cascade.cascades > 1:
        assert len(lanes) > 1  # lanes differ, or the test would not see one lane read for another
    else:
        assert len(lanes) == 1


def test_the_two_routes_are_sensitive(model, sequence):
    """Another selection, one sink less or a shifted stride each move the answer by far more than the tolerance."""
    base = Cascade(window=24, cascades=3, sinks=3, stride=16, beta=0.98)
    want = AllAtOnce(model, base)(sequence)
    for other in ({"selection": False}, {"sinks": 2}, {"stride": 15}, {"head_reduction": "max"}, {"cascades": 2}):
        got = AllAtOnce(model, Cascade(**{**vars(base), **other}))(sequence)
        assert (got - want).abs().max() > 1000 * TOLERANCE, other


def test_within_the_window_it_is_dense_attention(model, sequence):
    cascade = Cascade(window=LENGTH + 1, cascades=2, sinks=2, stride=16)
    engine = InStrides(model, cascade)
    got = torch.cat([engine(sequence[a:b]) for a, b in cascade.strides(0, LENGTH)])
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    want = torch.log_softmax(oracle._forward(model, sequence, torch.arange(LENGTH), causal), dim=-1)
    assert (got - want).abs().max() <= TOLERANCE
