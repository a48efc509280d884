"""Cells against tokens written down one by one.

The definition here keeps every token's key unrotated, asks the rule (`ReferenceStream`) which tokens a head keeps, and
rotates each to its column by complex numbers, in float64. It knows no cells or lists. Slots that hold nothing are NaN.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.cascade_update import CascadeState, stride_update
from sglang_ext.kernels.cells import (
    Cells,
    CountedScores,
    DecodeWorkspace,
    NewTokens,
    Rotation,
    cuda_impl,
    decode_impl,
    dense_impl,
    dispatch,
    empty_lists,
    reference,
    triton_impl,
)
from sglang_ext.kernels.rope import Rope
from sglang_ext.policies.cascade import Cascade, ReferenceStream
from tests.kernels import on_host, sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = decode_impl.DecodeTuning(columns=16, warps=2, stages=1, programs=3, scores=8)
CASCADE = Cascade(window=12, cascades=3, sinks=2, stride=5, beta=0.9)


def rotated(x: torch.Tensor, position: int, rope: Rope) -> torch.Tensor:
    """x [..., dim] rotated at a position, in float64, by complex numbers."""
    half = rope.inv_freq.numel()
    spin = torch.polar(torch.ones(half, dtype=torch.float64), position * rope.inv_freq.cpu().double())
    out = x.double().clone()
    pairs = (slice(0, half), slice(half, 2 * half)) if rope.neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    z = torch.complex(out[..., pairs[0]], out[..., pairs[1]]) * spin
    out[..., pairs[0]], out[..., pairs[1]] = z.real, z.imag
    return out


@dataclass
class World:
    """Requests of one layer whose tokens went through the cascade, stride by stride, each at its own length."""

    cascade: Cascade
    rope: Rope
    state: CascadeState
    lists: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    raw: dict[int, tuple[torch.Tensor, torch.Tensor]]  # row -> every token's key and value, unrotated
    streams: dict[int, list[ReferenceStream]]  # row -> lane -> what it keeps at the last stride's end
    length: dict[int, int]

    @classmethod
    def make(
        cls,
        module: Any,
        lengths: dict[int, int],
        *,
        kv_heads: int = 2,
        dims: tuple[int, int, int] = (16, 16, 16),
        neox: bool = True,
        heads: str = "independent",
        dtype: torch.dtype = torch.float32,
    ) -> World:
        cascade = Cascade(**{**vars(CASCADE), "heads": heads})
        rng, gen = random.Random(3), torch.Generator().manual_seed(4)
        dim, value_dim, rotary = dims
        rope = Rope((1.7 ** -torch.arange(rotary // 2)).to(DEVICE), neox)
        lanes, entries = cascade.lanes(kv_heads), cascade.rings.entries
        state = CascadeState.empty(2, 4, lanes, cascade.rings, DEVICE)
        lists = empty_lists(state)
        slots = torch.randperm(4 * entries + 3, generator=gen)[: 4 * entries].view(4, entries).int().to(DEVICE)
        caches = [torch.full((4 * entries + 3, kv_heads, d), float("nan"), dtype=dtype) for d in (dim, value_dim)]
        world = cls(cascade, rope, state, lists, *(c.to(DEVICE) for c in caches), {}, {}, lengths)
        for row, length in lengths.items():
            raw = [torch.randn(length, kv_heads, d, generator=gen).to(dtype) for d in (dim, value_dim)]
            world.raw[row] = raw[0], raw[1]
            world.streams[row] = [ReferenceStream(cascade) for _ in range(lanes)]
            at = torch.tensor([row], device=DEVICE)
            for first in range(0, length, cascade.stride):
                added = torch.tensor([first], device=DEVICE)
                shown = cascade.rings.columns(added, added + cascade.stride, entries)
                module.list_columns(lists, state, at, shown, slots[row : row + 1], cascade.rings)
                kept, last = cascade.rings.kept(first), min(first + cascade.stride, length)
                new = range(first, last)
                key = torch.stack([rotated(raw[0][n], kept + n - first, rope) for n in new]).to(dtype).to(DEVICE)
                module.store(
                    key, raw[1][first:last].to(DEVICE), lists[1, row], Rotation.of(rope), kept, world.keys, world.values
                )
                if last % cascade.stride:
                    break
                for lane, stream in enumerate(world.streams[row]):
                    scores = [torch.tensor(rng.random()).item() for _ in range(kept + cascade.stride)]
                    state.score[:, row, lane, shown[0, : len(scores)].long()] = torch.tensor(scores, device=DEVICE)
                    for each, score in zip(stream.kept(), scores, strict=False):
                        each.score = score
                    stream.add(scores[kept:])
                stride_update(state, at, added, added * 0 + cascade.stride, cascade.rings)
        return world

    def tokens(self, row: int, lane: int) -> list[int]:
        """What a lane sees: kept tokens, then those of the open stride."""
        stream = self.streams[row][lane]
        return [k.token for k in stream.kept()] + list(range(stream.seen, self.length[row]))

    def seen(self, row: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys as they are seen and values, [columns, dim] float64."""
        tokens = self.tokens(row, head if self.cascade.heads == "independent" else 0)
        key, value = self.raw[row]
        return (
            torch.stack([rotated(key[n, head], column, self.rope) for column, n in enumerate(tokens)]),
            value[tokens, head].double(),
        )


HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16
SHAPES = [
    pytest.param({}, id="whole rotary"),
    pytest.param({"dims": (20, 12, 10), "neox": False, "kv_heads": 3}, id="partial, GPT-J"),
    pytest.param({"heads": "homogeneous"}, id="homogeneous"),
    pytest.param({"dtype": HALF}, id="half"),
]
# The open stride is at its beginning, in the middle and filling; the window is full, or is not.
LENGTHS = {3: 63, 0: 41, 2: 9}


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def test_columns_are_those_of_the_rings() -> None:
    for sinks, size, cascades, stride in ((2, 4, 3, 5), (0, 3, 2, 7), (1, 1, 4, 3), (9, 6, 1, 6)):
        rings = Cascade(window=cascades * size, cascades=cascades, sinks=sinks, stride=stride).rings
        added = torch.arange(0, 14 * rings.window, stride, device=DEVICE)
        for more in (0, stride // 2, stride):
            found = triton_impl.columns(rings, added, added + more, rings.entries + 3)
            assert torch.equal(found, rings.columns(added, added + more, rings.entries + 3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("module", [reference, triton_impl], ids=["reference", "triton"])
def test_a_gathered_window_is_what_the_rule_keeps(module: Any, shape: dict[str, Any]) -> None:
    world = World.make(module, LENGTHS, **shape)
    rotation, kv_heads = Rotation.of(world.rope), world.keys.shape[1]
    for row in LENGTHS:
        columns = len(world.tokens(row, 0))
        out = [
            torch.full((columns + 2, *c.shape[1:]), 7.0, dtype=c.dtype, device=DEVICE)
            for c in (world.keys, world.values)
        ]
        module.gather(world.keys, world.values, world.lists[1, row], rotation, columns, *out)
        for head in range(kv_heads):
            key, value = world.seen(row, head)
            assert (out[0][:columns, head].cpu().double() - key).abs().max() <= tolerance(world.keys.dtype)
            assert torch.equal(out[1][:columns, head].cpu().double(), value)
        assert bool((out[0][columns:] == 7).all() and (out[1][columns:] == 7).all())


@pytest.mark.parametrize("module", [reference, triton_impl], ids=["reference", "triton"])
def test_store_writes_behind_the_window_too_and_nowhere_else(module: Any) -> None:
    world = World.make(reference, LENGTHS)
    slot, entries = world.lists[1, 3], world.cascade.rings.entries
    new = [torch.randn(3, *c.shape[1:], device=DEVICE) for c in (world.keys, world.values)]
    before = [c.clone() for c in (world.keys, world.values)]
    window = [torch.zeros(entries, *c.shape[1:], device=DEVICE) for c in (world.keys, world.values)]
    fused = torch.cat([new[0].flatten(1), new[1].flatten(1)], dim=1)  # rows as a fused projection leaves them
    split = [t.unflatten(1, (2, -1)) for t in fused.chunk(2, dim=1)]
    module.store(*split, slot, Rotation.of(world.rope), 14, world.keys, world.values, *window)
    back = torch.stack([rotated(new[0][n].cpu(), -14 - n, world.rope) for n in range(3)]).float().to(DEVICE)
    stored = back, new[1]
    for cache, old, kept, fresh, behind in zip((world.keys, world.values), before, stored, new, window, strict=True):
        for head in range(2):
            at = slot[head, 14:17].long()
            assert (cache[at, head] - kept[:, head]).abs().max() <= tolerance(torch.float32)
            cache[at, head] = old[at, head]
        assert torch.equal(cache.nan_to_num(7), old.nan_to_num(7))
        assert torch.equal(behind[14:17], fresh) and not behind[:14].any() and not behind[17:].any()


@pytest.mark.parametrize("attend", [reference.attend, dense_impl.attend], ids=["reference", "dense"])
def test_attend(attend: Any) -> None:
    flash = attend is dense_impl.attend
    if flash and DEVICE == "cpu":
        pytest.skip("dense kernels need a GPU")
    dtype, dim, rows = (torch.bfloat16, 128, 40) if flash else (torch.float32, 8, 600)
    gen = torch.Generator().manual_seed(1)
    query = torch.randn(rows, 4, dim, generator=gen).to(dtype).to(DEVICE)
    keys, values = (torch.randn(rows + 50, 2, dim, generator=gen).to(dtype).to(DEVICE) for _ in range(2))
    out, lse = attend(query, keys, values, 0.2)
    for t in (0, 1, rows // 2, rows - 1):
        for head in range(4):
            seen = slice(0, 50 + t + 1)
            logits = keys[seen, head // 2].double() @ query[t, head].double() * 0.2
            wanted = logits.softmax(0) @ values[seen, head // 2].double()
            assert (out[t, head].double() - wanted).abs().max() <= (2e-2 if flash else 1e-5)
            assert abs(lse[t, head].item() - logits.logsumexp(0).item()) <= 1e-3
    with pytest.raises(ValueError, match="at least as many columns"):
        reference.attend(query, keys[:5], values[:5], 0.2)


IMPLEMENTATIONS = [
    pytest.param(reference.decode, {}, id="reference"),
    pytest.param(decode_impl.decode, {"tuning": SMALL}, id="triton, small tiles"),
    pytest.param(decode_impl.decode, {}, id="triton"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "max", None])
@pytest.mark.parametrize("decode, more", IMPLEMENTATIONS)
def test_decode(decode: Any, more: dict[str, Any], reduction: str | None, shape: dict[str, Any]) -> None:
    check_decode(decode, more, reduction, shape)


NO_CUDA = (
    "there is no GPU"
    if DEVICE == "cpu"
    else cuda_impl.refusal(torch.device(DEVICE), HALF, 128, 128, 1, Rotation.of(Rope(torch.ones(64))))
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for every call of CUDA's `decode`: Triton's would give the right answers too."""
    calls: list[int] = []
    real = cuda_impl.decode
    monkeypatch.setattr(cuda_impl, "decode", lambda *given, **more: (calls.append(1), real(*given, **more))[1])
    return calls


@pytest.mark.skipif(NO_CUDA is not None, reason=str(NO_CUDA))
@pytest.mark.parametrize("heads", ["independent", "homogeneous"])
@pytest.mark.parametrize("dtype", cuda_impl.DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "max", None])
@pytest.mark.parametrize("group, kv_heads", [(1, 3), (3, 1), (4, 2), (8, 2)])
@pytest.mark.parametrize("dim", cuda_impl.DIMS)
def test_decode_in_cuda(
    dim: int, group: int, kv_heads: int, reduction: str | None, dtype: torch.dtype, heads: str,
    launched: list[int],
) -> None:  # fmt: skip
    shape = {"dims": (dim, dim, dim), "kv_heads": kv_heads, "dtype": dtype, "heads": heads}
    check_decode(dispatch.decode, {}, reduction, shape, group)
    assert launched


def random_cells(batch: int, columns: int, kv_heads: int, heads: int, dim: int, lanes: int) -> dict[str, Any]:
    """Rows of random cells in bfloat16 or float16: what `decode` takes, scores from 0."""
    gen = torch.Generator().manual_seed(8)
    draw = lambda *size: torch.randn(*size, generator=gen).to(HALF).to(DEVICE)  # noqa: E731
    slot = torch.stack([torch.randperm(batch * columns, generator=gen) for _ in range(lanes)]).view(lanes, batch, -1)
    entries = torch.stack([torch.randperm(columns, generator=gen) for _ in range(batch)]).int().to(DEVICE)
    tokens = draw(batch, heads, dim), draw(batch, kv_heads, dim), draw(batch, kv_heads, dim)
    caches = draw(batch * columns + 5, kv_heads, dim), draw(batch * columns + 5, kv_heads, dim)
    rotation = Rotation.of(Rope((1e4 ** -torch.arange(0, 1, 2 / dim)).to(DEVICE)))
    return {
        "tokens": NewTokens(*tokens),
        "cells": Cells(*caches, slot.transpose(0, 1).int().contiguous().to(DEVICE)),
        "rotation": rotation,
        "score": torch.zeros(batch, lanes, columns, device=DEVICE),
        "entries": entries,
    }


def check_shares(decode: Any, shares: int, lanes: int, reduction: str | None, dim: int, columns: int) -> None:
    """Many chunks a warp, some without any, in as many shares as one likes; a row that is not counted."""
    kv_heads, heads, batch, device = 2, 8, 3, torch.device(DEVICE)
    drawn = random_cells(batch, columns, kv_heads, heads, dim, lanes)
    tokens, cells = drawn["tokens"], drawn["cells"]
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=DEVICE)  # noqa: E731
    where = ints(2, 0, 1), ints(columns, 17, columns * 5 // 8), drawn["rotation"], 0.1
    workspace = DecodeWorkspace.empty(
        batch, heads, kv_heads, dim, columns, shares, device, scores=reduction is not None
    )

    def scores() -> CountedScores | None:
        if reduction is None:
            return None
        return CountedScores(drawn["score"].clone(), drawn["entries"], ints(7, 17, 0), ints(1, 1, 0), 0.5, reduction)

    expected = scores()
    copied = Cells(cells.keys.clone(), cells.values.clone(), cells.slot.clone())
    wanted = reference.decode(tokens, copied, *where, scores=expected)
    for _ in range(2):
        for tensor in (workspace.parts, workspace.part_lse, workspace.logits, workspace.tops):
            tensor.fill_(float("nan"))
        kept = scores()
        got = decode(tokens, cells, *where, scores=kept, workspace=workspace)
        assert (got - wanted).abs().max() <= 2e-2 * wanted.abs().max()
        assert not workspace.arrived.any()
        if expected is not None and kept is not None:
            assert (kept.score - expected.score).abs().max() <= 2e-2 * expected.score.max() > 0
            assert expected.score[2].any() and not expected.score[1].any()


SHARES = [(1, 2, "mean"), (3, 2, "max"), (3, 1, "mean"), (5, 1, "max"), (4, 2, None)]


@on_host.needed
@pytest.mark.skipif(DEVICE == "cuda", reason="on the GPU itself there")
@pytest.mark.parametrize("shares, lanes, reduction", SHARES)
@pytest.mark.parametrize("dim", cuda_impl.DIMS)
@pytest.mark.usefixtures("cuda_on_host")
def test_shares_on_host(dim: int, shares: int, lanes: int, reduction: str | None) -> None:
    check_shares(cuda_impl.decode, shares, lanes, reduction, dim, 331)


@on_host.needed
@pytest.mark.skipif(DEVICE == "cuda", reason="on the GPU itself there")
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.usefixtures("cuda_on_host")
def test_launches_of_some_rows_on_host(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, then one; and a row that no launch has room for."""
    monkeypatch.setattr(nvrtc, "multiprocessors", lambda _: 2)
    assert cuda_impl.rows_at_once(3, 2, lanes, 3, 2) == 2
    check_shares(cuda_impl.decode, 3, lanes, "mean", 64, 331)
    with pytest.raises(ValueError, match="7 shares of a row do not run at once"):
        check_shares(cuda_impl.decode, 7, lanes, "mean", 64, 331)


@pytest.mark.parametrize("kv_heads, lanes", [(8, 8), (8, 1), (1, 1), (5, 5)])
def test_shares_fill_the_device(kv_heads: int, lanes: int) -> None:
    """Blocks that wait run at once, and no batch that is large enough leaves a third of the device idle."""
    processors, tuning = 132, cuda_impl.TUNING
    for batch in range(1, 300):
        shares = cuda_impl.splits(batch, kv_heads, 20_000, processors)
        rows = cuda_impl.rows_at_once(batch, kv_heads, lanes, shares, processors)
        blocks = rows * kv_heads * shares
        places = processors * tuning.blocks
        assert rows >= 1 and (blocks <= places or (shares == 1 and lanes == kv_heads))
        turns = -(-blocks // places)
        assert blocks > 2 / 3 * turns * places or shares == cuda_impl.MAX_SPLITS


@on_host.needed
@pytest.mark.skipif(DEVICE == "cuda", reason="on the GPU itself there")
@pytest.mark.usefixtures("cuda_on_host")
def test_columns_of_several_turns_on_host() -> None:
    """More columns than a block counts at a time, and than twice that."""
    check_shares(cuda_impl.decode, 1, 2, "mean", 64, 1100)


@on_host.needed
@pytest.mark.skipif(DEVICE == "cuda", reason="on the GPU itself there")
@pytest.mark.parametrize(
    "group, kv_heads, heads",
    [(1, 3, "homogeneous"), (2, 1, "independent"), (3, 2, "independent"), (6, 2, "independent"), (8, 1, "independent")],
)
@pytest.mark.usefixtures("cuda_on_host")
def test_decode_on_host(group: int, kv_heads: int, heads: str) -> None:
    shape = {"dims": (64, 64, 64), "kv_heads": kv_heads, "dtype": HALF, "heads": heads}
    check_decode(cuda_impl.decode, {}, "mean", shape, group)


@pytest.fixture
def cuda_on_host() -> Iterator[None]:
    with on_host.cuda(cuda_impl):
        yield


@pytest.mark.skipif(NO_CUDA is not None, reason=str(NO_CUDA))
@pytest.mark.parametrize("shares, lanes, reduction", [*SHARES, (40, 2, "mean"), (40, 1, "mean"), (100, 2, "mean")])
@pytest.mark.parametrize("dim", cuda_impl.DIMS)
def test_shares_in_cuda(dim: int, shares: int, lanes: int, reduction: str | None) -> None:
    check_shares(cuda_impl.decode, shares, lanes, reduction, dim, 5003)


@pytest.mark.skipif(NO_CUDA is not None, reason=str(NO_CUDA))
@pytest.mark.parametrize("lanes", [1, 8])
def test_more_rows_than_run_at_once(lanes: int, launched: list[int]) -> None:
    """Blocks of a row then wait for none, or, where heads share their scores, there are several launches."""
    batch, kv_heads, dim, columns = 150, 8, 64, 40
    gen = torch.Generator(DEVICE).manual_seed(2)
    draw = lambda *size: torch.randn(*size, generator=gen, device=DEVICE).to(torch.bfloat16)  # noqa: E731
    caches = [draw(batch * columns, kv_heads, dim) for _ in range(2)]
    slot = torch.randperm(batch * columns, generator=gen, device=DEVICE).view(batch, 1, columns).int()
    rotation = Rotation.of(Rope((1e4 ** -torch.arange(0, 1, 1 / 32)).to(DEVICE)))
    ints = lambda value: torch.full((batch,), value, dtype=torch.int32, device=DEVICE)  # noqa: E731
    entries = torch.arange(columns, dtype=torch.int32, device=DEVICE).expand(batch, -1).contiguous()
    rows, score = torch.arange(batch, device=DEVICE), torch.zeros(batch, lanes, columns, device=DEVICE)
    tokens = NewTokens(draw(batch, 16, dim), draw(batch, kv_heads, dim), draw(batch, kv_heads, dim))
    slot = slot.expand(-1, lanes, -1).contiguous()
    scores, outs = [score.clone(), score.clone()], []
    for decode, kept in zip((reference.decode, dispatch.decode), scores, strict=True):
        cells = Cells(*(c.clone() for c in caches), slot)
        counted = CountedScores(kept, entries, ints(3), ints(1), 0.5)
        outs.append(decode(tokens, cells, rows, ints(columns), rotation, 0.1, scores=counted))
    assert (outs[0] - outs[1]).abs().max() <= 2e-2 * outs[0].abs().max()
    assert (scores[0] - scores[1]).abs().max() <= 2e-2 * scores[0].max() > 0
    assert launched


@pytest.mark.parametrize(
    "dim, group, lanes, scores", [(128, 4, 8, True), (128, 8, 1, False), (64, 3, 8, True), (64, 1, 8, True)]
)
@pytest.mark.parametrize("bfloat16", [True, False])
def test_cuda_compiles_for_hopper(
    dim: int, group: int, lanes: int, scores: bool, bfloat16: bool, tmp_path: Path
) -> None:
    variant = cuda_impl.Variant(dim, group, 8, lanes, scores, dim == 64, bfloat16)
    sm90.check_copies(cuda_impl.compiled(nvrtc.HOPPER, variant).code, tmp_path)


def test_where_cuda_is_refused() -> None:
    rotation = Rotation.of(Rope(torch.ones(64)))
    given = (torch.device("cuda"), torch.bfloat16, 128, 128, 4, rotation)
    for at, value, reason in (
        (0, torch.device("cpu"), "device cpu"), (1, torch.float32, "16 bits only"), (2, 96, "heads of 96"),
        (3, 64, "heads of 128 and 64"), (4, 9, "groups of 9"), (5, Rotation.of(Rope(torch.ones(32))), "64 of 128"),
        (5, Rotation.of(Rope(torch.ones(64), False)), "neox=False"),
    ):  # fmt: skip
        assert reason in (cuda_impl.refusal(*given[:at], value, *given[at + 1 :]) or "")


def check_decode(
    decode: Any, more: dict[str, Any], reduction: str | None, shape: dict[str, Any], group: int = 3
) -> None:
    """The last token of each request is new; one request was counted before, one row is padding."""
    world = World.make(reference, LENGTHS, **shape)
    rings, kv_heads = world.cascade.rings, world.keys.shape[1]
    dtype, dim = world.keys.dtype, world.keys.shape[2]
    gen = torch.Generator().manual_seed(9)
    rows = [2, 3, 1, 0]
    query = torch.randn(4, kv_heads * group, dim, generator=gen).to(dtype)
    seen = [0 if row == 1 else len(world.tokens(row, 0)) for row in rows]
    new = [torch.zeros(4, *c.shape[1:], dtype=dtype) for c in (world.keys, world.values)]
    for b, row in enumerate(rows):
        for head in range(kv_heads if row != 1 else 0):
            key, value = world.seen(row, head)
            new[0][b, head], new[1][b, head] = key[-1].to(dtype), value[-1].to(dtype)
            at = world.lists[1, row, head if world.cascade.heads == "independent" else 0, seen[b] - 1]
            world.keys[at, head] = world.values[at, head] = float("nan")
    added = torch.tensor([0 if row == 1 else world.streams[row][0].seen for row in rows])
    entries = rings.columns(added, added + rings.stride, rings.entries).clamp(min=0)
    skip = [rings.settled(int(n)) for n in added]
    fresh = [1, 1, 1, 0]
    world.state.score.copy_(torch.rand(world.state.score.shape, generator=gen))
    score = world.state.score[1]
    before = score.cpu().clone()
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=DEVICE)  # noqa: E731
    scores = None
    if reduction is not None:
        scores = CountedScores(score, entries.to(DEVICE), ints(skip), ints(fresh), 0.9, reduction)
    out = decode(
        NewTokens(query.to(DEVICE), *(t.to(DEVICE) for t in new)), Cells(world.keys, world.values, world.lists[1]),
        ints(rows), ints(seen), Rotation.of(world.rope), 0.4, scores=scores, **more,
    )  # fmt: skip
    wanted = before.double().clone()
    for b, row in enumerate(rows):
        if row == 1:
            assert not out[b].any()
            continue
        received: dict[int, list[torch.Tensor]] = {}
        for head in range(kv_heads):
            key, value = world.seen(row, head)
            for g in range(group):
                weights = (key @ query[b, head * group + g].double() * 0.4).softmax(0)
                found = out[b, head * group + g].cpu().double()
                assert (found - weights @ value).abs().max() <= 2 * tolerance(dtype)
                received.setdefault(head if score.shape[1] > 1 else 0, []).append(weights)
            slot = world.lists[1, row, head if score.shape[1] > 1 else 0, seen[b] - 1]
            raw = world.raw[row][0][-1, head].double()
            assert (world.keys[slot, head].cpu().double() - raw).abs().max() <= tolerance(dtype)
            assert torch.equal(world.values[slot, head].cpu(), new[1][b, head])
        for lane, weights in received.items():
            if not fresh[b] or reduction is None:
                continue
            stacked = torch.stack(weights)
            one = stacked.mean(0) if reduction == "mean" else stacked.amax(0)
            at = entries[b, skip[b] : seen[b]].long()
            wanted[row, lane, at] = 0.9 * wanted[row, lane, at] + 0.1 * one[skip[b] :]
    assert (score.cpu().double() - wanted).abs().max() <= tolerance(dtype) / 4
    assert torch.equal(score.cpu()[wanted == before.double()], before[wanted == before.double()])
    if reduction is not None:
        assert (wanted != before.double()).any(-1).any(-1).tolist() == [False, False, True, True]


def test_settled_scores_decide_nothing() -> None:
    """Garbage in the scores that `Rings.settled` names changes no kept token; the next column's would."""
    gen, differs = torch.Generator().manual_seed(6), False
    for cascades, size, sinks, stride in ((3, 4, 2, 5), (2, 3, 0, 7), (4, 1, 1, 3), (4, 6, 3, 6), (3, 5, 0, 1)):
        rings = Cascade(window=cascades * size, cascades=cascades, sinks=sinks, stride=stride).rings
        states = [CascadeState.empty(1, 1, 3, rings, "cpu") for _ in range(3)]
        row = torch.zeros(1, dtype=torch.long)
        for added in range(0, sinks + 12 * rings.window, stride):
            seen = torch.tensor([added])
            columns = rings.columns(seen, seen + stride, rings.entries)[0]
            scores = torch.rand(3, rings.kept(added) + stride, generator=gen)
            garbage = torch.rand(3, rings.settled(added) + 1, generator=gen) * 2 - 0.5
            for number, state in enumerate(states):
                state.score[0, 0][:, columns[: scores.shape[1]].long()] = scores
                if number:
                    spoiled = columns[: garbage.shape[1] - (number == 1)].long()
                    state.score[0, 0][:, spoiled] = garbage[:, : spoiled.numel()]
                stride_update(state, row, seen, seen * 0 + stride, rings)
            assert torch.equal(states[0].token, states[1].token) and torch.equal(states[0].cell, states[1].cell)
            differs |= not torch.equal(states[0].token, states[2].token)
    assert differs


def test_phases_wrap_where_angles_do() -> None:
    rope = Rope(torch.tensor([1.0, 0.3, 1e-3, 5e-7, 4.0]))
    rotation = Rotation.of(rope)
    position = torch.tensor([0, 1, -1, 20_000, -(2**18), 2**18], dtype=torch.int32)
    angle = (position[:, None] * rotation.phase).double() * (2 * torch.pi / 2**32)
    exact = position.double()[:, None] * rope.inv_freq.double()
    assert ((angle - exact + torch.pi) % (2 * torch.pi) - torch.pi).abs().max() < 2e-4
    assert angle.abs().max() <= torch.pi


def test_bad_input_is_refused() -> None:
    world = World.make(reference, {0: 7})
    slot, rotation = world.lists[1], Rotation.of(world.rope)
    one = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    token = torch.zeros(1, 2, 16, device=DEVICE)
    shown = Cells(world.keys, world.values, slot)
    arguments = shown, one, one, rotation, 1.0
    for decode in (reference.decode, decode_impl.decode):
        with pytest.raises(ValueError, match="expected \\[batch, heads, 16\\] with a multiple of 2"):
            decode(NewTokens(token[:, :1], token, token), *arguments)
        with pytest.raises(ValueError, match=r"rows is torch\.float32"):
            decode(NewTokens(token, token, token), shown, one.float(), *arguments[2:])
        with pytest.raises(ValueError, match="new keys"):
            decode(NewTokens(token, token[..., :8], token), *arguments)
    with pytest.raises(ValueError, match="expected one type"):
        decode_impl.decode(NewTokens(token.half(), token, token), *arguments)
    for number in (0, 1):
        with pytest.raises(ValueError, match=r"new (keys|values) are torch\.float16, the caches torch\.float32"):
            other = [token.half() if number == n else token for n in (0, 1)]
            decode_impl.decode(NewTokens(token, *other), *arguments)
    with pytest.raises(ValueError, match=r"DecodeWorkspace\.empty"):
        small = DecodeWorkspace.empty(1, 2, 2, 16, 3, 1, token.device, True)
        scores = CountedScores(world.state.score[1], one, one, one, 0.0)
        decode_impl.decode(NewTokens(token, token, token), *arguments, scores=scores, workspace=small)
    for module in (reference, triton_impl):
        for window in ((token, None), (None, token)):
            with pytest.raises(ValueError, match="one of out_keys and out_values: expected both"):
                module.store(token, token, slot[0], rotation, 0, world.keys, world.values, *window)
        with pytest.raises(ValueError, match=r"expected int32 \[\.\.\., lanes, entries\]"):
            module.gather(world.keys, world.values, slot[0].long(), rotation, 3, token, token)
        with pytest.raises(ValueError, match="expected 2, one a key-value head, or 1"):
            three = slot[0].expand(3, 2, -1)[:, 0]
            module.gather(world.keys, world.values, three, rotation, 3, token, token)
        with pytest.raises(ValueError, match=r"from Rings\.columns with the whole open stride"):
            module.list_columns(world.lists, world.state, one, one[None], one[None], world.cascade.rings)
    with pytest.raises(ValueError, match="expected \\[at least 3, 2, 16\\]"):
        triton_impl.gather(world.keys, world.values, slot[0], rotation, 3, token, token)
    with pytest.raises(ValueError, match="the heads of a row one after the other"):
        triton_impl.store(token.transpose(0, 1), token, slot[0], rotation, 0, world.keys, world.values)
