"""Attention with clamped distances against every pair of tokens in float64, rotated by its own distance."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.kernels.cells import Rotation
from sglang_ext.kernels.clamped_attention import (
    ChunkQuery,
    FarKeys,
    LayerRows,
    Part,
    SeenKeys,
    dispatch,
    flashinfer_impl,
    reference,
    triton_impl,
)
from sglang_ext.kernels.clamped_attention.triton_impl import rotate_queries
from sglang_ext.kernels.rope import Rope, rotate
from tests.kernels import sm90

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.float16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, HALF: 5e-3}
ROTATED = {torch.float32: 3e-6, HALF: 1e-3, torch.bfloat16: 8e-3}
MERGED = {torch.float32: 1e-5, HALF: 1e-3, torch.bfloat16: 8e-3}
SCALE = 0.3


def stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    kv_layout: str,
    sm_scale: float,
    window_left: int,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's `single_prefill_with_kv_cache`, as its documentation has it: masks are aligned at the end."""
    assert kv_layout == "NHD" and return_lse
    rows, columns = q.shape[0], k.shape[0]
    own = torch.arange(rows, device=q.device).unsqueeze(1) + columns - rows
    column = torch.arange(columns, device=q.device)
    seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
    if causal:
        seen &= column <= own
    if window_left >= 0:
        seen &= own - column <= window_left
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (each.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    logits = torch.einsum("rhd,thd->hrt", q.to(wide), keys) * sm_scale
    logits = logits.masked_fill(~seen, float("-inf"))
    out = torch.einsum("hrt,thd->rhd", logits.softmax(-1), values).to(q.dtype).contiguous()
    return out, logits.logsumexp(-1).transpose(0, 1).contiguous() / math.log(2.0)


class Case:
    """A chunk of a stream: sinks, a window behind them (or behind evicted tokens), and memory."""

    def __init__(
        self, dtype: torch.dtype, begin: int, rows: int, first: int, sinks: int, memory: int, width: int
    ) -> None:
        heads, kv_heads, dim, value_dim = (4, 2, 64, 64) if CUDA else (6, 2, 16, 24)
        gen = torch.Generator().manual_seed(begin + rows)
        self.rope = Rope((0.7 ** torch.arange(dim // 2)).to(DEVICE))
        draw = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64).to(DEVICE)  # noqa: E731
        self.begin, self.rows, self.first, self.width = begin, rows, first, width
        self.tokens = [*range(sinks), *range(first, begin + rows)]
        self.query = draw(rows, heads, dim)
        self.keys, self.values = draw(len(self.tokens), kv_heads, dim), draw(len(self.tokens), kv_heads, value_dim)
        self.far, self.far_values = draw(memory, kv_heads, dim), draw(memory, kv_heads, value_dim)
        self.sinks, self.dtype = sinks, dtype

    def inputs(self) -> dict[str, Any]:
        """What kernels get; keys that no row sees far away are NaN there, and those seen far by all are NaN near by."""
        places = torch.tensor(self.tokens, device=DEVICE)
        rows = torch.arange(self.begin, self.begin + self.rows, device=DEVICE)
        turned = rotate(self.keys.transpose(0, 1), places - self.begin, self.rope).transpose(0, 1)
        edge = torch.tensor(self.width - 1, device=DEVICE)
        query = ChunkQuery(
            rotate(self.query.transpose(0, 1), rows - self.begin, self.rope).transpose(0, 1).to(self.dtype),
            rotate(self.query.transpose(0, 1), edge, self.rope).transpose(0, 1).to(self.dtype),
            self.begin,
        )
        near, far, values = (each.to(self.dtype) for each in (turned, self.keys, self.values))
        split = self.sinks
        return {
            "query": query,
            "window": SeenKeys(near[split:], far[split:], values[split:], self.first),
            "sinks": SeenKeys(near[:split], far[:split], values[:split], 0),
            "memory": FarKeys(self.far.to(self.dtype), self.far_values.to(self.dtype)),
            "width": self.width,
            "scale": SCALE,
        }

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, log-sum-exp over the window), one row and head at a time."""
        heads, group = self.query.shape[1], self.query.shape[1] // self.keys.shape[1]
        out = self.query.new_zeros(self.rows, heads, self.values.shape[2])
        lse = self.query.new_zeros(self.rows, heads)
        for row in range(self.rows):
            token = self.begin + row
            seen = [at for at, place in enumerate(self.tokens) if place <= token]
            distance = torch.tensor([min(token - self.tokens[at], self.width - 1) for at in seen], device=DEVICE)
            for head in range(heads):
                kv = head // group
                turned = rotate(self.query[row, head].expand(len(seen), -1), distance, self.rope)
                logits = (turned * self.keys[seen, kv]).sum(1) * SCALE
                window = torch.tensor([self.tokens[at] >= self.first for at in seen], device=DEVICE)
                lse[row, head] = logits[window].logsumexp(0)
                edge = torch.tensor(self.width - 1, device=DEVICE)
                far = (rotate(self.query[row, head], edge, self.rope) * self.far[:, kv]).sum(1) * SCALE
                weights = torch.cat([logits, far]).softmax(0)
                out[row, head] = weights @ torch.cat([self.values[seen, kv], self.far_values[:, kv]])
        return out, lse


SERVED = [(reference, dtype) for dtype in TOLERANCE]
# A stand-in has FlashInfer's place without a GPU, and takes all dtypes; its kernels take half precision alone.
SERVED += [(flashinfer_impl, dtype) for dtype in ((HALF,) if CUDA else TOLERANCE)]
CASES = {
    "first chunk": (0, 11, 0, 0, 0, 32),
    "within the width": (11, 9, 5, 5, 0, 32),
    "the first rows see nothing far": (27, 11, 5, 5, 0, 32),
    "sinks are far from some rows": (34, 11, 5, 5, 0, 32),
    "all rows see something far": (50, 11, 13, 5, 24, 32),
    "one row": (70, 1, 37, 4, 16, 32),
    "no sinks": (70, 16, 30, 0, 16, 32),
    "a width of one": (9, 5, 3, 2, 4, 1),
}


def attention(module: Any, given: dict[str, Any], **stand: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(output over everything, log-sum-exp over the window)."""
    query, more = given["query"], {"width": given["width"], "scale": given["scale"], **stand}
    window = module.attend_window(query, given["window"], **more)
    if len(given["sinks"].near) + len(given["memory"].keys) == 0:
        return window.out, window.lse
    beyond = module.attend_beyond(query, given["sinks"], given["memory"], **more)
    return dispatch.merge(window, beyond, window.lse.dtype).out, window.lse


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("module", "dtype"), SERVED)
def test_attention(module: Any, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    check_attention(module, dtype, sizes)


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("module", "dtype"), SERVED[len(TOLERANCE) :])
@pytest.mark.parametrize("splits", [2, 8])
def test_attention_in_splits(
    module: Any, dtype: torch.dtype, sizes: tuple[int, ...], splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that all rows see are cut, in numbers that splits divide and in others."""
    monkeypatch.setattr(flashinfer_impl, "LEAST", 2)
    monkeypatch.setattr(flashinfer_impl, "FEWEST_OF_WINDOW", 2)
    check_attention(module, dtype, sizes, processors=splits * (4 if CUDA else 6))


def test_splits_are_made_of_what_all_rows_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_impl, "LEAST", 2)
    given, seen = Case(torch.float64, *CASES["all rows see something far"]).inputs(), list[tuple[int, ...]]()

    def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((*q.shape[:2], *k.shape[:2]))
        return stand_in(q, k, v, **rest)

    heads, kv_heads = given["query"].near.shape[1], given["window"].near.shape[1]
    attention(flashinfer_impl, given, prefill=prefill, processors=6 * heads)
    # Of the window's 48 tokens, the 21 before the 11 rows are nearby for all of them: 4 splits have 20, and 1 is left.
    # The first row sees 10 more, and every row some of their own 11; 16 are far away from some row. 29 lie beyond.
    window = [(11, 4 * heads, 5, 4 * kv_heads), (11, heads, 10 + 1 + 11, kv_heads), (11, heads, 16, kv_heads)]
    assert seen == [*window, (11, heads, 29, kv_heads)]


@pytest.mark.parametrize(
    ("rows", "heads", "dim", "tokens", "processors", "splits"),
    [
        (128, 32, 128, 4096, 132, 4),
        (129, 32, 128, 4096, 132, 2),
        (129, 32, 64, 4096, 132, 4),  # heads of 64 components have 192 rows at once
        (512, 32, 128, 4096, 132, 1),
        (128, 32, 128, 1023, 132, 2),
        (128, 1, 128, 2**20, 132, 16),
        (128, 32, 128, -5, 132, 1),
        (128, 32, 128, 4096, None, 1),  # on a CPU
    ],
)
def test_splits(rows: int, heads: int, dim: int, tokens: int, processors: int | None, splits: int) -> None:
    query = torch.empty(rows, heads, dim)
    assert flashinfer_impl._splits(ChunkQuery(query, query, 0), tokens, processors) == splits


@pytest.mark.parametrize(("capability", "processors"), [((9, 0), 132), ((8, 0), 1), ((10, 0), 1)])
def test_splits_are_for_hopper(capability: tuple[int, int], processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_impl._processors.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    assert flashinfer_impl._processors(torch.device("cuda", 0)) == processors
    flashinfer_impl._processors.cache_clear()


def check_attention(module: Any, dtype: torch.dtype, sizes: tuple[int, ...], **more: Any) -> None:
    case = Case(dtype, *sizes)
    stand = {"prefill": stand_in} if module is flashinfer_impl and not CUDA else {}
    out, lse = attention(module, case.inputs(), **stand, **more)
    wanted_out, wanted_lse = case.expected()
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (out.double() - wanted_out).abs().max() <= TOLERANCE[dtype] * max(1.0, float(wanted_out.abs().max()))
    assert (lse.double() - wanted_lse).abs().max() <= TOLERANCE[dtype] * max(1.0, float(wanted_lse.abs().max()))


def test_a_token_one_farther_is_seen_otherwise() -> None:
    """What the oracle above tells apart: the width, and which keys are rotated."""
    case = Case(torch.float64, *CASES["all rows see something far"])
    wanted, _ = case.expected()
    for width in (30, 33):  # a token at the distance width - 1 is the same, near by and far away
        out, _ = attention(reference, {**case.inputs(), "width": width})
        assert (out - wanted).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width=0: expected at least 1"),
        ({"window": "later"}, "expected one that begins at or before the rows and ends with them"),
        ({"sinks": "inside"}, "expected them before the rows"),
        ({"sinks": "none", "memory": "none"}, "neither sinks nor memory have a token"),
        ({"memory": "narrow"}, "memory: keys"),
        ({"query": "half"}, "expected one dtype on one device"),
        ({"query": "odd"}, "expected a multiple"),
    ],
)
@pytest.mark.parametrize("module", [reference, flashinfer_impl], ids=["reference", "flashinfer"])
def test_wrong_input(module: Any, change: dict[str, Any], message: str) -> None:
    given = Case(torch.float32, *CASES["all rows see something far"]).inputs()
    window, sinks, memory, query = given["window"], given["sinks"], given["memory"], given["query"]
    others = {
        "later": SeenKeys(window.near, window.far, window.values, window.first + 1),
        "inside": SeenKeys(sinks.near, sinks.far, sinks.values, query.begin),
        "narrow": FarKeys(memory.keys[..., :-1], memory.values),
        "half": ChunkQuery(query.near.half(), query.far.half(), query.begin),
        "odd": ChunkQuery(query.near[:, 1:], query.far[:, 1:], query.begin),
    }
    nothing = {"sinks": SeenKeys(sinks.near[:0], sinks.far[:0], sinks.values[:0], 0)}
    nothing["memory"] = FarKeys(memory.keys[:0], memory.values[:0])  # type: ignore[assignment]
    found = {name: nothing[name] if value == "none" else others.get(value, value) for name, value in change.items()}
    changed, more = {**given, **found}, {"scale": SCALE, "width": found.get("width", given["width"])}
    with pytest.raises(ValueError, match=message):
        module.attend_window(
            changed["query"], changed["window"], **more, **({"prefill": stand_in} if module is flashinfer_impl else {})
        )
        module.attend_beyond(changed["query"], changed["sinks"], changed["memory"], **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "heads", "dim", "rotary", "neox"), [(7, 3, 16, 16, True), (1, 2, 24, 10, False)])
def test_queries_at_both_rotations(
    dtype: torch.dtype, rows: int, heads: int, dim: int, rotary: int, neox: bool
) -> None:
    """Rows of a wider tensor; positions far behind and before 0."""
    rotation = Rotation.of(Rope(0.4 ** torch.arange(rotary // 2, device=DEVICE), neox))
    wide = torch.randn(rows, heads + 2, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    query = wide[:, 1:-1]
    for first, edge in ((0, 31), (-7, 4095), (4224, 1023)):
        wanted = reference.rotate_queries(query.double(), rotation, first=first, edge=edge)
        for found, exact in zip(rotate_queries(query, rotation, first=first, edge=edge), wanted, strict=True):
            assert found.dtype == dtype and found.is_contiguous()
            assert (found.double() - exact).abs().max() <= ROTATED[dtype] * float(exact.abs().max())


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 2) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


@pytest.mark.parametrize("module", [reference, triton_impl], ids=["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [5, 2, 0])
def test_parts_are_merged(module: Any, dtype: torch.dtype, rows: int) -> None:
    """The second part has the last rows; a row of it sees nothing. Large logits do not overflow."""
    one = Part(drawn(5, 3, 20, dtype=dtype), 300 * drawn(5, 3, dtype=torch.float32, seed=3))
    other = Part(drawn(rows, 3, 20, dtype=dtype, seed=4), 300 * drawn(rows, 3, dtype=torch.float32, seed=5))
    if rows:
        other.lse[0, 1] = float("-inf")
    found = module.merge(one, other, dtype)
    assert found.out.dtype == dtype and found.lse.dtype == torch.float32
    whole = torch.full((5, 3), float("-inf"), dtype=torch.float64, device=DEVICE)
    whole[5 - rows :] = other.lse.double()
    values = torch.zeros(5, 3, 20, dtype=torch.float64, device=DEVICE)
    values[5 - rows :] = other.out.double()
    lse = torch.logaddexp(one.lse.double(), whole)
    out = (one.lse.double() - lse).exp()[..., None] * one.out.double() + (whole - lse).exp()[..., None] * values
    assert (found.lse.double() - lse).abs().max() <= 1e-4
    assert (found.out.double() - out).abs().max() <= MERGED[dtype] * float(out.abs().max())


@pytest.mark.parametrize("module", [reference, triton_impl], ids=["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("one_splits", "other_splits"), [(4, 1), (1, 2), (2, 4)])
def test_splits_are_merged(module: Any, dtype: torch.dtype, one_splits: int, other_splits: int) -> None:
    """A split of a row sees nothing, and neither does all of the second part of another row; to base 2, and natural."""
    parts, outs, logs = [], [], []
    for splits, rows, base2 in ((one_splits, 5, True), (other_splits, 3, False)):
        out = drawn(rows, splits * 3, 20, dtype=dtype, seed=splits)
        lse = 300 * drawn(rows, splits * 3, dtype=torch.float32, seed=splits + 1)
        lse[-1, :1] = float("-inf")
        if not base2:
            lse[-2] = float("-inf")
        parts.append(Part(out, lse, splits, base2))
        before = torch.full((5 - rows, splits * 3), float("-inf"), dtype=torch.float64, device=DEVICE)
        logs.append(torch.cat([before, lse.double() * (math.log(2.0) if base2 else 1)]).unflatten(1, (splits, 3)))
        nothing = torch.zeros(5 - rows, splits * 3, 20, dtype=torch.float64, device=DEVICE)
        outs.append(torch.cat([nothing, out.double()]).unflatten(1, (splits, 3)))
    found, every = module.merge(*parts, dtype), torch.cat(logs, 1)
    out = (every.softmax(1).unsqueeze(-1) * torch.cat(outs, 1)).sum(1)
    assert found.splits == 1 and not found.base2 and found.out.dtype == dtype
    nothing = Part(outs[0].new_zeros(2, 3, 20), torch.full((2, 3), float("-inf"), device=DEVICE))
    assert torch.equal(module.merge(nothing, nothing, dtype).lse, nothing.lse)
    assert (found.lse.double() - every.logsumexp(1)).abs().max() <= 1e-4
    assert (found.out.double() - out).abs().max() <= MERGED[dtype] * float(out.abs().max())


@pytest.mark.parametrize("module", [reference, triton_impl], ids=["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_rows_are_moved(module: Any, dtype: torch.dtype, kind: torch.dtype) -> None:
    """Tokens and blocks, of which others are NaN; keys and values have other sizes, and are parts of wider tensors."""
    for shapes in (((3, 5), (3, 7)), ((4, 3, 1100), (4, 3, 500))):
        wide = [drawn(9, 2, *shape, dtype=dtype) for shape in shapes]
        source = wide[0][:, 1], wide[1][:, 1]
        at = torch.tensor([7, 0, 4], device=DEVICE, dtype=kind)
        unread = [row for row in range(9) if row not in (7, 0, 4)]
        for each in source:
            each[unread] = torch.nan
        target = [torch.full_like(each, torch.nan) for each in source]
        module.move(source, (target[0], target[1]), read=at)
        for each, into in zip(source, target, strict=True):
            assert torch.equal(into[:3], each[at.long()]) and into[3:].isnan().all()
        nowhere = torch.tensor([-1, 4], device=DEVICE, dtype=kind)
        module.move(source, (target[0], target[1]), read=nowhere)
        for each, into in zip(source, target, strict=True):
            assert not into[0].any() and torch.equal(into[1], each[4])
        module.move(source, (target[0], target[1]), read=at)
        back = [torch.full_like(each, torch.nan) for each in source]
        module.move((target[0], target[1]), (back[0], back[1]), write=at)
        for each, into in zip(source, back, strict=True):
            assert torch.equal(into[at.long()], each[at.long()]) and into[unread].isnan().all()
        module.move(source, (target[0], target[1]), read=at[:0])
    with pytest.raises(ValueError, match="neither read nor write is given"):
        module.move(source, source)


@pytest.mark.parametrize("module", [reference, triton_impl], ids=["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shapes", [((3, 5), (3, 7)), ((4, 1100), (4, 500))])
def test_rows_of_all_layers_are_moved(module: Any, dtype: torch.dtype, kind: torch.dtype, shapes: Any) -> None:
    """Rows that are not asked for are NaN; sources are parts of wider tensors, and begin anywhere."""
    read, write = (torch.tensor(rows, device=DEVICE, dtype=kind) for rows in ([7, 0, 4], [1, 5, 2]))
    pairs, others = [], []
    for layer in range(3):
        wide = [drawn(9, 3, *shape, dtype=dtype, seed=layer) for shape in shapes]
        pairs.append((wide[0][:, layer % 2], wide[1][:, 1]))
        for each in pairs[-1]:
            each[[row for row in range(9) if row not in (7, 0, 4)]] = torch.nan
        others.append(tuple(torch.full((6, *shape), torch.nan, dtype=dtype, device=DEVICE) for shape in shapes))
    source, target = LayerRows.of(pairs), LayerRows.of(others)
    module.move_layers(source, target, read=read[:0], write=write[:0])
    assert all(each.isnan().all() for pair in others for each in pair)
    module.move_layers(source, target, read=read, write=write)
    for pair, into in zip(pairs, others, strict=True):
        for each, found in zip(pair, into, strict=True):
            assert torch.equal(found[write.long()], each[read.long()]) and found[[0, 3, 4]].isnan().all()
    module.move_layers(target, target, read=write, write=torch.tensor([0, 3, 4], device=DEVICE, dtype=kind))
    for pair, into in zip(pairs, others, strict=True):
        for each, found in zip(pair, into, strict=True):
            assert torch.equal(found[[0, 3, 4]], each[read.long()])


def test_layers_that_differ_are_no_layer_rows() -> None:
    keys, values = drawn(4, 2, 3), drawn(4, 2, 5)
    with pytest.raises(ValueError, match="keys and values of 2 layers come in 2 kinds: expected one dtype"):
        LayerRows.of([(keys, values), (keys, keys)])
    at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    one, two = LayerRows.of([(keys, values)]), LayerRows.of([(keys, values)] * 2)
    for module in (reference, triton_impl):
        with pytest.raises(ValueError, match="rows of 1 layers into 2: expected as many"):
            module.move_layers(one, two, read=at, write=at)


def test_what_cannot_be_merged_or_moved() -> None:
    one, other = (Part(drawn(rows, 2, 4), drawn(rows, 2)) for rows in (3, 4))
    with pytest.raises(ValueError, match="no more rows in the second"):
        triton_impl.merge(one, other, torch.float32)
    with pytest.raises(ValueError, match="parts are not contiguous"):
        triton_impl.merge(Part(drawn(2, 3, 4).transpose(0, 1), drawn(3, 2)), one, torch.float32)
    keys, at = drawn(4, 2, 3), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="expected rows of one shape and dtype"):
        triton_impl.move((keys, keys), (keys.float(), keys), read=at)
    with pytest.raises(ValueError, match="expected rows that are contiguous each"):
        triton_impl.move((keys.transpose(1, 2), keys), (drawn(4, 3, 2), keys), read=at)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernel and run it")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler may not."""
    sm90.run(COMPILE, tmp_path)


COMPILE = """
import torch
from sglang_ext.kernels.cells import Rotation
from sglang_ext.kernels.clamped_attention import LayerRows, triton_impl
from sglang_ext.kernels.rope import Rope
from tests.kernels.sm90 import compiled, stand_in

from sglang_ext.kernels.clamped_attention import Part

stand_in(triton_impl, "_rotate_kernel", "_merge_kernel", "_move_kernel", "_move_layers_kernel", shared=48 * 1024)
for dtype in (torch.bfloat16, torch.float32):
    one, lse = torch.empty(9, 4, 128, dtype=dtype), torch.empty(9, 4)
    triton_impl.merge(Part(one, lse), Part(one[3:], lse[3:]), torch.bfloat16)
    splits = [Part(torch.empty(9, n * 4, 128, dtype=dtype), torch.empty(9, n * 4), n, base2=n > 2) for n in (4, 2)]
    triton_impl.merge(*splits, torch.bfloat16)
    keys, at = torch.empty(9, 4, 128, dtype=dtype), torch.zeros(5, dtype=torch.int64)
    triton_impl.move((keys, keys), (keys, keys), read=at)
    triton_impl.move((keys, keys), (keys, keys), write=at.int())
    layers = LayerRows.of([(keys, keys)] * 2)
    assert layers.aligned
    triton_impl.move_layers(layers, layers, read=at, write=at)
    text = compiled["clamped_attention_move_layers_kernel"].asm["ptx"]
    wide = "v2" if dtype == torch.bfloat16 else "v4"  # a thread moves four neighbours at a time
    assert f"ld.global.{wide}.b32" in text and f"st.global.{wide}.b32" in text, text
for dim, rotary, dtype in ((128, 128, torch.bfloat16), (64, 64, torch.float16), (96, 48, torch.float32)):
    rotation = Rotation.of(Rope(0.4 ** torch.arange(rotary // 2)))
    triton_impl.rotate_queries(torch.empty(9, 4, dim, dtype=dtype), rotation, first=3, edge=4095)
assert len(compiled) == 4, compiled
"""


def of_flashinfer(*given: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from flashinfer import single_prefill_with_kv_cache

    found: tuple[torch.Tensor, torch.Tensor] = single_prefill_with_kv_cache(*given, **how)
    return found


def of_sglang(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, sm_scale: float, window_left: int, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in SGLang's FlashAttention-3."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    how = {"softmax_scale": sm_scale, "causal": causal, "window_size": (window_left, -1), "return_softmax_lse": True}
    out, lse, *_ = flash_attn_with_kvcache(q[None], k[None], v[None], **how)
    return out[0], lse[0].transpose(0, 1) / math.log(2.0)


@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [64, 512])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("prefill", [of_flashinfer, of_sglang])
def test_attention_is_the_same_each_time(prefill: Any, head_dim: int, rows: int, times: int = 5000) -> None:
    """Also while another stream keeps the GPU busy. A row of a head that differs is one that was read too early."""
    draw = torch.Generator("cuda").manual_seed(head_dim)
    given = [
        torch.randn(count, heads, head_dim, generator=draw, device="cuda", dtype=HALF)
        for count, heads in ((rows, 32), (4736, 8), (4736, 8))
    ]
    how = {"causal": True, "kv_layout": "NHD", "sm_scale": 0.1, "window_left": 4095, "return_lse": True}
    (first, lse), wanted = prefill(*given, **how), stand_in(*given, **how)
    assert (first - wanted[0]).abs().max() <= TOLERANCE[HALF] and (lse - wanted[1]).abs().max() <= TOLERANCE[HALF]
    beside, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    differ, levels = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for number in range(times):
        if number % 10 == 0:
            with torch.cuda.stream(beside):
                noise = (noise * 1.0001).sin_()
        events[0].record()
        out, level = prefill(*given, **how)
        events[1].record()
        differ += (out != first).any(-1).sum()
        levels += (level != lse).sum()
    torch.cuda.synchronize()
    print(f"{prefill.__name__}, {rows} rows, {head_dim}: the last call took {events[0].elapsed_time(events[1]):.3f} ms")
    assert (int(differ), int(levels)) == (0, 0), f"rows of heads, and log-sum-exps, that differ in {times} calls"
