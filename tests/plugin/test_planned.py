"""The planned backend over a fake of SGLang's: batches that change, padding of CUDA graphs, room that runs out.

What rows must see comes from the policy's views and the reference, which the engine tests compare with `transformers`.
Here decoding with and without (imagined) graphs, prefills cut into lists, and rows of the dense kernel are compared.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ext import compat
from sglang_ext.attention import model
from sglang_ext.attention.backend import ViewBackend
from sglang_ext.attention.dbsa import DbsaPolicy
from sglang_ext.attention.model import Machine
from sglang_ext.attention.policy import Caches, RequestRows
from sglang_ext.attention.readers import planned, plans, prefill
from sglang_ext.attention.readers.planned import PlannedReader
from sglang_ext.attention.readers.prefill import Prefill
from sglang_ext.cache import carried
from sglang_ext.cache.rows import NewBlock, Piece, Row
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.view_attention import Segment, View, Written, merge_states, view_attention
from sglang_ext.kernels.view_attention import plan as planning
from sglang_ext.kernels.view_attention.buffers import PlanBuffers
from sglang_ext.kernels.view_attention.config import Config
from sglang_ext.kernels.view_attention.virtual_requests import VirtualBatch
from sglang_ext.serving.label_tree import branches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, CONTEXT, SLOTS = 4, 2, 96, 400
DIM = 64 if DEVICE == "cuda" else 16  # what FlashInfer serves, as beside the real base class; less is faster here
TOLERANCE = 2e-5  # float32, of values of order one
BLOCKS = {"a": 9, "b": 17, "c": 5, "d": 12}  # tokens; they were written one after the other from position 0


class Mode:
    def __init__(self, decode: bool) -> None:
        self.decode = decode

    def is_decode(self) -> bool:
        return self.decode

    def is_idle(self) -> bool:
        return False

    def is_target_verify(self) -> bool:
        return False


class Base:
    """Stands for SGLang's backend: where it is asked, the batch was plain."""

    def __init__(self, model_runner: Any) -> None:
        self.req_to_token_pool, self.token_to_kv_pool = model_runner.req_to_token_pool, model_runner.token_to_kv_pool
        self.asked: list[str] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.asked.append("metadata")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.asked.append("graph state")

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.asked.append("capture" if in_capture else "replay")

    def forward_decode(self, q: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.asked.append("decode")
        return q

    forward_extend = forward_decode


class Backend(ViewBackend, Base):
    """The adapter over the fake, with a reader of planned views."""

    reader: PlannedReader

    def __init__(self, model_runner: Any, dense: Any = None) -> None:
        super().__init__(model_runner, DbsaPolicy(), lambda *args: PlannedReader(*args[:2], Machine("triton", None)))
        self.reader.prefills.dense = dense

    @property
    def plan(self) -> Any:
        """Of the newest decoding step."""
        last = self.reader.decodes._last
        return None if last is None else last.plan

    @property
    def prefill(self) -> Prefill:
        """The newest prefill, which had views."""
        assert isinstance(self.loaded, Prefill)
        return self.loaded


class Dense:
    """A dense prefill kernel over virtual requests, in plain PyTorch."""

    def __init__(self, world: World) -> None:
        self.world = world

    def plan(self, batch: VirtualBatch) -> None:
        assert batch.causal
        self.batch = batch

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        row = token = 0
        for rows, tokens in zip(self.batch.rows, self.batch.tokens, strict=True):
            slots = self.batch.kv_slots[token : token + tokens]
            # Columns as positions: nothing is rotated here, so only the causal mask reads them.
            seen = torch.arange(tokens - rows, tokens, device=query.device)
            mask = torch.arange(tokens, device=query.device)[None] <= seen[:, None]
            q = query[row : row + rows].view(rows, KV_HEADS, -1, DIM)
            logits = torch.einsum("rhgd,thd->hgrt", q, keys[slots]) * DIM**-0.5
            weights = torch.softmax(logits.masked_fill(~mask, float("-inf")), -1) if tokens else logits
            out[row : row + rows] = torch.einsum("hgrt,thd->rhgd", weights, values[slots]).reshape(rows, HEADS, DIM)
            row, token = row + rows, token + tokens


class World:
    """Slots, caches, requests, and the backend over them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        generator = torch.Generator().manual_seed(0)
        rope = Rope((0.5 ** torch.arange(DIM // 2)).to(DEVICE))
        self.pool = SimpleNamespace(req_to_token=torch.zeros(8, CONTEXT, dtype=torch.int32, device=DEVICE))
        self.caches = [torch.randn(SLOTS, KV_HEADS, DIM, generator=generator).to(DEVICE) for _ in range(2)]
        kv = SimpleNamespace(
            dtype=torch.float32,
            start_layer=0,
            layer_num=1,
            get_key_buffer=lambda _: self.caches[0],
            get_value_buffer=lambda _: self.caches[1],
        )
        shape = compat.AttentionShape(HEADS, KV_HEADS, DIM, DIM, torch.float32, DIM**-0.5, num_sms=2)
        monkeypatch.setattr(compat, "attention_shape", lambda _: shape)
        monkeypatch.setattr(compat, "num_kv_slots", lambda _: SLOTS)
        monkeypatch.setattr(model, "find_rope", lambda _: rope)
        self.rope = rope
        config = SimpleNamespace(hf_text_config=SimpleNamespace())
        self.runner = SimpleNamespace(
            req_to_token_pool=self.pool, token_to_kv_pool=kv, model=torch.nn.Module(), model_config=config
        )
        self.backend = Backend(self.runner)
        self.slot_pos = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        self.blocks: dict[str, tuple[int, int]] = {}  # name -> (first slot, first position)
        self.free, position = 1, 0
        for name, tokens in BLOCKS.items():
            self.blocks[name] = (self.free, position)
            self.slot_pos[self.free : self.free + tokens] = torch.arange(position, position + tokens)
            self.free, position = self.free + tokens, position + tokens
        self.made = 0

    def request(
        self, names: str, own: int, slot: int, new: tuple[NewBlock, ...] = (), question: int | None = None
    ) -> SimpleNamespace:
        """A scheduler's request over the blocks `names`, with `own` tokens behind them; no names: a plain one.

        With `question`, the new blocks are branches behind so many of its own tokens.
        """
        pieces = tuple(Piece(name, 0, BLOCKS[name]) for name in names)
        row = Row(pieces, new, own=question) if names or new else None
        self.made += 1
        req = SimpleNamespace(
            req_pool_idx=slot,
            kv=SimpleNamespace(req_pool_idx=slot),
            rid=f"r{self.made}",
            origin_input_ids=[],
            sampling_params=SimpleNamespace(custom_params=None),
            length=0,
        )
        carried.set_request_row(req, row)
        carried.set_request_written(req, tuple(self.blocks[name][1] for name in names))
        table = self.pool.req_to_token[slot]
        for name in names:
            first = self.blocks[name][0]
            table[req.length : req.length + BLOCKS[name]] = torch.arange(first, first + BLOCKS[name])
            req.length += BLOCKS[name]
        self.grow(req, own)
        return req

    def grow(self, req: SimpleNamespace, tokens: int = 1) -> None:
        """New slots for the request's next tokens, at their columns unless blocks are encoded."""
        slots = torch.arange(self.free, self.free + tokens, dtype=torch.int32, device=DEVICE)
        self.pool.req_to_token[req.req_pool_idx, req.length : req.length + tokens] = slots
        positions = self.backend.policy.positions(
            SimpleNamespace(row=carried.request_row(req)), req.length, req.length + tokens
        )
        columns = range(req.length, req.length + tokens)
        self.slot_pos[slots.long()] = torch.tensor(positions or list(columns), dtype=torch.int32, device=DEVICE)
        self.free, req.length = self.free + tokens, req.length + tokens

    def forward(self, reqs: list[SimpleNamespace], new: list[int], padding: int | None = None) -> torch.Tensor:
        """One layer over each request's last `new` tokens; with `padding`, as the replay of a graph with more rows."""
        decode = new == [1] * len(reqs)
        lengths = torch.tensor([req.length for req in reqs])
        ends = [(req.length - n, req.length) for req, n in zip(reqs, new, strict=True)]
        rows = [self.pool.req_to_token[req.req_pool_idx, low:high] for req, (low, high) in zip(reqs, ends, strict=True)]
        out_cache_loc = torch.cat(rows).long()
        batch = SimpleNamespace(
            batch_size=len(reqs),
            forward_mode=Mode(decode),
            extend_seq_lens_cpu=None if decode else new,
            extend_prefix_lens_cpu=None if decode else [low for low, _ in ends],
            seq_lens_cpu=lengths,
            seq_lens=lengths.to(DEVICE),
            out_cache_loc=out_cache_loc,
            positions=self.slot_pos[out_cache_loc].long(),
        )
        self.backend.prepare(SimpleNamespace(reqs=reqs), batch)
        query = torch.randn(sum(new) + (padding or 0), HEADS, DIM, generator=torch.Generator().manual_seed(self.free))
        query = query.to(DEVICE)
        layer = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM, scaling=DIM**-0.5)
        if padding is None or not decode:
            self.backend.init_forward_metadata(batch)
        else:
            assert self.backend.fits_graph(verifies=False)
            batch.seq_lens = torch.cat([batch.seq_lens, torch.ones(padding, dtype=torch.long, device=DEVICE)])
            self.backend.init_forward_metadata_out_graph(batch)
        run = self.backend.forward_decode if decode else self.backend.forward_extend
        out = run(query.view(len(query), -1), None, None, layer, batch).view(len(query), HEADS, -1)
        if self.backend.viewing:
            self.check(reqs, ends, query, out)
        return out

    def check(self, reqs: Any, ends: Any, query: torch.Tensor, out: torch.Tensor) -> None:
        first = 0
        for req, (low, high) in zip(reqs, ends, strict=True):
            request = self.backend.requests.note(req)
            slots = self.pool.req_to_token[req.req_pool_idx, :high]
            rows = RequestRows(request, slots, low, self.slot_pos)
            views = self.backend.policy.views(rows) or [(low, high, View((Segment(slots, Written(), causal=True),)))]
            for begin, end, view in views:
                part = slice(first + begin - low, first + end - low)
                positions = self.slot_pos[slots[begin:end].long()].long()
                parts = ()
                if callable(view):
                    caches = Caches(0, *self.caches, self.slot_pos, self.rope, DIM**-0.5)
                    attended = view(caches, query[part], positions)
                    view, parts = attended.view, attended.parts
                expected, lse = view_attention(
                    query[part], positions, view, *self.caches, self.slot_pos, self.rope, DIM**-0.5
                )
                outs, lses = zip((expected, lse), *parts, strict=True)
                expected, _ = merge_states(torch.stack(outs), torch.stack(lses))
                torch.testing.assert_close(out[part], expected, atol=TOLERANCE, rtol=0)
            first += high - low
        assert not out[first:].any(), "padded rows are zero"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_decoding_while_the_batch_changes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared blocks at different positions, a plain request among them, room that runs out, a slot used again."""
    monkeypatch.setattr(planned, "ROOM", 2)
    first, second, plain = world.request("acb", 4, 1), world.request("abd", 7, 2), world.request("", 30, 3)
    batch = [first, second, plain]
    plans = []
    for step in range(10):
        if step == 4:
            world.backend.release(2)
            batch = [first, plain]
        if step == 6:
            batch = [plain, world.request("dc", 5, 2), first]
        for req in batch:
            world.grow(req)
        world.forward(batch, [1] * len(batch))
        if not plans or plans[-1] is not world.backend.plan:
            plans.append(world.backend.plan)
    assert len(plans) >= 4  # three batches, and room for two steps more
    assert world.backend.asked == []


def test_a_plan_is_kept_while_it_holds(world: World) -> None:
    req = world.request("ab", 3, 1)
    kept = []
    for _ in range(3):
        world.grow(req)
        world.forward([req], [1])
        kept.append(world.backend.plan)
    assert kept[0] is kept[1] is kept[2] and kept[0] is not None


def test_a_row_that_the_tree_rewrites_while_its_request_decodes(world: World) -> None:
    """Under overlap a request has decoded once when the tree takes its prompt, and frees what it knew already."""
    batch = [world.request("ab", 5, 1), world.request("ba", 4, 2)]
    for req in batch:
        world.grow(req)
    world.forward(batch, [1, 1])
    plan = world.backend.plan
    world.backend.rewritten(3)
    for req in batch:
        world.grow(req)
    world.forward(batch, [1, 1])
    assert world.backend.plan is plan, "another request's row is not this plan's"
    freed = world.pool.req_to_token[1, 26:29].clone().long()
    others = torch.arange(world.free, world.free + 3, device=DEVICE)
    world.free += 3
    world.slot_pos[others] = world.slot_pos[freed]
    for cache in world.caches:
        cache[freed] = float("nan")  # somebody else's now
    world.pool.req_to_token[1, 26:29] = others.int()
    world.backend.rewritten(1)
    for req in batch:
        world.grow(req)
    world.forward(batch, [1, 1])


def test_a_block_named_twice(world: World) -> None:
    """Equal demonstrations are one block; beside another request that sees it once, and while a step decodes."""
    batch = [world.request("aba", 3, 1), world.request("ba", 4, 2)]
    world.forward(batch, [3, 2])
    for req in batch:
        world.grow(req)
    world.forward(batch, [1, 1])


def test_the_lists_of_a_prefill_share_their_partial_outputs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are most of the memory; a full list, cut for many workers, has more entries than it was planned with."""
    monkeypatch.setattr(plans, "SLICE_ENTRIES", 480)
    monkeypatch.setattr(prefill, "BY_REQUEST_PAIRS", 10_000)
    backend = world.backend = Backend(world.runner)
    batch = [world.request("acbd", 48, slot) for slot in range(1, 6)]
    world.forward(batch, [48] * 5)
    work = backend.prefill
    assert len(work.lists) == 3
    assert len(work.lists[0][2].plan.entry_row) * 1.25 > len(backend.reader.memory.first.part), "no room to spare"
    assert {buffers.part.data_ptr() for *_, buffers in work.lists} == {backend.reader.memory.first.part.data_ptr()}


def test_buffers_are_made_once_for_plans_that_alternate(world: World) -> None:
    """Few rows on many workers, and the other way round: pinned memory is slow to make."""
    backend = world.backend
    request = backend.requests.note(world.request("ab", 40, 1))
    plans = []
    for rows, programs in ((40, 2), (2, 8)):
        (seen,) = DbsaPolicy().runs(request, 66 - rows, 66) or ()
        listed = [backend.reader.planner.rows(request, seen, 0)]
        plans.append(planning.plan_rows(listed, config=Config(num_programs=programs), group=2, kv_heads=2))
    for plan in plans:
        backend.reader.memory.load(plan, 1)
    kept = backend.reader.memory._grown[1]
    assert all(backend.reader.memory.load(plan, 1) is kept for plan in plans)


def test_graphs_and_their_padding(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays give what runs without a graph give, and the two may alternate."""
    monkeypatch.setattr(compat, "capturing_views", lambda: True)
    world.backend.begin_capture([2, 4])
    world.backend.init_cuda_graph_state(4, 4)
    for size in (4, 2):
        world.backend.init_forward_metadata_out_graph(
            SimpleNamespace(batch_size=size, forward_mode=ForwardMode.DECODE), in_capture=True
        )
    batch = [world.request("acb", 4, 1), world.request("ba", 2, 2), world.request("", 9, 4)]
    for padding in (1, None, 1, 1):
        for req in batch:
            world.grow(req)
        world.forward(batch, [1, 1, 1], padding)
    assert world.backend.asked == ["graph state"]


def test_a_plain_batch_is_the_bases(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "capturing_views", lambda: False)
    world.backend.init_cuda_graph_state(2, 2)
    world.backend.init_forward_metadata_out_graph(
        SimpleNamespace(batch_size=2, forward_mode=ForwardMode.DECODE), in_capture=True
    )
    req = world.request("", 5, 1)
    world.forward([req], [5])
    world.grow(req)
    world.forward([req], [1])
    assert world.backend.asked == ["graph state", "capture", "metadata", "decode", "metadata", "decode"]


@pytest.mark.parametrize("entries", [16384, 24])
def test_questions_in_one_list_or_several(world: World, monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    monkeypatch.setattr(plans, "SLICE_ENTRIES", entries)
    batch = [world.request("acb", 13, 1), world.request("", 11, 2), world.request("abd", 3, 3)]
    world.forward(batch, [13, 6, 2])
    assert (len(world.backend.prefill.lists) > 1) == (entries == 24)


def test_requests_that_no_list_holds_read_their_runs_one_by_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a request without a pool; not where requests have few rows, nor where runs are long."""
    monkeypatch.setattr(plans, "SLICE_ENTRIES", 100)
    batch = [world.request("acb", 33, 1), world.request("", 31, 2), world.request("abd", 12, 3)]
    world.forward(batch, [33, 20, 12])
    work = world.backend.prefill
    assert work.by_request is not None and not work.lists and work.kind == "by_request"
    assert world.backend.reader.stats()["view_prefills"]["by_request"] == 1
    assert work.by_request.plan.num_rows == 65
    for number, (name, value) in enumerate((("BY_REQUEST_PAIRS", 1000), ("BY_REQUEST_TOKENS", 3))):
        with monkeypatch.context() as changed:
            changed.setattr(prefill, name, value)
            batch = [world.request("acb", 40, 4 + 2 * number), world.request("abd", 12, 5 + 2 * number)]
            world.forward(batch, [40, 12])
        assert world.backend.prefill.kind == "lists" and len(world.backend.prefill.lists) > 1


def test_dense_rows_beside_requests_that_read_their_runs_one_by_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "DENSE_ROWS", 4)
    monkeypatch.setattr(plans, "SLICE_ENTRIES", 100)
    world.backend = Backend(world.runner, Dense(world))
    encoding = world.request("ab", 8, 2, (NewBlock("x", 8, 26, ((0, 0), (1, 9))),))
    world.forward([world.request("acb", 30, 1), encoding, world.request("abd", 22, 3)], [30, 8, 22])
    work = world.backend.prefill
    assert work.dense is not None and work.by_request is not None and work.listed is not None
    assert work.listed.tolist() == [*range(30), *range(38, 60)]


def test_every_size_of_tiles_is_compiled_at_the_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    load = prefill.load
    monkeypatch.setattr(prefill, "load", lambda plan, *given: (made.append(plan.block_m), load(plan, *given))[1])
    world.backend.reader.prefills.warm_up()
    assert made == [16, 32, 64, 128]


@pytest.mark.parametrize("question", [0, 5])
def test_branches_behind_a_question(world: World, question: int) -> None:
    """Labels that are scored, beside a request that answers; whole, and cut by a chunk."""
    stitched = BLOCKS["a"] + BLOCKS["c"]
    labels = [(1,), (1, 2), (1, 2, 3), (1, 4, 5, 6), (2, 1), (2, 2, 2, 2, 2)]
    found = branches(labels, 9, stitched + question)
    columns = len(found.token_ids)
    scored = world.request("ac", question + columns, 1, tuple(found.blocks), question)
    answering = world.request("cb", 6, 2)
    world.forward([scored, answering], [question + columns, 6])
    world.forward([answering, scored], [6, columns - 3])
    scored.length -= 4
    world.forward([scored], [columns - 7])


def test_rows_of_the_dense_kernel_beside_a_list(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are encoded where nothing is rotated, between questions; one block of the row is rotated."""
    monkeypatch.setattr(prefill, "DENSE_ROWS", 4)
    world.backend = Backend(world.runner, Dense(world))
    straight = NewBlock("x", 8, 26, ((0, 0), (1, 9)))  # sees a and b where they were written
    rotated = NewBlock("y", 5, 14, ((0, 0),))  # at position 14: behind a part of x, which it does not see
    shifted = NewBlock("z", 6, 40, ((1, 30),))  # sees b elsewhere
    encoding = world.request("ab", 19, 2, (straight, rotated, shifted))
    batch = [world.request("acb", 3, 1), encoding, world.request("abd", 2, 3)]
    world.forward(batch, [3, 19, 2])
    work = world.backend.prefill
    assert work.dense is not None and work.listed is not None
    assert sorted(work.listed.tolist()) == [0, 1, 2, *range(16, 22), 22, 23]


def test_the_dense_kernel_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "DENSE_ROWS", 4)
    world.backend = Backend(world.runner, Dense(world))
    straight = NewBlock("x", 8, 26, ((0, 0), (1, 9)))
    world.forward([world.request("ab", 8, 1, (straight,))], [8])
    work = world.backend.prefill
    assert work.dense is not None and not work.lists and work.listed is None


def test_warming_up_runs_the_kernels_and_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server does it before its first request, so that none waits for a compiler."""
    world.backend = Backend(world.runner, Dense(world))
    ran: list[str] = []
    for owner, name in ((prefill, "view_attention_plan"), (PlanBuffers, "advance"), (Dense, "plan"), (Dense, "run")):
        original = getattr(owner, name)

        def noted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            ran.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)
    before = [cache.clone() for cache in world.caches]
    world.backend.reader.prefills.warm_up()
    assert set(ran) == {"view_attention_plan", "advance", "plan", "run"}
    assert all(torch.equal(old, new) for old, new in zip(before, world.caches, strict=True))


def test_which_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext.attention import choice, select
    from sglang_ext.systems.registry import System, systems

    plain, dbsa = System("", "json:loads"), systems()["dbsa"]
    monkeypatch.delenv("SGLANG_EXT_KERNELS", raising=False)
    monkeypatch.setattr(choice, "_hopper", lambda: False)
    assert not choice.captures(dbsa, "auto")
    monkeypatch.setattr(choice, "_hopper", lambda: True)
    for name in ("dbsa", "double_p", "dbsa+double_p", "cascade", "streaming_llm"):
        found = [choice.kernels(systems()[name], t) for t in ("auto", "bfloat16", "half", "float32", "float")]
        assert found == ["flashinfer"] * 3 + ["torch"] * 2, "FlashInfer has no float32"
    assert choice.kernels(plain, "auto") == "torch"
    assert {choice.kernels(systems()[name], "auto") for name in ("quest", "retroinfer", "twilight")} == {"torch"}
    assert choice.kernels(systems()["infllm"], "auto") == "torch", "asked for alone"
    assert choice.kernels(systems()["ltri"], "auto") == "flashinfer"
    monkeypatch.setenv("SGLANG_EXT_KERNELS", "triton")
    assert choice.kernels(dbsa, "auto") == "triton"
    assert choice.kernels(plain, "auto") == "torch", "a system without kernels is served by plain PyTorch"
    assert choice.captures(dbsa, "auto") == torch.cuda.is_available()
    runner = SimpleNamespace(server_args=SimpleNamespace(dtype="auto"), kv_cache_dtype=torch.bfloat16)
    monkeypatch.setattr(compat, "refuse_model", lambda *_: None)
    monkeypatch.setenv("SGLANG_EXT_KERNELS", "fast")
    with pytest.raises(ValueError, match="SGLANG_EXT_KERNELS=fast"):
        select.make_backend(runner, dbsa)
    if not torch.cuda.is_available():
        monkeypatch.setenv("SGLANG_EXT_KERNELS", "flashinfer")
        with pytest.raises(ValueError, match="GPU"):
            select.make_backend(runner, dbsa)


def test_questions_inside_graphs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned into the buffers of the graphs, rows padded to the graph's; beside graphs that lack room, and none."""
    monkeypatch.setattr(plans, "SLICE_ENTRIES", 70)
    backend = world.backend = Backend(world.runner)
    backend.init_question_graphs([16, 32, 2048])
    assert not backend.capture_question(2048)
    for size in (32, 16):
        assert backend.capture_question(size) and backend.in_question_graph()
        backend.end_capture()
        assert not backend.in_question_graph()
    batch = [world.request("acb", 13, 1), world.request("", 11, 2), world.request("abd", 3, 3)]
    for new, size, inside in (([7, 6, 2], 16, True), ([13, 6, 2], 32, True), ([13, 11, 3], 32, False)):
        backend.question_size = size
        world.forward(batch, new, padding=size - sum(new))
        assert backend.in_question_graph() == inside
        backend.question_size = None
    world.forward(batch, [7, 6, 2])
    assert not backend.in_question_graph()
    world.forward([world.request("", 9, 4)], [9])
    assert not backend.in_question_graph()
