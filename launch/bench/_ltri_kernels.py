"""Rows of the kernels' half of ``sglang-ext bench ltri``."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from sglang_ext.attention.ltri_index import index_bytes
from sglang_ext.attention.ltri_layer import Voter
from sglang_ext.launch.bench import _ltri_layer as parts
from sglang_ext.launch.bench._cascade_layer import LayerShape
from sglang_ext.launch.bench._ltri_engine import SCORE, VOTING
from sglang_ext.launch.bench._ltri_layer import FIRST, LISTENS, VOTES, Layers
from sglang_ext.launch.bench._record import Figure, Timing, at_most
from sglang_ext.policies.ltri_options import Ltri

LAYERS = 32
"""Layers of the model that the rows speak of, of which as many vote as `VOTING` has."""
RENEWED = 8
FETCH, EXPOSED = 0.85, 0.10
"""Share of the copy bandwidth that a fetch is to reach; share of transfers that may hold up attention."""
SPANS_S, ELECTION_S, ELECTED = 20e-6, 15e-6, 4096
INDEX_MB = {"sum": 64.0, "max": 180.0, "mass": 180.0}


def measure(device: torch.device, settings: Ltri, tokens: int, shape: LayerShape | None = None) -> list[Figure]:
    """Time a chunk and its parts.

    Args:
        device: where.
        settings: of the method.
        tokens: of the stream, a multiple of the chunk.
        shape: of a layer; None for that of Llama-3.1-8B.

    Raises:
        ValueError: chunks that are replayed are not those that are launched, or a setting does not fit.
    """
    shape = LayerShape() if shape is None else shape
    settings = settings.of_one_head(shape.dim)
    figures: list[Figure] = []
    for vote in ("inclusive", "preceding"):
        layers = None  # its memory on the host, too
        gc.collect()
        changed = replace(settings, renewed=min(RENEWED, settings.retrieved), vote=vote)
        layers = Layers(changed, tokens, shape, device)
        layers.check()
        times = {(layer, new): layers.timed(layer, new) for layer in (FIRST, VOTES, LISTENS) for new in (True, False)}
        if vote == "inclusive":
            figures += [*_chunks(layers, times, vote), _fetch(layers, device)]
        figures.append(_exposed(times, parts.fetching(layers, changed.renewed)[0], changed))
    figures += _selection(device, settings, shape)
    return [*figures, *_index(settings, shape, tokens)]


def _chunks(layers: Layers, times: dict[tuple[int, bool], Timing], vote: str) -> list[Figure]:
    settings, found = layers.settings, []
    kinds = {FIRST: "that is the first to vote", VOTES: "that votes", LISTENS: "that does not vote"}
    for layer, what in kinds.items():
        name = (
            f"a chunk of {settings.chunk} tokens in a layer {what}, behind {layers.tokens} tokens,"
            f" {settings.renewed} of {settings.retrieved} blocks new"
        )
        found.append(Figure(name, times[layer, True], notes={"vote": vote}))
    return found


def _fetch(layers: Layers, device: torch.device) -> Figure:
    settings = layers.settings
    whole, block = parts.fetching(layers, settings.retrieved)
    pinned = parts.pinned_bandwidth(device)
    size = settings.retrieved * block
    floor, share = size / pinned, size / whole.median / pinned
    return Figure(
        f"fetch of {settings.retrieved} blocks of {block / 2**10:.0f} KiB, by numbers on the device",
        whole,
        "a copy of as many bytes out of pinned memory",
        None,
        share,
        f"at least {FETCH:.2f} of the copy's bandwidth",
        share >= FETCH,
        floor=floor,
        floor_of="a copy of as many bytes out of pinned memory",
        notes={"bytes": size, "pinned_bytes_per_second": pinned},
    )


def _exposed(times: dict[tuple[int, bool], Timing], back: Timing, settings: Ltri) -> Figure:
    """How much of the blocks' way from the host the layers of a model wait for."""
    renewed, vote = settings.renewed, settings.vote
    counts = {FIRST: 1, VOTES: len(VOTING) - 1, LISTENS: LAYERS - len(VOTING)}
    held = {layer: max(0.0, times[layer, True].median - times[layer, False].median) for layer in counts}
    share = sum(counts[layer] * held[layer] for layer in counts) / (LAYERS * back.median)
    return Figure(
        f"transfers that attention waits for, {renewed} of {settings.retrieved} blocks new, `{vote}` votes,"
        f" {len(VOTING)} of {LAYERS} layers vote",
        Timing(share, share, share, 1),
        aim=f"at most {EXPOSED:.2f}" if vote == "preceding" else "",
        met=share <= EXPOSED if vote == "preceding" else None,
        ratio=None,
        unit="share",
        notes={
            "waits_s": {"the first that votes": held[FIRST], "votes": held[VOTES], "does not": held[LISTENS]},
            "transfer_s": back.median,
        },
    )


def _selection(device: torch.device, settings: Ltri, shape: LayerShape) -> list[Figure]:
    tiles = settings.chunk // settings.block
    spans = parts.spans_of(tiles, settings, shape, device)
    found = [at_most(f"spans of {tiles} tiles of {shape.heads} heads", spans, SPANS_S, f"{SPANS_S * 1e6:.0f} us", 1.0)]
    elections = {
        f"by `{similarity}`": parts.election_of(ELECTED, with_similarity(settings, similarity), shape, device)
        for similarity in ("sum", "max", "mass")
    }
    if settings.tokens_ask:
        asking = f"for the {settings.most_askers} tokens that ask"
        elections[asking] = parts.election_of(ELECTED, settings, shape, device, tokens_ask=True)
    for how, election in elections.items():
        name = f"scores of {ELECTED} blocks {how}, and the best {settings.retrieved}"
        found.append(at_most(name, election, ELECTION_S, f"{ELECTION_S * 1e6:.0f} us", 1.0))
    return found


def with_similarity(settings: Ltri, similarity: str) -> Ltri:
    """The same settings with another similarity; `sum` packs nothing."""
    return replace(settings, similarity=similarity, four_bits=None if similarity == "sum" else settings.four_bits)


def _index(settings: Ltri, shape: LayerShape, tokens: int) -> list[Figure]:
    voters = {layer: Voter(SCORE, 0) for layer in VOTING}
    keys = torch.empty(1, shape.kv_heads, shape.dim, dtype=shape.dtype)
    found = []
    for similarity, most in INDEX_MB.items():
        size = index_bytes(with_similarity(settings, similarity), voters, settings.evicted(tokens), shape.heads, keys)
        name = f"index on the GPU of {tokens} tokens, `{similarity}`, {len(VOTING)} layers that vote"
        aim = f"at most {most:.0f} MB"
        found.append(Figure(name, Timing(size, size, size, 1), aim=aim, met=size <= most * 1e6, unit="MiB"))
    return found
