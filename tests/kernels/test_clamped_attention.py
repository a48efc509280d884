"""Attention with clamped distances against every pair of tokens in float64, rotated by its own distance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
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
    dense_impl,
    dispatch,
    reference,
    triton_impl,
)
from sglang_ext.kernels.clamped_attention.triton_impl import rotate_queries
from sglang_ext.kernels.rope import Rope, rotate
from tests.kernels import sm90
from tests.kernels.dense import plain_attention

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.float16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, HALF: 5e-3}
ROTATED = {torch.float32: 3e-6, HALF: 1e-3, torch.bfloat16: 8e-3}
MERGED = {torch.float32: 1e-5, HALF: 1e-3, torch.bfloat16: 8e-3}
SCALE = 0.3


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
# A stand-in has the place of dense kernels without a GPU, and takes all dtypes; kernels take half precision alone.
SERVED += [(dense_impl, dtype) for dtype in ((HALF,) if CUDA else TOLERANCE)]
STAND: dict[Any, dict[str, Any]] = {reference: {}, dense_impl: {} if CUDA else {"attend": plain_attention}}
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


def attention_at_once(module: Any, given: dict[str, Any], **stand: Any) -> torch.Tensor:
    """The output over everything, where the window's far tokens are a part of what lies beyond it."""
    query, window, sinks, memory = (given[name] for name in ("query", "window", "sinks", "memory"))
    more = {"width": given["width"], "scale": given["scale"], **stand}
    late = query.begin + len(query.near) - given["width"] - window.first
    keys, values = torch.cat([memory.keys, window.far[:late]]), torch.cat([memory.values, window.values[:late]])
    near = module.attend_near(query, window, **more)
    wide = torch.promote_types(query.near.dtype, torch.float32)
    return dispatch.merge(near, module.attend_beyond(query, sinks, FarKeys(keys, values, late), **more), wide).out


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("module", "dtype"), SERVED)
def test_attention(module: Any, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    case = Case(dtype, *sizes)
    out, lse = attention(module, case.inputs(), **STAND[module])
    assert lse.is_contiguous()
    wanted_out, wanted_lse = case.expected()
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (out.double() - wanted_out).abs().max() <= TOLERANCE[dtype] * max(1.0, float(wanted_out.abs().max()))
    assert (lse.double() - wanted_lse).abs().max() <= TOLERANCE[dtype] * max(1.0, float(wanted_lse.abs().max()))


@pytest.mark.parametrize(
    "sizes",
    [CASES["all rows see something far"], CASES["one row"], (70, 16, 30, 0, 16, 32), (90, 5, 30, 5, 0, 32)],
    ids=str,
)
@pytest.mark.parametrize(("module", "dtype"), SERVED)
def test_far_tokens_of_the_window_are_attended_to_with_the_memory(
    module: Any, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    case = Case(dtype, *sizes)
    out, (wanted, _) = attention_at_once(module, case.inputs(), **STAND[module]), case.expected()
    assert (out.double() - wanted).abs().max() <= TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))


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
        ({"memory": "few late"}, r"late=3: expected 0, or 11 \(rows\) to 24 \(tokens of the memory\)"),
        ({"memory": "many late"}, "late=25: expected 0, or 11"),
        ({"query": "half"}, "expected one dtype on one device"),
        ({"query": "odd"}, "expected a multiple"),
    ],
)
@pytest.mark.parametrize("module", [reference, dense_impl], ids=["reference", "dense"])
def test_wrong_input(module: Any, change: dict[str, Any], message: str) -> None:
    given = Case(torch.float32, *CASES["all rows see something far"]).inputs()
    window, sinks, memory, query = given["window"], given["sinks"], given["memory"], given["query"]
    others = {
        "later": SeenKeys(window.near, window.far, window.values, window.first + 1),
        "inside": SeenKeys(sinks.near, sinks.far, sinks.values, query.begin),
        "narrow": FarKeys(memory.keys[..., :-1], memory.values),
        "few late": FarKeys(memory.keys, memory.values, 3),
        "many late": FarKeys(memory.keys, memory.values, 25),
        "half": ChunkQuery(query.near.half(), query.far.half(), query.begin),
        "odd": ChunkQuery(query.near[:, 1:], query.far[:, 1:], query.begin),
    }
    nothing = {"sinks": SeenKeys(sinks.near[:0], sinks.far[:0], sinks.values[:0], 0)}
    nothing["memory"] = FarKeys(memory.keys[:0], memory.values[:0])  # type: ignore[assignment]
    found = {name: nothing[name] if value == "none" else others.get(value, value) for name, value in change.items()}
    changed, more = {**given, **found}, {"scale": SCALE, "width": found.get("width", given["width"])}
    with pytest.raises(ValueError, match=message):
        stand = {} if module is reference else {"attend": plain_attention}  # which takes float32 on a GPU, too
        module.attend_window(changed["query"], changed["window"], **more, **stand)
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
@pytest.mark.parametrize("strided", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_parts_are_merged(module: Any, dtype: torch.dtype, rows: int, strided: tuple[int, ...], given: bool) -> None:
    """The second part has the last rows; a row of it sees nothing, and a row of a head sees nothing of either.

    Large logits do not overflow. Log-sum-exps of some parts lie as FlashAttention-3 has them, heads first.
    """
    one = Part(drawn(5, 3, 20, dtype=dtype), 300 * drawn(5, 3, dtype=torch.float32, seed=3))
    other = Part(drawn(rows, 3, 20, dtype=dtype, seed=4), 300 * drawn(rows, 3, dtype=torch.float32, seed=5))
    if rows:
        other.lse[0, 1] = other.lse[-1, 2] = one.lse[-1, 2] = float("-inf")
    heads_first = lambda lse: lse.transpose(0, 1).contiguous().transpose(0, 1)  # noqa: E731
    parts = [
        replace(part, lse=heads_first(part.lse)) if at in strided else part for at, part in enumerate((one, other))
    ]
    into = torch.full((5, 3, 20), float("nan"), dtype=dtype, device=DEVICE) if given else None
    found = module.merge(*parts, dtype, out=into)
    assert into is None or found.out.data_ptr() == into.data_ptr()
    assert found.out.dtype == dtype and found.lse.dtype == torch.float32 and found.lse.is_contiguous()
    if rows:
        assert found.lse[-1, 2] == float("-inf") and not found.out[-1, 2].any()
        for part in (found, one):  # the formula below has no limit
            part.lse[-1, 2], part.out[-1, 2] = 0, 0
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
    with pytest.raises(ValueError, match="outputs of parts are not contiguous"):
        triton_impl.merge(Part(drawn(2, 3, 4).transpose(0, 1), drawn(3, 2)), one, torch.float32)
    for out in (drawn(2, 2, 4), drawn(3, 2, 4).half(), drawn(3, 4, 2).transpose(1, 2)):
        with pytest.raises(ValueError, match=r"expected torch.float32 \(3, 2, 4\), contiguous"):
            triton_impl.merge(one, one, torch.float32, out=out)
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
    triton_impl.merge(Part(one, torch.empty(4, 9).transpose(0, 1)), Part(one, lse), torch.bfloat16)
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
