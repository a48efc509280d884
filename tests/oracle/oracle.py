"""What a pool's blocks and a request's answer must be, by ``transformers`` alone.

The oracle imports nothing of this project. It runs the checkpoint's own ``transformers`` model in float32 (or
float64) with an explicit 4-D additive mask and explicit position ids, and the rotations are the model's own
``rotary_emb`` and ``apply_rotary_pos_emb``.

Two stages, as in the paper (DBSA, section 3):

* **Encoding** (:func:`encode`, :func:`encode_in_one_forward`). Block i attends causally to the blocks its
  pattern names and to itself. What is kept of a block is, per layer, its keys *before* rotation (behind the
  key norm where the model has one) and its values. They depend on the encoding mask and positions through
  the hidden states of the layers below.
* **Answering** (:func:`log_probs`, :func:`answer_logprobs`). The selected pieces' kept keys are rotated to
  new contiguous positions 0..|D'|-1 in view order, put into a ``DynamicCache``, and the request's own tokens
  run causally behind them at positions |D'|, |D'|+1, ...

The rotation of a key by its position is linear, so keeping the unrotated key and rotating it anew is exact.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import DynamicCache

PATTERNS = ("full", "sink+previous+self", "sink+self", "self")
POSITIONS = ("sequential", "local")

Piece = tuple[int, int, int]
"""(block id, first token, end token) of a run of tokens inside one block; the end is exclusive."""


@dataclass(frozen=True)
class EncodedBlocks:
    """The kept states of a pool's blocks.

    Attributes:
        tokens: token ids of every block.
        keys: ``keys[block][layer]``, float [key-value heads, tokens of the block, head_dim], before rotation.
        values: the same for the values.
        positions: ``positions[block]``, int64 [tokens of the block], the position every token was encoded at.
    """

    tokens: list[list[int]]
    keys: list[list[torch.Tensor]]
    values: list[list[torch.Tensor]]
    positions: list[torch.Tensor]


def attended_blocks(i: int, pattern: str, sink_blocks: int = 1, previous_blocks: int = 2) -> list[int]:
    """Return the blocks, in ascending order and without ``i`` itself, that block ``i`` attends to.

    A block that is a sink and a previous block at once is listed once. Raises ValueError for an unknown
    pattern.
    """
    if pattern == "full":
        return list(range(i))
    sinks = set(range(min(i, sink_blocks)))
    previous = set(range(max(0, i - previous_blocks), i))
    if pattern == "sink+previous+self":
        return sorted(sinks | previous)
    if pattern == "sink+self":
        return sorted(sinks)
    if pattern == "self":
        return []
    raise ValueError(f"unknown pattern {pattern!r}: expected one of {PATTERNS}")


def whole_blocks(blocks: Sequence[Sequence[int]], ids: Sequence[int]) -> list[Piece]:
    """Return the pieces that are the whole blocks ``ids``, in that order."""
    return [(b, 0, len(blocks[b])) for b in ids]


# --------------------------------------------------------------------------- the model's own parts


@contextmanager
def _capture(model: torch.nn.Module):
    """Collect, in every forward inside the context, each layer's unrotated keys and its values.

    Yields (keys, values), lists with one tensor [key-value heads, tokens, head_dim] a layer, refilled by
    every forward. Qwen3 normalises its keys per head between projection and rotation; the norm's output is
    taken.
    """
    layers = model.model.layers
    keys: list[torch.Tensor] = [torch.empty(0)] * len(layers)
    values: list[torch.Tensor] = [torch.empty(0)] * len(layers)

    def keep(store: list[torch.Tensor], layer: int, head_dim: int):
        def hook(_module, _inputs, output):
            store[layer] = output.detach().reshape(output.shape[1], -1, head_dim).transpose(0, 1).clone()

        return hook

    handles = []
    for n, layer in enumerate(layers):
        attn = layer.self_attn
        last_before_rotation = getattr(attn, "k_norm", None) or attn.k_proj
        handles.append(last_before_rotation.register_forward_hook(keep(keys, n, attn.head_dim)))
        handles.append(attn.v_proj.register_forward_hook(keep(values, n, attn.head_dim)))
    try:
        yield keys, values
    finally:
        for handle in handles:
            handle.remove()


def rotate(model: torch.nn.Module, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate keys [heads, tokens, head_dim] to ``positions`` (int64 [tokens]), by the model's functions."""
    cos, sin = model.model.rotary_emb(keys[None], positions[None])
    apply = sys.modules[type(model).__module__].apply_rotary_pos_emb
    _, rotated = apply(keys[None], keys[None], cos, sin)
    return rotated[0]


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """bool [queries, keys] -> additive mask [1, 1, queries, keys]: 0 if allowed, else minus infinity."""
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, float("-inf"))[None, None]


def _forward(
    model: torch.nn.Module,
    tokens: Sequence[int],
    positions: torch.Tensor,
    allowed: torch.Tensor,
    past: DynamicCache | None = None,
) -> torch.Tensor:
    """One forward of ``tokens``; returns the logits [tokens, vocabulary]."""
    if torch.any(~allowed.any(dim=-1)):
        raise ValueError("a query row sees no key at all: its softmax would be NaN; check the mask")
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=positions[None],
            attention_mask=_additive(allowed, model.dtype),
            past_key_values=past if past is not None else DynamicCache(config=model.config),
            use_cache=True,
        )
    return out.logits[0]


def _past(
    model: torch.nn.Module, encoded: EncodedBlocks, pieces: Sequence[Piece], positions: torch.Tensor
) -> DynamicCache:
    """A cache that holds ``pieces`` in order, their keys rotated to ``positions`` (int64, one a token)."""
    cache = DynamicCache(config=model.config)
    if not pieces:
        return cache
    for layer in range(len(model.model.layers)):
        keys = torch.cat([encoded.keys[b][layer][:, s:e] for b, s, e in pieces], dim=1)
        values = torch.cat([encoded.values[b][layer][:, s:e] for b, s, e in pieces], dim=1)
        cache.update(rotate(model, keys, positions)[None], values[None], layer)
    return cache


def _check_pieces(encoded: EncodedBlocks, pieces: Sequence[Piece]) -> None:
    seen: set[tuple[int, int]] = set()
    for b, start, end in pieces:
        if not 0 <= b < len(encoded.tokens) or not 0 <= start < end <= len(encoded.tokens[b]):
            raise ValueError(f"piece {(b, start, end)} does not lie in a block of the pool")
        cells = {(b, t) for t in range(start, end)}
        if seen & cells:
            raise ValueError(f"piece {(b, start, end)} overlaps an earlier one: a view is disjoint")
        seen |= cells


def written_keys(model: torch.nn.Module, encoded: EncodedBlocks, block: int) -> list[torch.Tensor]:
    """A block's keys as they were written, at the positions at which it was encoded: one tensor a layer."""
    return [rotate(model, keys, encoded.positions[block]) for keys in encoded.keys[block]]


# --------------------------------------------------------------------------- encoding


def encode(
    model: torch.nn.Module,
    blocks: Sequence[Sequence[int]],
    pattern: str = "sink+previous+self",
    sink_blocks: int = 1,
    previous_blocks: int = 2,
    positions: str = "sequential",
) -> EncodedBlocks:
    """Encode a pool block by block.

    Args:
        model: a ``transformers`` causal language model.
        blocks: token ids of every block, none empty.
        pattern, sink_blocks, previous_blocks: which blocks a block attends to (:func:`attended_blocks`).
        positions: ``"sequential"``: a token's position is its index in the whole pool. ``"local"``: the
            attended blocks and then the block itself lie contiguously from 0, keys rotated anew for that.
    """
    if positions not in POSITIONS:
        raise ValueError(f"unknown positions {positions!r}: expected one of {POSITIONS}")
    if any(len(b) == 0 for b in blocks):
        raise ValueError("a block has no tokens; every block must have at least one")
    offsets = [0]
    for b in blocks:
        offsets.append(offsets[-1] + len(b))
    done = EncodedBlocks([list(b) for b in blocks], [], [], [])
    for i, block in enumerate(blocks):
        seen = attended_blocks(i, pattern, sink_blocks, previous_blocks)
        before = sum(len(blocks[b]) for b in seen)
        if positions == "local":
            past_positions = torch.arange(before)
            own_positions = torch.arange(before, before + len(block))
        else:
            past_positions = torch.cat([torch.arange(offsets[b], offsets[b + 1]) for b in seen] or [torch.arange(0)])
            own_positions = torch.arange(offsets[i], offsets[i + 1])
        past = _past(model, done, whole_blocks(blocks, seen), past_positions)
        allowed = torch.ones(len(block), before + len(block), dtype=torch.bool).tril(before)
        with _capture(model) as (keys, values):
            _forward(model, block, own_positions, allowed, past)
        done.keys.append(list(keys))
        done.values.append(list(values))
        done.positions.append(own_positions)
    return done


def encode_in_one_forward(
    model: torch.nn.Module,
    blocks: Sequence[Sequence[int]],
    pattern: str = "sink+previous+self",
    sink_blocks: int = 1,
    previous_blocks: int = 2,
) -> EncodedBlocks:
    """Encode a pool with sequential positions by one dense forward under a block mask: the second route.

    Must equal ``encode(..., positions="sequential")``; it uses no cache and rotates nothing by itself.
    """
    owner = torch.tensor([i for i, b in enumerate(blocks) for _ in b])
    sees = torch.zeros(len(blocks), len(blocks), dtype=torch.bool)
    for i in range(len(blocks)):
        sees[i, [*attended_blocks(i, pattern, sink_blocks, previous_blocks), i]] = True
    allowed = sees[owner][:, owner] & torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    positions = torch.arange(len(owner))
    with _capture(model) as (keys, values):
        _forward(model, [t for b in blocks for t in b], positions, allowed)
    sizes = [len(b) for b in blocks]
    split_keys = [k.split(sizes, dim=1) for k in keys]
    split_values = [v.split(sizes, dim=1) for v in values]
    return EncodedBlocks(
        [list(b) for b in blocks],
        [[k[i] for k in split_keys] for i in range(len(blocks))],
        [[v[i] for v in split_values] for i in range(len(blocks))],
        list(positions.split(sizes)),
    )


# --------------------------------------------------------------------------- answering


def log_probs(
    model: torch.nn.Module,
    encoded: EncodedBlocks,
    pieces: Sequence[Piece],
    own_tokens: Sequence[int],
    *,
    own_offset: int = 0,
    rebase: bool = True,
) -> torch.Tensor:
    """Log-probabilities of every next token of a request, teacher-forced.

    Args:
        pieces: the selection in view order, disjoint runs of tokens inside blocks; may be empty (zero-shot).
        own_tokens: the request's own tokens behind the selection, all turns and answers one after the other.
        own_offset: a deliberate error in the own tokens' positions, for the oracle's self-check.
        rebase: False leaves the keys at the positions they were encoded at; the own tokens follow the last of these.
    Returns:
        [own tokens, vocabulary], the model's dtype; row t is the distribution of the token after own token t.
    """
    _check_pieces(encoded, pieces)
    before = sum(e - s for _, s, e in pieces)
    positions = torch.arange(before)
    if not rebase:
        positions = torch.cat([encoded.positions[b][s:e] for b, s, e in pieces])
    past = _past(model, encoded, pieces, positions)
    n = len(own_tokens)
    allowed = torch.ones(n, before + n, dtype=torch.bool).tril(before)
    first = before if rebase else int(positions.max()) + 1
    own_positions = torch.arange(first, first + n) + own_offset
    return torch.log_softmax(_forward(model, own_tokens, own_positions, allowed, past), dim=-1)


def answer_logprobs(
    model: torch.nn.Module,
    blocks: Sequence[Sequence[int]],
    selection: Sequence[Piece],
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    pattern: str = "sink+previous+self",
    sink_blocks: int = 1,
    previous_blocks: int = 2,
    positions: str = "sequential",
) -> list[torch.Tensor]:
    """Encode the pool and return the log-probabilities of given answers, teacher-forced.

    Args:
        turns: (own tokens, answer tokens) of every turn of a conversation over one selection.
    Returns:
        one float tensor [answer tokens] a turn.
    """
    encoded = encode(model, blocks, pattern, sink_blocks, previous_blocks, positions)
    own: list[int] = []
    places: list[tuple[int, int]] = []
    for question, answer in turns:
        own += list(question)
        places.append((len(own), len(own) + len(answer)))
        own += list(answer)
    table = log_probs(model, encoded, selection, own)
    return [table[start - 1 : end - 1].gather(1, torch.tensor(own[start:end])[:, None])[:, 0] for start, end in places]
