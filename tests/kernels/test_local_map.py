"""A chunk's map against attention written down row by row in float64.

The definition here builds each row's attention by its own softmax over what the row sees, with explicit distances, and
knows no log-sum-exp. Whatever must not be read is NaN: rows and columns that do not count, queries and keys rotated for
distances at which nobody sees them, and the tensors that are to be written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sglang_ext.kernels import local_map
from sglang_ext.kernels.local_map import BlockTiles, LocalMap, Received, dispatch, reference
from sglang_ext.kernels.local_map import triton_impl as triton
from tests.kernels import sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies the bits of bfloat16 as integers.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# Beside the largest sum. Half precision: the inputs are the same numbers in both, products are added in float32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, HALF: 3e-6}
SCALE = 0.3
NAN = float("nan")
SMALL = triton.MapTuning(columns=16, rows=16, warps=2, stages=1, splits=4)
WIDE = triton.MapTuning(columns=32, rows=16, warps=2, stages=1, splits=2)
PIECES = triton.TileTuning(piece=16, warps=1)
IMPLEMENTATIONS = [
    pytest.param(reference, torch.float64, id="reference-float64"),
    pytest.param(reference, torch.float32, id="reference-float32"),
    pytest.param(triton, torch.float32, id="triton-float32"),
    pytest.param(triton, HALF, id="triton-half"),
]
MODULES = [pytest.param(reference, id="reference"), pytest.param(triton, id="triton")]


def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@dataclass(frozen=True)
class Sizes:
    """Of a batch of chunks: `before` and `count` of each request."""

    before: tuple[int, ...] = (37, 0, 70, 20, 60)
    count: tuple[int, ...] = (13, 21, 0, 1, 10)
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 24
    window: int = 40


class Case:
    """Random chunks, the attention of each, and what follows from it."""

    def __init__(self, dtype: torch.dtype, sizes: Sizes, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch, heads, window = len(sizes.before), sizes.heads, sizes.window
        rows = max(sizes.count) + 2
        columns = max(map(sum, zip(sizes.before, sizes.count, strict=True))) + 5
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
        queries = [draw(batch, rows, heads, sizes.head_dim) for _ in range(2)]
        keys = [draw(batch, sizes.kv_heads, columns, sizes.head_dim) for _ in range(2)]
        lse = torch.full((batch, rows, heads), NAN, dtype=torch.promote_types(dtype, torch.float32))
        self.sizes, self.attention = sizes, []
        for b, (before, count) in enumerate(zip(sizes.before, sizes.count, strict=True)):
            end = before + count
            found = torch.zeros(count, heads, end, dtype=torch.float64)
            for t, h in itertools.product(range(count), range(heads)):
                kv_head = h // (heads // sizes.kv_heads)
                distances = torch.tensor([before + t - column for column in range(before + t + 1)])
                far = (distances >= window).unsqueeze(1)
                query = torch.where(far, queries[1][b, t, h], queries[0][b, t, h]).double()
                key = torch.where(far, *(k[b, kv_head, : before + t + 1] for k in reversed(keys))).double()
                logits = SCALE * (query * key).sum(1)
                found[t, h, : before + t + 1] = logits.softmax(0)
                lse[b, t, h] = logits.logsumexp(0)
            self.attention.append(found)
            queries[0][b, count:] = keys[0][b, :, end:] = NAN
            queries[1][b, count:] = queries[1][b, : max(0, window - before)] = NAN
            keys[0][b, :, : max(0, before - window + 1)] = NAN
            keys[1][b, :, max(0, end - window) :] = NAN
        device = [each.to(DEVICE) for each in (*queries, *keys, lse)]
        self.chunks = LocalMap(*device, ints(sizes.before), ints(sizes.count), window, SCALE)

    def poisoned(self) -> Received:
        """Tensors to write to, all NaN."""
        out = Received.empty(self.chunks)
        for tensor in (out.received, out.last, out.chunk_received):
            tensor.fill_(NAN)
        return out

    def check(self, found: Received) -> None:
        """Compare with the sums of the attention."""
        received, last, own = (
            torch.zeros(each.shape, dtype=torch.float64) for each in (found.received, found.last, found.chunk_received)
        )
        for b, (before, attention) in enumerate(zip(self.sizes.before, self.attention, strict=True)):
            for t, given in enumerate(attention):
                (last if t == len(attention) - 1 else received)[b, : given.shape[1]] += given.sum(0)
                own[b, : len(attention)] += given[:, before:].sum(0)
        tolerance = TOLERANCE[self.chunks.query_near.dtype] * max(float(received.max()), 1.0)
        for got, want in ((found.received, received), (found.last, last), (found.chunk_received, own)):
            assert got.dtype == self.chunks.lse.dtype and got.shape == want.shape
            assert (got.cpu().double() - want).abs().max() <= tolerance
            assert torch.equal(got.cpu() == 0, want == 0)

    def tiles(self, firsts: Sequence[Sequence[int]], places: Sequence[Sequence[int]], block: int) -> BlockTiles:
        """Tiles of NaN, two more than there are places."""
        shape = (max(map(max, places)) + 3, self.sizes.heads, block, block)
        tiles = torch.full(shape, NAN, dtype=self.chunks.lse.dtype, device=DEVICE)
        return BlockTiles(tiles, ints(firsts), ints(places))

    def check_tiles(self, blocks: BlockTiles) -> int:
        """Compare with the attention, entry by entry; the number of rows that were written."""
        block, written = blocks.tiles.shape[3], 0
        want = torch.full(blocks.tiles.shape, NAN, dtype=torch.float64)
        for b, (before, attention) in enumerate(zip(self.sizes.before, self.attention, strict=True)):
            for first, place in zip(blocks.first[b].tolist(), blocks.place[b].tolist(), strict=True):
                for row in range(block):
                    t = first + row - before
                    if place < 0 or not 0 <= t < len(attention):
                        continue
                    want[place, :, row] = 0
                    written += 1
                    for column in range(max(0, -first), row + 1):
                        want[place, :, row, column] = attention[t, :, first + column]
        got = blocks.tiles.cpu().double()
        assert torch.equal(got.isnan(), want.isnan())
        assert (got - want).nan_to_num().abs().max() <= TOLERANCE[self.chunks.query_near.dtype]
        assert torch.equal(got == 0, want == 0)
        return written


# ---- what tokens received ----


@pytest.mark.parametrize("window", [1, 16, 40, 61, 1000])
@pytest.mark.parametrize("module, dtype", IMPLEMENTATIONS)
def test_received(module: ModuleType, dtype: torch.dtype, window: int) -> None:
    """Windows shorter than a tile, than the columns, and longer; no rows, one row, and a chunk without columns before.

    With 61, the last request's first column is at distance window - 1 of its first row, and at window of the second.
    """
    case = Case(dtype, Sizes(window=window))
    out = case.poisoned()
    more = {"tuning": WIDE} if module is triton else {}
    assert module.received(case.chunks, out=out, **more) is out
    case.check(out)


@pytest.mark.parametrize("tuning", [SMALL, replace(WIDE, splits=1), None], ids=["small", "wide", "chosen"])
def test_tiles_of_rows_of_every_kind(tuning: triton.MapTuning | None) -> None:
    """Masked by the diagonal, all near, on the edge of the window, all far; and the sizes that are chosen."""
    case = Case(torch.float32, Sizes((50,), (70,), 4, 2, 16, 40), seed=1)
    case.check(triton.received(case.chunks, tuning=tuning))
    if tuning is None:
        case.check(triton.received(case.chunks, tuning=triton.PREFILL))


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes((5,), (1,), 4, 4, 16, 3),
        Sizes((0, 90), (33, 1), 7, 1, 8, 20),
        Sizes((64,), (64,), 2, 2, 40, 64),
        Sizes((0, 0), (0, 0), 2, 1, 8, 4),
        Sizes((31, 80, 0), (1, 1, 1), 10, 2, 16, 32),
    ],
    ids=str,
)
@pytest.mark.parametrize("module", MODULES)
def test_other_sizes(module: ModuleType, sizes: Sizes) -> None:
    """One head a key-value head, all heads of one, odd sizes, nothing to do, and steps of single rows."""
    case = Case(torch.float32, sizes, seed=2)
    case.check(module.received(case.chunks))


@pytest.mark.parametrize("module", MODULES)
def test_no_requests_rows_or_columns(module: ModuleType) -> None:
    whole = Case(torch.float32, Sizes()).chunks
    nobody = LocalMap(*(each[:0] for each in _tensors(whole)), whole.window, SCALE)
    assert module.received(nobody).received.shape == (0, whole.keys_near.shape[2])
    nothing = torch.zeros_like(whole.count)
    rowless = replace(
        whole, query_near=whole.query_near[:, :0], query_far=whole.query_far[:, :0], lse=whole.lse[:, :0], count=nothing
    )
    columnless = replace(
        whole, keys_near=whole.keys_near[:, :, :0], keys_far=whole.keys_far[:, :, :0], before=nothing, count=nothing
    )
    for chunks in (rowless, columnless):
        found = module.received(chunks)
        assert not found.received.any() and not found.last.any() and not found.chunk_received.any()
        tiles = torch.full((3, 6, 4, 4), NAN, device=DEVICE)
        module.fill_tiles(chunks, BlockTiles(tiles, ints([[37]] * 5), ints([[0], [-1], [1], [-1], [-1]])))
        assert bool(tiles.isnan().all())


def _tensors(chunks: LocalMap) -> list[torch.Tensor]:
    """All tensors of chunks, in the order of the attributes."""
    return [
        chunks.query_near, chunks.query_far, chunks.keys_near, chunks.keys_far, chunks.lse, chunks.before, chunks.count
    ]  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_inputs_may_be_views(module: ModuleType) -> None:
    """Keys with the heads behind the columns, every second row of queries, parts of wider tensors."""
    case = Case(torch.float32, Sizes(window=30), seed=3)
    chunks = case.chunks
    wide = [torch.nn.functional.pad(each, (8, 8), value=NAN)[..., 8:-8] for each in _tensors(chunks)[:2]]
    keys = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (chunks.keys_near, chunks.keys_far)]
    lse = chunks.lse.transpose(1, 2).contiguous().transpose(1, 2)
    rows = torch.full_like(wide[1], NAN).repeat_interleave(2, 1)
    rows[:, ::2] = wide[1]
    views = LocalMap(wide[0], rows[:, ::2], *keys, lse, chunks.before, chunks.count, chunks.window, SCALE)
    assert not any(each.is_contiguous() for each in _tensors(views)[:5])
    case.check(module.received(views))
    blocks = case.tiles([[32], [0], [0], [16], [64]], [[3], [0], [-1], [1], [2]], 16)
    module.fill_tiles(views, blocks)
    assert case.check_tiles(blocks) == 11 + 16 + 1 + 6


@pytest.mark.parametrize("module", MODULES)
def test_without_a_far_side_it_is_not_read(module: ModuleType) -> None:
    """Tokens at their true distances: what is near stands for what is far."""
    case = Case(torch.float32, Sizes((37, 60), (13, 1), 2, 1, 16, 1000), seed=4)
    for window in (case.chunks.keys_near.shape[2], 2**40):
        same = replace(case.chunks, query_far=case.chunks.query_near, keys_far=case.chunks.keys_near, window=window)
        case.check(module.received(same))


# ---- tiles ----

BLOCKS = (
    # block, window, column of the first token of each block of the requests of `Sizes`
    (8, 5, [[33, 41, 49, 57], [-3, 5, 13, 21], [64, 72, 0, 0], [13, 20, 21, 12], [57, 65, 73, 0]]),
    (16, 16, [[32, 48, 16, 64], [-7, 9, 0, 25], [64, 48, 80, 0], [20, 5, -12, 4], [57, -3, 0, 65]]),
    (24, 61, [[-60, 14, 38, 62], [-24, 0, 24, -23], [48, 72, 0, 0], [-3, -4, 0, 9], [48, 72, 64, 40]]),
    (40, 16, [[0, 40, 20, -3], [-20, 20, 0, -39], [40, 80, 70, 0], [0, 20, -19, -20], [40, 31, 69, 20]]),
)


@pytest.mark.parametrize("block, window, firsts", BLOCKS, ids=[f"{block}-{window}" for block, window, _ in BLOCKS])
@pytest.mark.parametrize("module, dtype", IMPLEMENTATIONS)
def test_tiles(module: ModuleType, dtype: torch.dtype, block: int, window: int, firsts: list[list[int]]) -> None:
    """Blocks that begin before the window or before the chunk, end behind it, hold none of its rows, have no place.

    Also windows that end inside of a block, and tiles that several programs fill.
    """
    case = Case(dtype, Sizes(heads=4, window=window), seed=5)
    places = [[7, 2, -1, 0], [1, 14, 4, 3], [5, 6, -1, -1], [12, 13, 9, -1], [10, 8, 11, -1]]
    blocks = case.tiles(firsts, places, block)
    module.fill_tiles(case.chunks, blocks, **({"tuning": PIECES} if block == 24 and module is triton else {}))
    assert case.check_tiles(blocks) > 10


@pytest.mark.parametrize("module", MODULES)
def test_tiles_may_be_parts_of_a_wider_tensor(module: ModuleType) -> None:
    case = Case(torch.float32, Sizes(), seed=6)
    blocks = case.tiles([[40], [3], [70], [16], [64]], [[0], [1], [2], [3], [4]], 16)
    wider = torch.full((7, 8, 20, 24), NAN, device=DEVICE)
    view = BlockTiles(wider[:, 1:7, 2:18, 4:20], blocks.first, blocks.place)
    assert view.tiles.shape == blocks.tiles.shape and not view.tiles.is_contiguous()
    module.fill_tiles(case.chunks, view)
    assert case.check_tiles(view) == 10 + 16 + 1 + 6
    inside = int(view.tiles.isnan().logical_not().sum())
    assert int(wider.isnan().logical_not().sum()) == inside == 33 * 6 * 16


# ---- a stream ----


def turned(vectors: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Vectors [..., tokens, dim], each turned by its place: rotary embedding, with components as complex numbers."""
    half = vectors.shape[-1] // 2
    angles = places.double().unsqueeze(-1) * 100.0 ** (-torch.arange(half) / half).double()
    numbers = torch.complex(vectors[..., :half], vectors[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag], -1)


@pytest.mark.parametrize("module, dtype", [p for p in IMPLEMENTATIONS if "half" not in str(p.id)])
def test_a_stream_in_chunks(module: ModuleType, dtype: torch.dtype) -> None:
    """Rotations are made here as the engine makes them; the definition rotates by distances alone.

    Tiles are filled by several chunks, and sums are added up over them.
    """
    heads, kv_heads, dim, block, window, tokens = 4, 2, 16, 8, 21, 75
    generator = torch.Generator().manual_seed(7)
    query, keys = (torch.randn(n, tokens, dim, generator=generator, dtype=torch.float64) for n in (heads, kv_heads))
    places = (tokens + block - 1) // block
    tiles = torch.full((places, heads, block, block), NAN, dtype=dtype, device=DEVICE)
    total, want_total = torch.zeros(tokens, dtype=torch.float64), torch.zeros(tokens, dtype=torch.float64)
    want = torch.full((places, heads, block, block), NAN, dtype=torch.float64)
    for begin, end in ((0, 16), (16, 32), (32, 48), (48, 64), (64, 70), (70, 74), (74, 75)):
        first = max(0, begin - window) // block * block
        rows, seen = torch.arange(begin, end), torch.arange(first, end)
        lse = torch.zeros(1, end - begin, heads, dtype=torch.float64)
        for row, h in itertools.product(range(begin, end), range(heads)):
            distance = row - torch.arange(first, row + 1)
            relative = turned(query[h, row].expand(len(distance), dim), distance.clamp(max=window - 1))
            logits = SCALE * (relative * keys[h // 2, first : row + 1]).sum(1)
            lse[0, row - begin, h] = logits.logsumexp(0)
            given = logits.softmax(0)
            want_total[first : row + 1] += given
            low = row // block * block
            want[row // block, h, row - low] = 0
            want[row // block, h, row - low, : row - low + 1] = given[low - first :]
        near = turned(query[:, begin:end], rows - begin).transpose(0, 1)
        far = turned(query[:, begin:end], torch.full_like(rows, window - 1)).transpose(0, 1)
        both = (turned(keys[:, first:end], seen - begin), keys[:, first:end])
        tensors = [each[None].to(DEVICE, dtype) for each in (near, far, *both)]
        counts = ints([begin - first]), ints([end - begin])
        chunks = LocalMap(*tensors, lse.to(DEVICE, dtype), *counts, window, SCALE)
        found = module.received(chunks)
        total[first:end] += (found.received + found.last)[0].cpu()
        assert torch.allclose(found.chunk_received, (found.received + found.last)[:, begin - first :], rtol=1e-6)
        numbers = range(begin // block, -(-end // block))
        at = ints([[number * block - first for number in numbers]])
        module.fill_tiles(chunks, BlockTiles(tiles, at, ints([list(numbers)])))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert (total - want_total).abs().max() <= tolerance * want_total.max()
    assert torch.equal(tiles.cpu().isnan(), want.isnan())
    assert (tiles.cpu().double() - want).nan_to_num().abs().max() <= tolerance


# ---- who is asked, what is refused ----


def test_the_public_functions_are_the_references_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    other = triton if DEVICE == "cpu" else reference
    for name in ("received", "fill_tiles"):
        monkeypatch.delattr(other, name)
        assert getattr(local_map, name) is getattr(dispatch, name)
    case = Case(torch.float32, Sizes((9, 3), (4, 2), 2, 1, 8, 6))
    out = case.poisoned()
    assert local_map.received(case.chunks, out=out) is out
    case.check(out)
    blocks = case.tiles([[8], [-2]], [[1], [0]], 8)
    local_map.fill_tiles(case.chunks, blocks)
    assert case.check_tiles(blocks) == 4 + 2


def test_bad_input_is_refused() -> None:
    case = Case(torch.float32, Sizes((9, 3), (4, 2), 2, 1, 8, 6))
    chunks, out = case.chunks, case.poisoned()
    blocks = case.tiles([[8], [-2]], [[1], [0]], 8)
    query, keys, lse = chunks.query_near, chunks.keys_near, chunks.lse
    three = query.repeat(1, 1, 2, 1)[:, :, :3], keys.repeat(1, 2, 1, 1)
    for module in (reference, triton, local_map):
        for changed, message in (
            ({"query_near": query[0]}, r"query_near \(6, 2, 8\), keys_near .*: expected \[batch, rows, heads, head"),
            ({"keys_near": keys[..., :4]}, r"keys_near \(2, 1, 18, 4\): expected \[batch, rows"),
            ({"query_near": three[0], "keys_near": three[1]}, "3 query heads of 8 .* over 2 .*: expected a multiple"),
            ({"query_far": query[:, :2]}, r"query_far \(2, 2, 2, 8\): expected \(2, 6, 2, 8\)"),
            ({"keys_far": keys[:, :, :5]}, r"keys_far \(2, 1, 5, 8\): expected \(2, 1, 18, 8\)"),
            ({"keys_far": keys.half()}, r"queries and keys are torch\.float16, torch\.float32: expected one floating"),
            ({"lse": lse.double()}, r"lse is torch\.float64 \(2, 6, 2\): expected torch\.float32 \(2, 6, 2\)"),
            ({"before": chunks.before.long()}, r"before is torch\.int64 \(2,\).*: expected contiguous torch\.int32"),
            ({"count": chunks.count[:1]}, r"count is torch\.int32 \(1,\).*: expected contiguous torch\.int32 \(2,\)"),
            ({"window": 0}, "window=0: expected a whole number of tokens, at least 1"),
            ({"window": True}, "window=True: expected a whole number"),
            ({"count": chunks.count.to("meta")}, "tensors on cpu, meta: expected one device"),
        ):
            if DEVICE != "cpu" and "meta" in message:
                message = "expected one device"
            for run in (module.received, lambda wrong, fill=module.fill_tiles: fill(wrong, blocks)):
                with pytest.raises(ValueError, match=message):
                    run(replace(chunks, **changed))
        for changed, message in (
            ({"received": out.received[:, :7]}, r"received is .*\(2, 7\).*: expected contiguous .*\(2, 18\)"),
            ({"last": out.last.double()}, r"last is torch\.float64 .*: expected contiguous torch\.float32"),
            ({"chunk_received": out.last}, r"chunk_received is .*\(2, 18\).*: expected contiguous .*\(2, 6\)"),
        ):
            with pytest.raises(ValueError, match=message):
                module.received(chunks, out=replace(out, **changed))
        for changed, message in (
            ({"tiles": blocks.tiles[:, :1]}, r"tiles \(4, 1, 8, 8\): expected \[places, 2, block, block\]"),
            ({"tiles": blocks.tiles[:, :, :4]}, r"tiles \(4, 2, 4, 8\): expected"),
            ({"tiles": blocks.tiles.double()}, r"tiles are torch\.float64 .*: expected torch\.float32 with"),
            ({"tiles": blocks.tiles.transpose(2, 3)}, r"strides .*: expected torch\.float32 with a contiguous last"),
            ({"first": blocks.first[0]}, r"first \(1,\): expected \[batch, blocks\]"),
            ({"first": blocks.first.long()}, r"first is torch\.int64 .*: expected contiguous torch\.int32 \(2, 1\)"),
            ({"place": blocks.place[:1]}, r"place is torch\.int32 \(1, 1\).*: expected contiguous torch\.int32 \(2, 1"),
            ({"place": blocks.place.to("meta")}, "expected one device"),
        ):
            with pytest.raises(ValueError, match=message):
                module.fill_tiles(chunks, replace(blocks, **changed))


def test_bad_values_are_refused_by_the_reference() -> None:
    case = Case(torch.float32, Sizes((9, 3), (4, 2), 2, 1, 8, 6))
    blocks = case.tiles([[8], [-2]], [[1], [0]], 8)
    for before, count in ((90, 2), (-1, 2), (3, 7), (3, -1)):
        wrong = replace(case.chunks, before=ints([9, before]), count=ints([4, count]))
        message = f"request 1: {before} columns before {count} rows of 6; expected both in 18 columns"
        with pytest.raises(ValueError, match=message):
            reference.received(wrong)
        with pytest.raises(ValueError, match=message):
            reference.fill_tiles(wrong, blocks)
    for places in ([[1], [1]], [[4], [0]]):
        with pytest.raises(ValueError, match="expected no place twice, and each below 4, the number of tiles"):
            reference.fill_tiles(case.chunks, replace(blocks, place=ints(places)))
    assert bool(blocks.tiles.isnan().all())


def test_what_the_kernels_do_not_take() -> None:
    chunks = Case(torch.float64, Sizes((9,), (4,), 2, 1, 8, 6)).chunks
    with pytest.raises(ValueError, match=r"query_near is torch\.float64: .*take the reference for float64"):
        triton.received(chunks)
    chunks = Case(torch.float32, Sizes((9,), (4,), 2, 1, 8, 6)).chunks
    turned_keys = chunks.keys_far.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match=r"keys_far has strides .*: expected a contiguous last dimension"):
        triton.received(replace(chunks, keys_far=turned_keys))


# ---- on a GPU ----


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_in_a_cuda_graph() -> None:
    """One graph, replayed for other chunks; twice the same numbers, bit by bit."""
    cases = [Case(HALF, Sizes((before, 40), (19, 8)), seed=before) for before in (40, 8, 21)]
    rows, columns = 21, 64
    padded = [[_padded(each, n, rows, columns) for n, each in enumerate(_tensors(case.chunks))] for case in cases]
    held = [each.clone() for each in padded[0]]
    chunks = LocalMap(*held, 40, SCALE)
    out = Received.empty(chunks)
    blocks = cases[0].tiles([[40], [41]], [[1], [0]], 16)

    def step() -> None:
        local_map.received(chunks, out=out)
        local_map.fill_tiles(chunks, blocks)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for given in padded:
        for mine, theirs in zip(held, given, strict=True):
            mine.copy_(theirs)
        blocks.tiles.fill_(NAN)
        graph.replay()
        want = reference.received(chunks)
        assert (out.received - want.received).abs().max() <= 1e-5 and (out.last - want.last).abs().max() <= 1e-5
        tiles = replace(blocks, tiles=torch.full_like(blocks.tiles, NAN))
        reference.fill_tiles(chunks, tiles)
        assert torch.allclose(blocks.tiles, tiles.tiles, atol=1e-5, equal_nan=True)
        first = out.received.clone(), blocks.tiles.clone()
        graph.replay()
        assert torch.equal(out.received, first[0]) and torch.equal(blocks.tiles.nan_to_num(), first[1].nan_to_num())


def _padded(tensor: torch.Tensor, number: int, rows: int, columns: int) -> torch.Tensor:
    """The tensor of that number, among those of chunks, with room for so many rows or columns."""
    if number < 2:
        return torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, rows - tensor.shape[1]), value=NAN)
    if number < 4:
        return torch.nn.functional.pad(tensor, (0, 0, 0, columns - tensor.shape[2]), value=NAN)
    return torch.nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[1]), value=NAN) if number == 4 else tensor


COMPILE = """
from pathlib import Path

import torch
from sglang_ext.kernels.local_map import BlockTiles, LocalMap, triton_impl as maps
from tests.kernels.sm90 import check_copies, compiled, stand_in

NAMES = ("_bias_kernel", "_columns_kernel", "_fold_kernel", "_tiles_kernel")
stand_in(maps, *NAMES)
one = torch.zeros(1, dtype=torch.int32)
SMALLER = 99 * 1024  # what the smaller GPUs have
for rows, heads, kv_heads, dim, dtype, block, window, shared in (
    (512, 32, 8, 128, torch.bfloat16, 128, 4096, maps.ROOM), (512, 32, 8, 128, torch.bfloat16, 128, 4096, SMALLER),
    (1, 32, 8, 128, torch.bfloat16, 128, 4096, maps.ROOM), (512, 8, 8, 256, torch.float16, 32, 16, maps.ROOM),
):
    query, keys = torch.zeros(1, rows, heads, dim, dtype=dtype), torch.zeros(1, kv_heads, 4864, dim, dtype=dtype)
    chunks = LocalMap(query, query, keys, keys, torch.zeros(1, rows, heads), one, one, window, 0.1)
    maps.received(chunks, tuning=maps.tuning_for(rows, dim, query.element_size(), shared))
    found = compiled["local_map_columns_kernel"]
    assert found.metadata.shared <= shared, (rows, dim, dtype, shared)
    places = torch.zeros(1, 5, dtype=torch.int32)
    maps.fill_tiles(chunks, BlockTiles(torch.zeros(5, heads, block, block), places, places))
    assert compiled["local_map_tiles_kernel"].metadata.shared <= SMALLER
    if rows > 1:
        assert "wgmma" in found.asm["ptx"]
        check_copies(found.asm["cubin"], Path(__file__).parent)
assert len(compiled) == 4, compiled
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """At the paper's sizes, on Llama-3.1-8B's heads and on others."""
    sm90.run(COMPILE, tmp_path)
