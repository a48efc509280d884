"""The fused Triton kernel against `view_attention` in float64, request by request, over views of the same runs.

`view_attention` itself is compared with the definition in test_view_attention.py. Without a GPU the kernels run in
Triton's interpreter. Whatever a call must not read is NaN (partial outputs, slots of the caches that no run names) or
an index far outside the caches (`kv_slots`), and what it must write is NaN before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.view_attention import Ranks, Segment, View, view_attention
from sglang_ext.kernels.view_attention.buffers import PlanBuffers, PlanCapacity
from sglang_ext.kernels.view_attention.config import Config, choose
from sglang_ext.kernels.view_attention.plan import Plan, PlanRows, plan_rows
from sglang_ext.kernels.view_attention.planned import view_attention_plan
from tests.kernels import sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest error beside the largest value of the output; half types round the rotated query and the weights.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
LSE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # of a sum of order one
SMALL = Config(block_m=16, block_n=16, num_programs=6, min_split=16, merge_block=4)
NOWHERE = 1 << 30


@dataclass
class Piece:
    """A run of slots: what is written in them, and at which distance it is seen."""

    key: int
    slots: list[int]
    delta: int


@dataclass
class Asked:
    """A request of a test: runs that all of its rows see, then its own tokens, causally."""

    pieces: list[Piece]
    own: list[int]  # slots of its own tokens
    rows: int = 1
    own_delta: int = 0


class World:
    """Caches over `size` slots, of which the free ones hold NaN, and requests over them."""

    def __init__(
        self,
        *,
        size: int = 600,
        kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 16,
        value_dim: int | None = None,
        rotary_dim: int | None = None,
        neox: bool = True,
        dtype: torch.dtype = torch.float32,
        straight: bool = False,
        seed: int = 0,
    ) -> None:
        self.gen = torch.Generator().manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.kv_heads, self.group, self.dtype = kv_heads, group, dtype
        self.head_dim, self.value_dim = head_dim, value_dim or head_dim
        rotary = head_dim if rotary_dim is None else rotary_dim
        pairs = torch.arange(0, rotary, 2, dtype=torch.float64) / max(rotary, 1)
        self.rope = Rope((10000.0**-pairs).float().to(DEVICE), neox)
        self.keys = torch.full((size, kv_heads, self.head_dim), float("nan"))
        self.values = torch.full((size, kv_heads, self.value_dim), float("nan"))
        self.slot_pos = torch.zeros(size, dtype=torch.int32)
        # Slots of a run follow one another, or lie anywhere.
        self.free = [*range(size - 1, -1, -1)] if straight else self.rng.permutation(size).tolist()
        self.requests: list[Asked] = []
        self.keys, self.values = self.keys.to(DEVICE, dtype), self.values.to(DEVICE, dtype)

    def write(self, tokens: int, begin: int = 0) -> list[int]:
        """Random keys and values in `tokens` free slots, written at consecutive positions from `begin`."""
        slots = [self.free.pop() for _ in range(tokens)]
        self.keys[slots] = torch.randn(tokens, self.kv_heads, self.head_dim, generator=self.gen).to(DEVICE, self.dtype)
        self.values[slots] = torch.randn(tokens, self.kv_heads, self.value_dim, generator=self.gen).to(
            DEVICE, self.dtype
        )
        self.slot_pos[slots] = torch.arange(begin, begin + tokens, dtype=torch.int32)
        return slots

    def table(self) -> torch.Tensor:
        """Every request's slots, one after the other: what `PlanRows.source` points into."""
        columns = [slot for asked in self.requests for piece in asked.pieces for slot in piece.slots]
        columns += [slot for asked in self.requests for slot in asked.own]
        return torch.tensor(columns, dtype=torch.int32, device=DEVICE)

    def runs(self) -> list[PlanRows]:
        found, row, at = [], 0, 0
        own_at = sum(len(piece.slots) for asked in self.requests for piece in asked.pieces)
        for number, asked in enumerate(self.requests):
            lengths = [len(piece.slots) for piece in asked.pieces] + [len(asked.own)]
            source = [*(at + np.cumsum([0, *lengths[:-1]]))[:-1], own_at]
            found.append(
                PlanRows(
                    first_row=row,
                    num_rows=asked.rows,
                    keys=np.array([*(piece.key for piece in asked.pieces), -1 - number]),
                    lengths=np.array(lengths, dtype=np.int32),
                    deltas=np.array([*(piece.delta for piece in asked.pieces), asked.own_delta], dtype=np.int32),
                    source=np.array(source),
                    own=(len(asked.pieces),),
                    tail_column=1000 * number,
                )
            )
            row, at, own_at = row + asked.rows, at + sum(lengths[:-1]), own_at + lengths[-1]
        return found

    def seq_lens(self) -> list[int]:
        return [1000 * number + len(asked.own) for number, asked in enumerate(self.requests)]

    def plan(self, config: Config = SMALL, room: int = 0) -> Plan:
        return plan_rows(self.runs(), config=config, group=self.group, kv_heads=self.kv_heads, room=room)

    def buffers(self, plan: Plan, padding: int = 0, part_dtype: torch.dtype = torch.float32) -> PlanBuffers:
        """Just large enough, and poisoned."""
        capacity = PlanCapacity(
            rows=plan.num_rows + padding,
            items=len(plan.items),
            entries=len(plan.entry_row),
            angles=len(plan.angles),
            slots=plan.num_slots,
            workers=plan.config.workers(self.kv_heads),
        )
        buffers = PlanBuffers(
            capacity,
            heads=self.kv_heads * self.group,
            kv_heads=self.kv_heads,
            value_dim=self.value_dim,
            rope=self.rope,
            part_dtype=part_dtype,
            rotated=self.dtype if plan.config.groups else None,
        )
        poison(buffers)
        return buffers

    def query(self, padding: int = 0) -> torch.Tensor:
        rows = sum(asked.rows for asked in self.requests) + padding
        query = torch.randn(rows, self.kv_heads * self.group, self.head_dim, generator=self.gen)
        query[rows - padding :] = float("nan")
        return query.to(DEVICE, self.dtype)

    def expected(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, log-sum-exp) in float64 by the reference, of all rows but padding."""
        outs, lses, row = [], [], 0
        slot_pos = self.slot_pos.to(DEVICE)
        for asked in self.requests:
            segments = [self._segment(piece.slots, piece.delta, False) for piece in asked.pieces]
            segments.append(self._segment(asked.own, asked.own_delta, True))
            last = int(self.slot_pos[asked.own[-1]]) + asked.own_delta
            out, lse = view_attention(
                query[row : row + asked.rows].double(),
                torch.arange(last - asked.rows + 1, last + 1, device=DEVICE),
                View(tuple(segments)),
                self.keys.double(),
                self.values.double(),
                slot_pos,
                self.rope,
                self.head_dim**-0.5,
            )
            outs.append(out)
            lses.append(lse)
            row += asked.rows
        return torch.cat(outs), torch.cat(lses)

    def _segment(self, slots: list[int], delta: int, causal: bool) -> Segment:
        at = torch.tensor(slots)
        return Segment(at.to(DEVICE), Ranks((self.slot_pos[at].long() + delta).to(DEVICE)), causal)

    def check(self, query: torch.Tensor, buffers: PlanBuffers) -> None:
        """Run the kernels into poisoned outputs, and compare."""
        rows, heads = query.shape[:2]
        out = torch.full((rows, heads, self.value_dim), float("nan"), dtype=self.dtype, device=DEVICE)
        lse = torch.full((rows, heads), float("nan"), device=DEVICE)
        got = view_attention_plan(
            query, buffers, self.keys, self.values, self.head_dim**-0.5, out=out, lse=lse, config=None
        )
        assert got is out
        want, want_lse = self.expected(query)
        close(out[: len(want)], want, TOLERANCE[self.dtype])
        error = (lse[: len(want)].double() - want_lse).abs().max().item()
        assert error <= LSE_TOLERANCE[self.dtype] * max(1.0, want_lse.abs().max().item()), error
        assert (out[len(want) :] == 0).all() and (lse[len(want) :] == float("-inf")).all(), "padding"

    def verify(
        self, config: Config = SMALL, padding: int = 0, room: int = 0, part_dtype: torch.dtype = torch.float32
    ) -> None:
        plan = self.plan(config, room)
        buffers = self.buffers(plan, padding, part_dtype)
        buffers.load(plan, self.table())
        self.check(self.query(padding), buffers)


def poison(buffers: PlanBuffers) -> None:
    buffers.part.fill_(float("nan"))
    buffers.part_lse.fill_(float("nan"))
    buffers.kv_slots.fill_(NOWHERE)
    buffers.cos.fill_(float("nan"))
    buffers.sin.fill_(float("nan"))
    if buffers.rotated is not None:
        buffers.rotated.fill_(float("nan"))


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    error = (got.double() - want).abs().max().item()
    assert error <= tolerance * want.abs().max().item(), error  # NaN compares as false


def batch(world: World, requests: int, blocks: int = 5, chosen: int = 3, rows: int = 1) -> World:
    """Requests that each see some of a few shared blocks, at places of their own, and their own tokens."""
    shared = [(key, world.write(int(world.rng.integers(1, 40)), 50 * key)) for key in range(blocks)]
    for _ in range(requests):
        pieces, column = [], 0
        for pick in world.rng.choice(blocks, chosen, replace=False):
            key, slots = shared[pick]
            pieces.append(Piece(7 * key - 3, slots, column - 50 * key))
            column += len(slots)
        own = world.write(rows + int(world.rng.integers(0, 9)), column)
        world.requests.append(Asked(pieces, own, rows))
    return world


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
def test_equals_the_reference(neox: bool, dtype: torch.dtype) -> None:
    batch(World(neox=neox, dtype=dtype), requests=5).verify()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_slots_that_follow_one_another(rows: int, dtype: torch.dtype) -> None:
    """Whole tiles are copied; what they end in, and runs that break somewhere, is gathered token by token."""
    world = World(size=900, straight=True, dtype=dtype)
    shared = [world.write(64, 0), world.write(75, 64), world.write(15, 200)]
    broken = world.write(40, 300)
    broken[20:] = reversed(broken[20:])
    own = [*world.write(20, 500), *(world.write(3), world.write(35, 520))[1]]
    pieces = [Piece(key, slots, 5 - key) for key, slots in enumerate([*shared, broken])]
    world.requests = [
        Asked(pieces, world.write(50, 500), rows),
        Asked(pieces[1:], world.write(rows, 500), rows),
        Asked(pieces[:1], own, rows),
    ]
    world.verify()
    world.verify(replace(SMALL, block_n=32, num_programs=2))


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "rotary_dim"), [(32, 32, 32), (80, 48, 20), (96, 16, 96), (16, 64, 0)]
)
def test_head_shapes(head_dim: int, value_dim: int, rotary_dim: int, group: int) -> None:
    world = World(head_dim=head_dim, value_dim=value_dim, rotary_dim=rotary_dim, group=group, kv_heads=1, seed=group)
    batch(world, requests=4).verify()


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
def test_partial_rotary_of_both_styles(neox: bool) -> None:
    batch(World(head_dim=32, rotary_dim=24, neox=neox), requests=3).verify()


def test_head_dim_of_real_models() -> None:
    config = replace(SMALL, block_n=32)
    batch(World(head_dim=128, group=4, kv_heads=2, dtype=torch.bfloat16), requests=6).verify(config)


@pytest.mark.parametrize("delta", [1_000_000, -1_000_000, -17, 0])
def test_large_and_negative_distances(delta: int) -> None:
    world = World()
    world.requests = [
        Asked([Piece(0, world.write(19, max(0, -delta)), delta)], world.write(3, max(0, delta) + 40)),
        Asked([Piece(1, world.write(5, max(0, -delta)), delta + 1)], world.write(1, max(0, delta) + 40)),
    ]
    world.verify()


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_one_run_alone(tokens: int) -> None:
    """A row with one entry takes the merge's short way; lengths around the edge of a step."""
    world = World(group=3)
    world.requests = [Asked([], world.write(tokens, 3), own_delta=-2)]
    assert len(world.plan(replace(SMALL, num_programs=1)).items) == 1
    world.verify(replace(SMALL, num_programs=1))


def test_many_segments() -> None:
    """500 runs of a row, of one to three tokens, beside a request of one."""
    world = World(size=1400, kv_heads=1)
    world.requests = [
        Asked([Piece(k, world.write(1 + k % 3, 5 * k), k % 11 - 5) for k in range(500)], world.write(2, 3000)),
        Asked([], world.write(4)),
    ]
    world.verify(replace(SMALL, merge_block=64))


@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_many_rows(block_m: int) -> None:
    """256 rows over the same blocks: several tiles of one run, the last one not full."""
    world = World(size=4000, kv_heads=1, group=1 if block_m == 16 else 3)
    batch(world, requests=256 if block_m == 128 else 37, blocks=2, chosen=1).verify(
        replace(SMALL, block_m=block_m, num_programs=3)
    )


@pytest.mark.parametrize("rows", [2, 9, 21])
def test_prefill_sees_its_own_tokens_causally(rows: int) -> None:
    """Question prefill: several rows a request, over shared blocks and a tail longer than the rows."""
    world = batch(World(kv_heads=1, group=3), requests=2, rows=rows)
    world.verify()
    world.verify(replace(SMALL, block_m=64, num_programs=30))  # splits inside the causal tails


def test_mixed_prefill_and_decode() -> None:
    world = batch(World(), requests=2, rows=1)
    world.requests.append(Asked(world.requests[0].pieces[:1], world.write(11, 200), rows=11))
    world.requests.append(Asked([], world.write(20), rows=20))
    world.verify(padding=2)


@pytest.mark.parametrize("programs", [1, 2, 7, 40, 200])
def test_splits(programs: int) -> None:
    world = batch(World(size=900), requests=4)
    world.requests.append(Asked([], world.write(230, 9)))
    plan = world.plan(replace(SMALL, num_programs=programs))
    assert (len(plan.items) > 20) == (programs >= 200)
    world.verify(plan.config)


@pytest.mark.parametrize("part_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_partial_outputs_in_half_precision(part_dtype: torch.dtype) -> None:
    world = batch(World(dtype=torch.bfloat16), requests=4)
    plan = world.plan()
    buffers = world.buffers(plan, part_dtype=part_dtype)
    buffers.load(plan, world.table())
    assert buffers.part.dtype == part_dtype
    world.check(world.query(), buffers)


def test_strided_inputs_and_outputs() -> None:
    """Queries and caches cut out of larger tensors, as projections of q, k and v together leave them."""
    world = batch(World(kv_heads=3, group=2), requests=3)
    plan = world.plan()
    buffers = world.buffers(plan)
    buffers.load(plan, world.table())
    query = world.query()
    wide = torch.full((3, 6, 50), float("nan"), device=DEVICE)
    wide[..., 20:36] = query
    both = torch.full((600, 2, 3, 24), float("nan"), device=DEVICE)
    both[:, 0, :, :16], both[:, 1, :, :16] = world.keys, world.values
    room = torch.full((6, 3, 40), float("nan"), device=DEVICE)
    out = room.transpose(0, 1)[..., 8:24]
    view_attention_plan(wide[..., 20:36], buffers, both[:, 0, :, :16], both[:, 1, :, :16], 0.25, out=out)
    close(out, world.expected(query)[0], TOLERANCE[torch.float32])
    assert room[..., :8].isnan().all() and room[..., 24:].isnan().all()


@pytest.mark.parametrize("int_type", [torch.int32, torch.int64], ids=str)
def test_advance_equals_a_fresh_plan_at_every_step(int_type: torch.dtype) -> None:
    """Decoding with one plan: tails grow inside their room, across steps of the inner loop, next to other tails."""
    world = batch(World(size=900, kv_heads=1), requests=3)
    for asked, more in zip(world.requests, (0, 10, 30), strict=True):
        asked.own += world.write(more, int(world.slot_pos[asked.own[-1]]) + 1)
    steps = 9
    config = replace(SMALL, num_programs=24)
    plan = world.plan(config, room=steps)
    assert plan.room == plan.steps_left() == steps
    buffers = world.buffers(plan, padding=2)
    table = world.table()
    buffers.load(plan, table)
    table.fill_(NOWHERE)  # the plan keeps slots of its own
    for step in range(steps + 1):
        if step:
            for asked in world.requests:
                asked.own += world.write(1, int(world.slot_pos[asked.own[-1]]) + 1)
        lengths = [*world.seq_lens(), 1, 1]
        newest = [*(asked.own[-1] for asked in world.requests), NOWHERE, NOWHERE]
        for _ in range(2):  # idempotent
            buffers.advance(
                torch.tensor(lengths, dtype=int_type, device=DEVICE),
                torch.tensor(newest, dtype=int_type, device=DEVICE),
            )
        assert plan.steps_left(lengths) == steps - step
        buffers.part.fill_(float("nan"))
        query = world.query(padding=2)
        world.check(query, buffers)
        if step % 3 == 0:
            fresh = world.plan(config)
            again = world.buffers(fresh, padding=2)
            again.load(fresh, world.table())
            world.check(query, again)


def test_advance_beyond_the_room_reaches_no_other_request() -> None:
    world = batch(World(), requests=2)
    plan = world.plan(room=2)
    buffers = world.buffers(plan)
    buffers.load(plan, world.table())
    before = buffers.kv_slots.clone()
    lengths = torch.tensor(world.seq_lens(), device=DEVICE)
    buffers.advance(lengths + 100, torch.tensor([11, 12], device=DEVICE))
    changed = (buffers.kv_slots != before).nonzero().flatten().tolist()
    ends = [int(plan.items[item, 0] + room) - 1 for item, room in zip(plan.tail_item, plan.tail_room, strict=True)]
    assert changed == sorted(ends)


def test_loading_another_plan_replaces_the_first() -> None:
    """The buffers of a CUDA graph: large batch, small batch, no rows, and the large one again."""
    world = batch(World(size=900), requests=6)
    large = world.plan(room=4)
    buffers = world.buffers(large, padding=1)
    some, everyone = world.requests[2:4], world.requests
    for requests in (everyone, some, [], everyone):
        world.requests = requests
        plan = world.plan(room=4)
        poison(buffers)
        buffers.load(plan, world.table())
        assert buffers.counts.tolist() == [len(plan.items), plan.num_rows]
        query = world.query(padding=7 - len(requests))
        if requests:
            world.check(query, buffers)
        else:
            lse = torch.full(query.shape[:2], float("nan"), device=DEVICE)
            out = view_attention_plan(query, buffers, world.keys, world.values, 0.25, lse=lse)
            assert (out == 0).all() and (lse == float("-inf")).all()


def test_runs_longer_than_one_copy() -> None:
    world = World(size=2600, kv_heads=1, group=1)
    world.requests = [Asked([Piece(0, world.write(1025), 5)], world.write(1026, 2000))]
    world.verify(replace(SMALL, block_n=128))


def test_refuses_a_plan_that_does_not_fit_and_writes_nothing() -> None:
    world = batch(World(), requests=4)
    plan = world.plan()
    for name in ("rows", "items", "entries", "angles", "slots", "workers"):
        buffers = world.buffers(plan)
        capacity = replace(buffers.capacity, **{name: getattr(buffers.capacity, name) - 1})
        small = PlanBuffers(capacity, heads=4, kv_heads=2, value_dim=16, rope=world.rope)
        packed, slots = small._packed.clone(), small.kv_slots.clone()
        wanted, held = getattr(buffers.capacity, name), getattr(capacity, name)
        with pytest.raises(ValueError, match=f"needs {wanted} {name} of {held}:"):
            small.load(plan, world.table())
        assert torch.equal(small._packed, packed) and torch.equal(small.kv_slots, slots) and small.plan is None


def test_bound_of_capacity_holds() -> None:
    for seed in range(20):
        world = batch(World(size=1500, seed=seed), requests=1 + seed, blocks=6, chosen=3)
        config = replace(SMALL, num_programs=2 + 9 * seed)
        plan = world.plan(config, room=3)
        bound = PlanCapacity.bound(1 + seed, 4, plan.num_slots, config, 2, 2)
        buffers = PlanBuffers(bound, heads=4, kv_heads=2, value_dim=16, rope=world.rope)
        buffers.load(plan, world.table())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3, 4, 24)}, "head_dim a multiple of 16"),
        ({"query": torch.zeros(3, 5, 16)}, r"query \(3, 5, 16\)"),
        ({"query": torch.zeros(3, 4, 16).double()}, "torch.float64"),
        ({"query": torch.zeros(4, 4, 16)}, "4 query rows: expected at most 3"),
        ({"query": torch.zeros(2, 4, 16)}, "2 query rows for a plan of 3"),
        ({"query": torch.zeros(3, 16, 4).transpose(1, 2)}, "last dimension contiguous"),
        ({"key_cache": torch.zeros(600, 1, 16)}, "key cache"),
        ({"value_cache": torch.zeros(600, 2, 16).half()}, "torch.float16"),
        ({"out": torch.zeros(3, 4, 8)}, "out "),
        ({"lse": torch.zeros(3, 4, 1)}, "lse "),
        ({"config": replace(SMALL, block_n=32)}, "cut for"),
    ],
)
def test_refuses_what_the_kernels_do_not_take(change: dict[str, torch.Tensor | Config], message: str) -> None:
    world = batch(World(), requests=3)
    plan = world.plan()
    buffers = world.buffers(plan)
    with pytest.raises(ValueError, match="no plan is loaded"):
        view_attention_plan(world.query(), buffers, world.keys, world.values, 1.0)
    buffers.load(plan, world.table())
    call = {"query": world.query(), "key_cache": world.keys, "value_cache": world.values, "scale": 1.0}
    call |= {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in change.items()}
    with pytest.raises(ValueError, match=message):
        view_attention_plan(buffers=buffers, **call)


def test_refuses_tables_and_lengths_of_the_wrong_kind() -> None:
    world = batch(World(), requests=3)
    plan = world.plan(room=1)
    buffers = world.buffers(plan)
    table = world.table()
    with pytest.raises(ValueError, match="contiguous row of int32"):
        buffers.load(plan, table.long())
    with pytest.raises(ValueError, match=f"slot table of {len(table) - 1}: expected at least {len(table)}"):
        buffers.load(plan, table[:-1])
    other = plan_rows(world.runs(), config=SMALL, group=1, kv_heads=4)
    with pytest.raises(ValueError, match="4 key-value heads of 1 query heads"):
        buffers.load(other, table)
    buffers.load(plan, table)
    lengths = torch.tensor(world.seq_lens(), device=DEVICE)
    with pytest.raises(ValueError, match="seq_lens"):
        buffers.advance(lengths.float(), lengths)
    with pytest.raises(ValueError, match="new_slots"):
        buffers.advance(lengths, lengths[:2])
    with pytest.raises(ValueError, match="4 rows: expected at most 3"):
        buffers.advance(
            torch.ones(4, dtype=torch.int64, device=DEVICE), torch.ones(4, dtype=torch.int64, device=DEVICE)
        )


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_ext.kernels.hopper import TILES
from sglang_ext.kernels.rope import triton_impl as angles
from sglang_ext.kernels.view_attention import buffers as upkeep
from sglang_ext.kernels.view_attention import hopper_impl as hopper
from sglang_ext.kernels.view_attention import triton_impl as kernels
from sglang_ext.kernels.view_attention.config import choose
from tests.kernels import sm90

TYPES = {"query": "*bf16", "key_cache": "*bf16", "value_cache": "*bf16", "out": "*bf16", "source": "*i64",
         "seq_lens": "*i64", "new_slots": "*i64", "scale_log2": "fp32", "size": "i32"}
TYPES |= dict.fromkeys(("cos", "sin", "part", "part_lse", "lse", "inv_freq"), "*fp32")

def compiled(kernel, config, **constants):
    names = kernel.arg_names
    types = {n: TYPES.get(n, "i32" if n.startswith("stride") else "*i32") for n in names}
    types = {n: f"tensordesc<bf16[{config.block_n}, 128]>" if n.endswith("_tiles") else t for n, t in types.items()}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n] != "constexpr" and n not in
               ("scale_log2", "size", "key_tiles", "value_tiles")}
    source = ASTSource(kernel, types, {(names.index(n),): v for n, v in constants.items()}, aligned)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

for rows, product in ((1, "mma.sync"), (12, "wgmma"), (40, "wgmma")):
    c = choose(rows, 4, 128)
    found = compiled(kernels._attend, c, KV_HEADS=8, GROUP=4, HEAD_DIM=128, VALUE_DIM=128, BLOCK_D=128, BLOCK_V=128,
                     ROTARY=128, NEOX=True, BLOCK_M=c.block_m, BLOCK_N=c.block_n, TILE_STAGES=c.tile_stages,
                     FLOAT8=False)
    assert "cp.async.bulk.tensor" in found.asm["ptx"]
    assert product in found.asm["ptx"], (rows, product)
    held = (found.metadata.shared + 1024) * c.num_programs // 132  # CUDA keeps 1 KB of each program's
    assert held <= 228 * 1024, (rows, held)
compiled(kernels._merge, c, HEADS=32, VALUE_DIM=128, BLOCK_V=128, BLOCK_E=16, WITH_LSE=True)
compiled(upkeep._advance, c, BLOCK=128)
compiled(upkeep._gather_slots, c, BLOCK=1024)
compiled(upkeep._straight, c, BLOCK=1024)
compiled(angles._angle_tables, c, HALF=64, BLOCK=64)
rotation = {"rotated": "*bf16", "counts": "*i32", "rotated_rows": "i32"}
TYPES |= rotation
compiled(hopper._rotate, c, KV_HEADS=8, GROUP=4, DIM=128, ROTARY=128, NEOX=True, PROGRAMS=hopper.ROTATING)

for rows, dim in ((12, 128), (20, 64), (40, 128)):
    c = choose(rows, 4, dim, kv_heads=8, hopper=True)
    average, multiplying, loading = hopper.REGISTERS[c.groups]
    constants = dict(KV_HEADS=8, HEADS_EACH=c.heads_each, GROUP=4, DIM=dim, BLOCK_N=c.block_n, STAGES=c.tile_stages,
                     GROUPS=c.groups, REGISTERS=multiplying, LOAD_REGISTERS=loading)
    tile = lambda rows: f"tensordesc<bf16[{rows}, {dim}],{TILES!r}>"
    types = {n: tile(64 if n == "query_tiles" else c.block_n) if n.endswith("_tiles") else
             "i32" if n.startswith("stride") else TYPES.get(n, "*i32") for n in hopper._attend.arg_names}
    found = sm90.gluon(hopper._attend, types, constants, average)
    for wanted in ("wgmma", "cp.async.bulk.tensor", "setmaxnreg"):
        assert wanted in found.asm["ptx"], (rows, wanted)
    held = (found.metadata.shared + 1024) * c.num_programs // 132
    assert held <= 228 * 1024, (rows, held)
    assert average * 32 * found.metadata.num_warps * c.num_programs // 132 <= 65536, rows
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile the kernels and run them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler may not; Triton brings what it needs to compile for sm_90 anywhere."""
    sm90.run(COMPILE, tmp_path)


HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
GROUPED = {
    groups: Config(
        block_m=64 * groups, block_n=64, tile_stages=3, num_programs=6, min_split=64, groups=groups, heads_each=heads
    )
    for groups, heads in ((1, 1), (2, 2), (3, 2))
}


@pytest.mark.skipif(not HOPPER, reason="a kernel for Hopper, which no interpreter runs")
@pytest.mark.parametrize("straight", [True, False], ids=["straight", "scattered"])
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_hopper_equals_the_reference(groups: int, rows: int, straight: bool) -> None:
    """Runs of a token and of several tiles, tails seen causally, several tiles of rows; both half types."""
    kinds = ((torch.bfloat16, 128, 4), (torch.float16, 64, 2), (torch.bfloat16, 128, 1), (torch.bfloat16, 64, 8))
    for dtype, head_dim, group in kinds:
        world = World(size=9000, kv_heads=2, group=group, head_dim=head_dim, dtype=dtype, straight=straight)
        shared = [world.write(tokens, 7 * tokens) for tokens in (1, 64, 700, 129, 500, 63)]
        for number in range(7):
            names = world.rng.choice(6, 4, replace=False).tolist()
            pieces = [Piece(name, shared[name], 100 * number - name) for name in names]
            world.requests.append(Asked(pieces, world.write(rows + 3 * number, 5000), rows))
        config = replace(GROUPED[groups], block_n=8192 // head_dim)
        world.verify(config, padding=2)
        world.verify(replace(config, num_programs=60, tile_stages=2), part_dtype=dtype)
        # What the rule chooses.
        world.verify(choose(16 * groups * 4 // group, group, head_dim, num_sms=12, kv_heads=2, hopper=True))
        with pytest.raises(ValueError, match="square tiles"):
            world.verify(replace(config, block_n=head_dim))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_one_graph_serves_every_plan() -> None:
    world = batch(World(size=900), requests=6)
    plan = world.plan(room=8)
    buffers = world.buffers(plan)
    everyone = world.requests
    query = world.query()
    out = torch.empty(6, 4, 16, device=DEVICE)
    lengths = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    newest = torch.zeros(6, dtype=torch.int64, device=DEVICE)

    def step() -> None:
        buffers.advance(lengths, newest)
        view_attention_plan(query, buffers, world.keys, world.values, 0.25, out=out, config=SMALL)

    step()  # compiles; no plan is loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for requests in (everyone, everyone[1:4], everyone[3:]):
        world.requests = requests
        buffers.load(world.plan(room=8), world.table())
        for _ in range(3):
            for asked in requests:
                asked.own += world.write(1, int(world.slot_pos[asked.own[-1]]) + 1)
            n = len(requests)
            lengths[:n] = torch.tensor(world.seq_lens(), device=DEVICE)
            newest[:n] = torch.tensor([asked.own[-1] for asked in requests], device=DEVICE)
            out.fill_(float("nan"))
            graph.replay()
            close(out[:n], world.expected(query)[0], TOLERANCE[torch.float32])
            assert (out[n:] == 0).all()
