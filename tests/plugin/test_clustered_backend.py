"""The kernels' backend for clusters over a fake of SGLang's, against the same policy in plain PyTorch.

The policy's own outputs are compared with `transformers` by the engine tests. Here batches change, graphs are padded
(and imagined), rows grow past what is clustered at once, runs are cut, blocks are rotated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext import compat
from sglang_ext.attention import model
from sglang_ext.attention.backend import ViewBackend
from sglang_ext.attention.double_p import DbsaDoublePPolicy, DoublePPolicy
from sglang_ext.attention.model import Machine
from sglang_ext.attention.policy import Attended, Caches, RequestRows
from sglang_ext.attention.readers import clusters
from sglang_ext.attention.readers.clusters import ClusterReader
from sglang_ext.attention.requests import RequestTable
from sglang_ext.attention.sparse import ASKED_DENSE, REPORT
from sglang_ext.cache import carried
from sglang_ext.cache.cluster_pool import PooledRun
from sglang_ext.cache.clusters import cluster_run
from sglang_ext.cache.rows import Piece, Row
from sglang_ext.compat import TreeNode
from sglang_ext.config import POLICY_ENV
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.view_attention import Segment, View, Written, merge_states, view_attention
from tests.plugin.test_planned import Base, Mode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, CONTEXT, SLOTS = 4, 2, 192, 1200
DIM = 64 if DEVICE == "cuda" else 16  # what FlashInfer serves, as beside the real base class; less is faster here
TOLERANCE = 2e-5  # float32, of values of order one
BLOCKS = {"a": 30, "b": 41, "c": 25}  # tokens; they were written one after the other from position 0
POLICY = {"sink": 3, "window": 6, "min_tokens": 20, "cluster": 4, "segment": 64, "append": 16, "p1": 0.9, "p2": 0.5}


class Backend(ViewBackend, Base):
    """The adapter over the fake, with a reader of clusters.

    Attributes:
        placed: clusters of each row of the newest decoding step; what kernels are told of each is in `rows`.
        fitted: whether graphs hold it.
    """

    reader: ClusterReader

    def __init__(self, model_runner: Any, policy: DoublePPolicy) -> None:
        super().__init__(model_runner, policy, lambda *args: ClusterReader(*args[:2], Machine("triton", None)))
        self.memory = self.reader.decodes.memory

    def prepare(self, batch: Any, forward_batch: Any) -> None:
        super().prepare(batch, forward_batch)
        step = self.prepared
        if isinstance(step, clusters.ClusterStep):
            self.placed, self.rows = [row.placed for row in step.known], step.rows
            self.fitted = self.fits_graph(verifies=False)


def node(parent: TreeNode | None, slots: torch.Tensor) -> TreeNode:
    found = TreeNode()
    found.parent, found.value, found.key = parent, slots, slots.tolist()
    return found


class World:
    """Slots, caches, requests, the backend over them, and the policy as the PyTorch backend drives it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[DoublePPolicy], **policy: Any) -> None:
        monkeypatch.setattr(clusters, "GRAPH_ROTATIONS", 3)  # programs take long in the interpreter
        monkeypatch.setenv(POLICY_ENV, json.dumps({**POLICY, **policy}))
        gen = torch.Generator().manual_seed(0)
        rope = Rope((0.5 ** torch.arange(DIM // 2)).to(DEVICE))
        table = SimpleNamespace(req_to_token=torch.zeros(8, CONTEXT, dtype=torch.int32, device=DEVICE))
        keys, values = (torch.randn(SLOTS, KV_HEADS, DIM, generator=gen).to(DEVICE) for _ in range(2))
        keys *= 2  # some clusters matter more than others
        kv = SimpleNamespace(
            dtype=torch.float32,
            start_layer=0,
            layer_num=1,
            get_key_buffer=lambda _: keys,
            get_value_buffer=lambda _: values,
        )
        shape = compat.AttentionShape(HEADS, KV_HEADS, DIM, DIM, torch.float32, DIM**-0.5, num_sms=2)
        monkeypatch.setattr(compat, "attention_shape", lambda _: shape)
        monkeypatch.setattr(compat, "num_kv_slots", lambda _: SLOTS)
        monkeypatch.setattr(model, "find_rope", lambda _: rope)
        config = SimpleNamespace(hf_text_config=SimpleNamespace())
        runner = SimpleNamespace(
            req_to_token_pool=table, token_to_kv_pool=kv, model=torch.nn.Module(), model_config=config
        )
        self.table, self.backend = table.req_to_token, Backend(runner, kind())
        self.policy = kind()
        self.policy.bind(lambda: {0: (keys, values)}, torch.float32)
        self.requests = RequestTable(self.policy)
        self.slot_pos = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        self.caches = Caches(0, keys, values, self.slot_pos, rope, DIM**-0.5)
        self.root, self.blocks, self.free, position = TreeNode(), {}, 1, 0
        for name, tokens in BLOCKS.items():
            slots = self.take(tokens, range(position, position + tokens))
            self.blocks[name] = (node(self.root, slots), position)
            position += tokens
        self.made = 0
        self.reports: list[tuple[Any, Any]] = []  # of each row of a step: the kernels' figures, those of plain PyTorch
        self.notes: list[bool] = []  # of each step, whether the PyTorch policy read anything but all tokens

    def take(self, tokens: int, positions: range) -> torch.Tensor:
        slots = torch.arange(self.free, self.free + tokens, device=DEVICE)
        self.slot_pos[slots] = torch.tensor(list(positions), dtype=torch.int32, device=DEVICE)
        self.free += tokens
        return slots

    def request(self, own: int, slot: int, pieces: Sequence[tuple[str, int, int]] = (), **options: Any) -> Any:
        """A scheduler's request over pieces of blocks, with `own` tokens behind them."""
        row = Row(tuple(Piece(*piece) for piece in pieces)) if pieces else None
        self.made += 1
        req = SimpleNamespace(
            req_pool_idx=slot,
            kv=SimpleNamespace(req_pool_idx=slot),
            rid=f"r{self.made}",
            sampling_params=SimpleNamespace(custom_params=options),
            length=0,
        )
        req.customized_info = None
        carried.set_request_row(req, row)
        carried.set_request_written(req, tuple(self.blocks[name][1] + start for name, start, _ in pieces))
        members = tuple(self.blocks[name][0] for name in dict.fromkeys(name for name, *_ in pieces))
        req.last_node = SimpleNamespace(members=members, tail=self.root) if pieces else self.root
        for name, start, end in pieces:
            self.put(req, self.blocks[name][0].value[start:end])
        self.grow(req, own)
        req.origin_input_ids = range(req.length)
        return req

    def put(self, req: Any, slots: torch.Tensor) -> None:
        self.table[req.req_pool_idx, req.length : req.length + len(slots)] = slots.int()
        req.length += len(slots)

    def grow(self, req: Any, tokens: int = 1) -> None:
        self.put(req, self.take(tokens, range(req.length, req.length + tokens)))

    def prefill(self, req: Any, begin: int = 0) -> None:
        """What both policies see of a prompt's chunk; its attention is nobody's concern here."""
        self.run([req], [req.length - begin])

    def step(self, reqs: Sequence[Any], padding: int | None = None) -> torch.Tensor:
        for req in reqs:
            self.grow(req)
        return self.run(reqs, [1] * len(reqs), padding, decode=True)

    def run(self, reqs: Any, new: list[int], padding: int | None = None, decode: bool = False) -> torch.Tensor:
        ends = [(req.length - n, req.length) for req, n in zip(reqs, new, strict=True)]
        rows = [self.table[req.req_pool_idx, low:high] for req, (low, high) in zip(reqs, ends, strict=True)]
        lengths, slots = torch.tensor([req.length for req in reqs]), torch.cat(rows).long()
        batch = SimpleNamespace(
            batch_size=len(reqs),
            forward_mode=Mode(decode),
            extend_seq_lens_cpu=None if decode else new,
            extend_prefix_lens_cpu=None if decode else [low for low, _ in ends],
            seq_lens_cpu=lengths,
            seq_lens=lengths.to(DEVICE),
            out_cache_loc=slots,
            positions=self.slot_pos[slots].long(),
        )
        backend = self.backend
        backend.prepare(SimpleNamespace(reqs=reqs), batch)
        query = torch.randn(len(slots) + (padding or 0), HEADS, DIM, generator=torch.Generator().manual_seed(self.free))
        query = query.to(DEVICE)
        layer = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM, scaling=DIM**-0.5)
        if padding is None:
            backend.init_forward_metadata(batch)
        else:
            assert backend.viewing and backend.fits_graph(verifies=False)
            batch.seq_lens = torch.cat([batch.seq_lens, torch.ones(padding, dtype=torch.long, device=DEVICE)])
            backend.init_forward_metadata_out_graph(batch)
        if not decode:
            for req, (low, high) in zip(reqs, ends, strict=True):
                self.expected(req, low, high, query[:0])
            return query
        out = backend.forward_decode(query.view(len(query), -1), None, None, layer, batch)
        out = out.view(len(query), HEADS, -1)
        for row, (req, (low, high)) in enumerate(zip(reqs, ends, strict=True)):
            noted = self.figures(req, high)
            want = self.expected(req, low, high, query[row : row + 1])
            if backend.viewing:
                torch.testing.assert_close(out[row : row + 1], want, atol=TOLERANCE, rtol=0)
                self.reports.append((noted, self.figures(req, high)))
        assert not backend.viewing or not out[len(reqs) :].any(), "padded rows are zero"
        return out

    def figures(self, req: Any, end: int) -> dict[str, Any] | None:
        """What the last policy that began this pass said of it."""
        noted = (req.customized_info or {}).get(REPORT)
        return None if noted is None else noted[end - len(req.origin_input_ids)]

    def expected(self, req: Any, low: int, high: int, query: torch.Tensor) -> torch.Tensor | None:
        request, decode = self.requests.note(req), high - low == 1
        self.policy.before_pass(request, req, low, high, decode)
        rows = RequestRows(request, self.table[req.req_pool_idx, :high], low, self.slot_pos, decode)
        views = self.policy.views(rows)
        if not len(query):
            return None
        view: Any = View((Segment(rows.slots, Written(), causal=True),)) if views is None else views[0][2]
        self.notes.append(callable(view))
        position, c = torch.tensor([low], device=DEVICE), self.caches
        found = view(c, query, position) if callable(view) else view
        found = found if isinstance(found, Attended) else Attended(found)
        state = view_attention(query, position, found.view, c.keys, c.values, c.slot_pos, c.rope, c.scale)
        outs, lses = zip(state, *found.parts, strict=True)
        return merge_states(torch.stack(outs), torch.stack(lses))[0]

    def release(self, req: Any) -> None:
        self.backend.release(req.req_pool_idx)
        self.requests.release(req.req_pool_idx)

    def known(self, slots: torch.Tensor, begin: int, end: int, at: TreeNode, until: int | None = None) -> None:
        """Both policies' stores have a run of tokens [begin, end) at a node that has them up to `until`."""
        run = cluster_run(
            {0: (self.caches.keys, self.caches.values)}, slots[begin:end], begin,
            cluster=4, iterations=10, assignment="inner",
        )  # fmt: skip
        pooled = self.backend.memory.make(slots[begin:end].clone(), begin)
        assert pooled is not None
        for policy, each in ((self.policy, run), (self.backend.policy, pooled)):
            policy.store.add(at, each)
            if until is not None:
                (held,) = policy.store._held[at.id]
                policy.store._held[at.id] = [type(held)(held.run, until)]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, DoublePPolicy)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, DbsaDoublePPolicy)


def test_rows_with_mixed_options(plain: World) -> None:
    """Two stages, everything exact, dense, nothing exact; a short one; a batch that shrinks and grows."""
    batch = [
        plain.request(100, 1),
        plain.request(77, 2, p1=1, p2=1),
        plain.request(60, 3, dense=True),
        plain.request(90, 4, p1=0.8, p2=0),
        plain.request(9, 5),
    ]
    for _ in range(2):
        plain.step(batch)
    plain.release(batch[1])
    plain.step([batch[3], batch[0]])
    plain.step([batch[0], plain.request(70, 2), batch[4]])
    assert plain.notes[:5] == [True, True, False, True, False]
    assert plain.backend.asked == [] and plain.backend.memory.refused == 0


def test_the_last_selection_is_told(plain: World) -> None:
    assert plain.backend.reader.decodes.selected() == {}
    whole, none = plain.request(100, 1, p1=1, p2=1), plain.request(100, 2, p1=1, p2=0)
    plain.step([whole])
    assert plain.backend.reader.decodes.selected() == {"rows": 1, "exact_tokens": 1, "approximated_clusters": 0}
    plain.step([none, whole])
    assert plain.backend.reader.decodes.selected() == {"rows": 2, "exact_tokens": 0.5, "approximated_clusters": 0.5}


def compared(world: World) -> list[dict[str, Any]]:
    """The kernels' figures of the rows that wanted some, which are those of plain PyTorch."""
    found = [pair for pair in world.reports if pair != (None, None)]
    for kernels, plain in found:
        assert kernels is not plain and kernels.keys() == plain.keys()
        for name, values in kernels.items():
            assert values == pytest.approx(plain[name], abs=1e-5), name
    return [kernels for kernels, _ in found]


def test_steps_are_measured_on_demand(plain: World) -> None:
    """Sparse, exact, dense and short rows, beside one that is not measured; each step alone decides about its graph."""
    kinds: list[dict[str, Any]] = [{}, {"p1": 1, "p2": 1}, {"dense": True}, {"p1": 0.6, "p2": 0.2}]
    batch = [plain.request(n, slot, **kind, attention_report=True) for n, slot, kind in
             zip((100, 77, 60, 90), (1, 2, 3, 4), kinds, strict=True)]  # fmt: skip
    backend = plain.backend
    backend.init_cuda_graph_state(8, 8)
    other = plain.request(80, 5)
    plain.step([*batch, plain.request(9, 6, attention_report=True), other])
    assert not backend.fitted
    sparse, everything, dense, little, short = compared(plain)
    assert everything["exact"] == [1.0] and everything["recovered_least"][0] > 1 - 1e-6
    assert dense == {"dense": ASKED_DENSE} and list(short) == ["dense"] and "min_tokens" in short["dense"]
    for figures in (sparse, little):
        assert 0 < figures["exact"][0] < figures["kept"][0] < 1 and 0 < figures["approximated_clusters"][0] < 1
        assert 0 < figures["recovered_least"][0] < figures["recovered"][0] < 1
    assert little["kept"] < sparse["kept"]
    plain.step([other], 1)  # in a graph
    plain.step([batch[3], other])
    assert len(compared(plain)) == 6


def test_blocks_that_are_rotated_are_measured(pools: World) -> None:
    a, b, c = (("a", 0, 30), ("b", 0, 41), ("c", 0, 25))
    pools.step([
        pools.request(5, 1, (a, c, b), attention_report=True),
        pools.request(9, 2, (("b", 4, 33), a, b), attention_report=True),  # the same slots twice, and cut
        pools.request(3, 3, (a, ("c", 5, 9)), p1=1, p2=0.9, attention_report=True),
    ])  # fmt: skip
    found = compared(pools)
    assert len(found) == 3 and all(0 < figures["exact"][0] < figures["kept"][0] for figures in found)
    assert min(figures["recovered"][0] for figures in found) < 0.999


def test_rows_that_grow_past_what_is_clustered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, DoublePPolicy, append=8)
    req = world.request(77, 1)  # behind 64, where a segment ends, 7 tokens wait
    world.prefill(req)
    kept = []
    for _ in range(12):
        world.step([req])
        kept.append(world.backend.rows[0])
    tiles = [len(row.tiles) for row in kept]
    assert tiles == [1] + [2] * 8 + [3] * 3
    assert len({id(row) for row in kept}) == 3, "what a row reads is kept between"


def test_padding_rows_of_graphs_and_steps_outside_of_them(plain: World) -> None:
    backend = plain.backend
    backend.init_cuda_graph_state(4, 4)
    for bs in (4, 2):
        backend.reader.decodes.capture(bs)
    batch = [plain.request(100, 1), plain.request(55, 2)]
    for padding in (2, None, None, 1, 0):
        plain.step(batch, padding)
    plain.step([*batch, *(plain.request(30, slot) for slot in (3, 4, 5))])
    assert not backend.fitted, "five rows for graphs of four"
    assert backend.asked == ["graph state"]


def test_a_batch_of_dense_rows_is_the_base_s(plain: World) -> None:
    batch = [plain.request(60, 1, dense=True), plain.request(9, 2)]
    plain.step(batch)
    assert not plain.backend.viewing and plain.backend.asked == ["metadata", "decode"]


@pytest.mark.parametrize("until", [64, 66])
def test_a_run_that_the_prefix_cuts(plain: World, until: int) -> None:
    slots = plain.take(70, range(70))
    head = node(plain.root, slots[:until])
    plain.known(slots, 3, 67, head, until)
    req = plain.request(0, 1)
    plain.put(req, slots[:until])
    req.last_node = head
    plain.grow(req, 60)
    plain.step([req])
    (part, *rest) = plain.backend.placed[0]
    assert (part.begin, part.end, part.run.end) == (3, until, 67) and rest
    sizes = plain.backend.memory.layers[0].sizes[plain.backend.rows[0].sized[0]]
    assert (sizes < 0).any() and (sizes > 0).any()
    plain.step([req])


def test_a_run_that_the_prefix_cuts_far_from_its_end_is_clustered_anew(plain: World) -> None:
    slots = plain.take(70, range(70))
    head = node(plain.root, slots[:40])
    plain.known(slots, 3, 67, head, 40)
    reqs = [plain.request(0, slot) for slot in (1, 2)]
    for req in reqs:
        plain.put(req, slots[:40])
        req.last_node = head
        plain.grow(req, 60)
    plain.step(reqs)
    first, second = (placed[0] for placed in plain.backend.placed)
    assert (first.begin, first.end, first.run.begin, first.run.end) == (3, 40, 3, 40)
    assert first.run is second.run is plain.backend.policy.store.find([head], 3, 40), "once for both"
    assert plain.backend.policy.stats()["cluster_tokens_anew"] == 37
    for req in reqs:
        plain.release(req)
    plain.step([plain.request(30, 3)])
    assert plain.backend.policy.stats()["cluster_tokens_anew"] == 37, "the node has it"


def test_a_twentieth_of_the_cache_is_clustered_anew_at_most(plain: World) -> None:
    slots = plain.take(70, range(70))
    begin, most = 3, plain.caches.keys.shape[0] // 20
    kept = []
    for number, until in enumerate(range(40, 30, -1)):
        head = node(plain.root, slots[:until])
        plain.known(slots, begin, 67, head, until)
        req = plain.request(0, 1 + number % 2)
        plain.put(req, slots[:until])
        req.last_node = head
        plain.grow(req, 60)
        plain.step([req])
        kept.append(plain.backend.placed[0][0].run)
        plain.release(req)
    anew = [run.tokens for run in kept if not run.lost and run.end < 67]
    assert 0 < sum(anew) <= most < sum(anew) + 38 and len(anew) < len(kept)
    assert plain.backend.policy.stats()["cluster_tokens_anew"] == sum(anew)


def test_a_run_that_the_first_window_cuts_until_it_is_behind(plain: World) -> None:
    slots = plain.take(70, range(70))
    whole = node(plain.root, slots)
    plain.known(slots, 3, 67, whole)
    req = plain.request(0, 1)
    plain.put(req, slots[:68])
    req.last_node = whole
    ends = []
    for _ in range(7):
        plain.step([req])
        ends.append(plain.backend.placed[0][0].end)
    assert ends == [62] * 5 + [67] * 2


def test_blocks_wherever_they_stand(pools: World) -> None:
    """Rotated, twice in one row, pieces of them, sinks inside a piece; beside a plain row and one over no clusters."""
    a, b, c = (("a", 0, 30), ("b", 0, 41), ("c", 0, 25))
    batch = [
        pools.request(5, 1, (a, c, b)),
        pools.request(9, 2, (("b", 4, 33), a, b)),
        pools.request(80, 3),
        pools.request(3, 4, (a, ("c", 5, 9)), dense=True),
        pools.request(3, 5, (c, b), p1=1, p2=1),
    ]
    for _ in range(3):
        pools.step(batch)
    pools.release(batch[0])
    pools.step([batch[4], batch[1]])
    assert pools.notes[:3] == [True] * 3
    assert max(len(row.deltas) for row in pools.backend.rows) >= 3
    assert (pools.backend.memory.layers[0].sizes < 0).any()


def test_a_row_that_the_tree_rewrites(plain: World) -> None:
    """Under overlap a request has decoded once when the tree takes its prompt, and frees what it knew already."""
    req, other = plain.request(70, 1), plain.request(50, 2)
    plain.step([req, other])
    freed = plain.table[1, :30].clone().long()
    others = plain.take(30, range(30))
    for cache in (plain.caches.keys, plain.caches.values):
        cache[others] = cache[freed]
        cache[freed] = float("nan")  # somebody else's now
    plain.table[1, :30] = others.int()
    plain.backend.rewritten(1)
    for _ in range(2):
        plain.step([req, other])


def test_a_full_pool_is_dense_and_says_so(plain: World) -> None:
    memory = plain.backend.memory
    kept = []
    while (run := memory.make(torch.arange(1, 101, device=DEVICE), 0)) is not None:
        kept.append(run)
    refused, req = memory.refused, plain.request(100, 1)
    batch = SimpleNamespace(
        forward_mode=Mode(True), extend_seq_lens_cpu=None, seq_lens_cpu=torch.tensor([req.length])
    )  # fmt: skip
    plain.backend.prepare(SimpleNamespace(reqs=[req]), batch)
    assert not plain.backend.viewing and memory.refused == refused + 1
    kept.clear()
    plain.backend.prepare(SimpleNamespace(reqs=[req]), batch)
    assert not plain.backend.viewing, "a request that was refused stays dense"


def test_prompts_are_clustered_in_chunks(plain: World) -> None:
    req = plain.request(75, 1)
    plain.prefill(req)
    plain.grow(req, 30)
    plain.prefill(req, 75)
    (row,) = plain.backend.policy._rows.values()
    assert [(each.begin, each.end) for each in row.own] == [(3, 64)]
    plain.step([req])
    assert len(plain.backend.placed[0]) == 2 and isinstance(plain.backend.placed[0][0].run, PooledRun)
