"""Which CUDA graph serves a prefill, over fakes: the hooks alone, as no graph is captured without a GPU."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend

from sglang_ext import compat
from sglang_ext.attention import graphs
from sglang_ext.attention.backend import ViewBackend, views_of
from sglang_ext.attention.readers.reader import DecodeGraphs, PrefillGraphs, Reader


class Prefills(PrefillGraphs[Any]):
    """Graphs without kernels: what the hooks ask, and what they set."""

    def __init__(self, inside: bool, largest: int) -> None:
        self.inside, self.largest = inside, largest

    def allocate(self, sizes: Any) -> None: ...

    def capture(self, size: int) -> str | None:
        return "prefill" if size <= self.largest else None

    def holds(self, step: Any) -> bool:
        return self.inside


class Backend(ViewBackend):
    """A backend without a model."""

    def __init__(self, inside: bool = True, largest: int = 64) -> None:
        self.question_size, self.prepared, self.loaded, self.seen = None, None, "prefill", []
        self.reader = SimpleNamespace(prefill_graphs=Prefills(inside, largest), graphs=None)  # type: ignore[assignment]

    def capture_question(self, size: int) -> bool:
        self.seen.append(("capture", size))
        return super().capture_question(size)

    def end_capture(self) -> None:
        self.seen.append(("end", None))
        super().end_capture()


def breakable(backend: Any) -> SimpleNamespace:
    return SimpleNamespace(_model_runner=SimpleNamespace(attn_backend=backend), _outputs={16: "outputs"})


@pytest.mark.parametrize("failing", [False, True])
def test_the_planner_knows_the_graph_while_a_prefill_runs(monkeypatch: pytest.MonkeyPatch, failing: bool) -> None:
    backend, sizes = Backend(), []
    runner = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
    monkeypatch.setattr(compat, "whole_graph_size", lambda runner, batch: 32)

    def execute(_runner: Any, _batch: Any) -> str:
        sizes.append(backend.question_size)
        if failing:
            raise RuntimeError("out of memory")
        return "logits"

    if failing:
        with pytest.raises(RuntimeError, match="out of memory"):
            graphs.around_execute_prefill(execute, runner, "batch")
    else:
        assert graphs.around_execute_prefill(execute, runner, "batch") == "logits"
    assert sizes == [32] and backend.question_size is None


def test_the_size_of_a_graph_in_one_piece() -> None:
    """Of SGLang's sizes only some have one: the next larger size decides."""
    key = type("Key", (), {"size": 16})()
    runner = SimpleNamespace(
        backend=SimpleNamespace(sglang_ext_whole={key: "graph"}),
        capture_num_tokens=[16, 64],
        _pad_to_bucket=lambda n, sizes: next(size for size in sizes if size >= n),
    )
    assert compat.whole_graph_size(runner, SimpleNamespace(input_ids=range(12))) == 16
    assert compat.whole_graph_size(runner, SimpleNamespace(input_ids=range(17))) is None
    runner.backend = SimpleNamespace()  # nothing was captured
    assert compat.whole_graph_size(runner, SimpleNamespace(input_ids=range(12))) is None


@pytest.mark.parametrize("backend", [Backend(inside=True), Backend(inside=False), object()], ids=["in", "out", "stock"])
def test_replays(backend: Any) -> None:
    found, replayed = breakable(backend), []
    found.sglang_ext_whole = {16: SimpleNamespace(replay=lambda: replayed.append("whole"))}

    def replay(*_args: Any) -> str:
        replayed.append("pieces")
        return "outputs"

    assert graphs.around_replay_breakable(replay, found, 16, "batch") == "outputs"
    assert replayed == ["whole" if isinstance(backend, Backend) and backend.in_question_graph() else "pieces"]


def test_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own first, ours second, and the backend is told that it is over, whatever happens."""
    backend, order = Backend(), []
    found = breakable(backend)
    monkeypatch.setattr(compat, "capture_whole", lambda graphs, key, forward: order.append(("whole", key.size)))
    for size in (128, 64):
        graphs.around_capture_breakable(
            lambda g, key, forward: order.append(("pieces", key.size)), found, SimpleNamespace(size=size), None
        )
    assert order == [("pieces", 128), ("pieces", 64), ("whole", 64)]
    assert backend.seen == [("capture", 128), ("capture", 64), ("end", None)]

    def fails(*_args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(compat, "capture_whole", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.around_capture_breakable(lambda *_args: None, found, SimpleNamespace(size=32), None)
    assert backend.seen[-1] == ("end", None)


class Whole(FullCudaGraphBackend):
    """SGLang's graphs of decoding steps where no graph can be captured: what is run, as SGLang does it."""

    def __init__(self) -> None:
        self._graphs: dict[Any, Any] = {}

    def capture_one(self, shape_key: Any, forward_fn: Any, *_args: Any, **_kwargs: Any) -> None:
        # Twice before, and once in the graph.
        self._graphs[shape_key] = [number for number in range(3) if forward_fn() == shape_key.size]


def test_the_second_graph_of_a_size_is_run_once_before() -> None:
    """Also where graphs are captured again, as all of them are loaded then."""
    runner = SimpleNamespace(backend=Whole())
    keys = [ShapeKey(size=size, variant_label=label) for size in (4, 2) for label in ("lora", "nolora")]
    for ran in ([[0, 1, 2], [1, 2]] * 2, [[1, 2]] * 4):
        compat.record_both_variants(runner)
        for key in keys:
            runner.backend.capture_one(key, lambda size=key.size: size, post_warmup_hook=None)
        assert list(runner.backend._graphs.values()) == ran
    assert runner.record_nolora_graph


def test_other_graphs_of_steps_stay_as_they_are() -> None:
    backend = SimpleNamespace(capture_one="sglang's")
    compat.record_both_variants(SimpleNamespace(backend=backend))
    assert backend.capture_one == "sglang's"


def test_sglang_runs_what_it_captures_twice_before() -> None:
    """As `Whole` does: else the second graph of a size would be captured without any run before."""
    source = inspect.getsource(FullCudaGraphBackend.capture_one)
    before, _, after = source.partition("CUDAGraph()")
    assert "in range(2)" in before and before.count("forward_fn()") == after.count("forward_fn()") == 1


def test_a_prefill_in_one_piece_is_run_once_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its result goes where that of the pieces goes."""
    order: list[Any] = []

    @contextlib.contextmanager
    def graph(_graph: Any, **_where: Any) -> Iterator[None]:
        order.append("begins")
        yield
        order.append("ends")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr("sglang_ext.compat.graphs.capture_scope", contextlib.nullcontext)
    found = SimpleNamespace(
        _device_module=SimpleNamespace(synchronize=lambda: order.append("synchronized")),
        _tp_group=SimpleNamespace(barrier=lambda: order.append("all there")),
        _pool=None,
        _capture_stream=None,
        _shared_output_buffer="buffer",
        _output_rows=lambda out, size: size,
        _copy_output_to_buffer=lambda *copied: order.append(copied),
    )
    key = ShapeKey(size=16)
    compat.capture_whole(found, key, lambda: order.append("run") or "out")
    assert order == ["synchronized", "all there", "run", "begins", "run", ("out", "buffer", 16), "ends"]
    assert found.sglang_ext_whole == {key: "graph"}


class OneVariant(DecodeGraphs[Any, Any]):
    """Graphs of a reader whose every batch has views: there are two streams at most."""

    both = False

    def __init__(self, holds: bool) -> None:
        self.holds = holds

    def sizes(self, sizes: Any) -> list[int]:
        return [size for size in sizes if size <= 2]

    def capture(self, rows: int) -> str:
        return "step"

    def fits(self, step: Any) -> bool:
        return self.holds

    def before_replay(self, step: Any, forward: Any, rows: int) -> str:
        return "step"


class Streams(ViewBackend):
    def __init__(self, fits: bool = True) -> None:
        self.prepared, self.loaded = "step", None
        self.reader = SimpleNamespace(graphs=OneVariant(fits), prefill_graphs=None)  # type: ignore[assignment]


def test_streams_have_one_variant_of_the_sizes_they_need() -> None:
    runner = SimpleNamespace(attn_backend=Streams(), capture_bs=[1, 2, 4], capture_forward_mode=ForwardMode.DECODE)
    graphs.before_capture(runner)
    assert runner.capture_bs == [1, 2] and not hasattr(runner, "record_nolora_graph")
    assert graphs.around_resolve_variant(lambda *_: "sglang's", runner, "batch") == "sglang's"
    graphs.after_capture(None, runner)
    assert not runner.attn_backend.viewing


class Drafting(ViewBackend):
    """A server whose decoding batches are verifications."""

    def __init__(self, prepared: str | None) -> None:
        self.prepared, self.loaded = prepared, None
        self.reader = SimpleNamespace(graphs=OneVariant(True), prefill_graphs=None)  # type: ignore[assignment]


def test_verifications_have_one_graph_without_views() -> None:
    """Of every size that SGLang chooses; what has views is verified without a graph."""
    verifying = ForwardMode.TARGET_VERIFY
    runner = SimpleNamespace(attn_backend=Drafting(None), capture_bs=[1, 2, 4], capture_forward_mode=verifying)
    graphs.before_capture(runner)
    assert runner.capture_bs == [1, 2, 4] and not hasattr(runner, "record_nolora_graph")
    assert graphs.around_resolve_variant(lambda *_: "sglang's", runner, "batch") == "sglang's"
    batch = SimpleNamespace(forward_mode=verifying)
    assert graphs.around_can_run_decode(lambda *_: True, runner, batch)
    runner.attn_backend = Drafting("views")
    assert not graphs.around_can_run_decode(lambda *_: True, runner, batch)


def test_steps_of_drafts_are_taken_for_steps() -> None:
    model_runner = SimpleNamespace(spec_algorithm="drafting", decode_cuda_graph_runner="verifications")
    with pytest.raises(ValueError, match="inside"), compat.as_steps(model_runner, "steps"):
        assert model_runner.spec_algorithm.is_none() and model_runner.decode_cuda_graph_runner == "steps"
        raise ValueError("inside")
    assert (model_runner.spec_algorithm, model_runner.decode_cuda_graph_runner) == ("drafting", "verifications")
    assert compat.capture_steps(model_runner) is None, "there are no graphs without a GPU"


@pytest.mark.parametrize("fits", [True, False])
def test_streams_that_no_graph_holds_run_without(fits: bool) -> None:
    backend = Streams(fits)
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    assert graphs.around_can_run_decode(lambda *_: True, SimpleNamespace(attn_backend=backend), batch) is fits
    runner = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend), prefill_backend_name="full")
    assert not graphs.around_can_run_prefill(lambda *_: True, runner, "batch")
    runner.prefill_backend_name = "breakable"
    assert graphs.around_can_run_prefill(lambda *_: True, runner, "batch")


class Voter(Reader[Any, Any]):
    """A reader whose layers leave something for those after them."""

    graphs = OneVariant(True)

    def __init__(self) -> None:
        self.found: list[tuple[int, dict[str, Any]]] = []

    def step(self, batch: Any) -> str:
        return "step"

    def before_layers(self, step: Any, forward: Any, graph_rows: int | None) -> str:
        return "step"

    def read(self, call: Any) -> torch.Tensor:
        self.found.append((call.layer, dict(call.carry)))
        call.carry[str(call.layer)] = "voted"
        return call.query


class SglangsBackend:
    """Serves layers with windows: notes for how many rows of a graph it planned them."""

    def __init__(self) -> None:
        self.planned: list[tuple[int, bool]] = []

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.planned.append((forward_batch.batch_size, in_capture))


class BesideWindows(ViewBackend, SglangsBackend):  # type: ignore[misc]
    pass


@pytest.mark.parametrize("windows", [frozenset(), frozenset({1})], ids=["all layers", "behind one with a window"])
def test_every_pass_begins_with_an_empty_carry(windows: frozenset[int]) -> None:
    """SGLang runs a step several times over one set of metadata, before it captures it."""
    cache = torch.zeros(1, 1, 4)
    pool = SimpleNamespace(
        dtype=torch.float32,
        start_layer=min(windows, default=2),
        layer_num=4 - min(windows, default=2),
        get_key_buffer=lambda _: cache,
        get_value_buffer=lambda _: cache,
    )
    backend, reader = BesideWindows.__new__(BesideWindows), Voter()
    SglangsBackend.__init__(backend)
    backend.window_layers = windows
    backend.reader, backend._pool = reader, pool
    backend.init_forward_metadata_out_graph(
        SimpleNamespace(batch_size=1, forward_mode=ForwardMode.DECODE), in_capture=True
    )
    for _ in range(3):
        for number in (2, 3):
            layer = SimpleNamespace(layer_id=number, tp_q_head_num=1, qk_head_dim=4, v_head_dim=4, scaling=1)
            backend.forward_decode(torch.zeros(1, 4), None, None, layer, None)
    assert reader.found == [(2, {}), (3, {"2": "voted"})] * 3
    assert backend.planned == ([(1, True)] if windows else []), "SGLang's own code reads layers with windows alone"
    backend.end_capture()
    assert backend._carry == {} and not backend.viewing
    assert not backend.fits_graph(verifies=False), "there is no graph for a batch without views"


def test_decode_graphs_of_a_hybrid_linear_model_are_asked_of_the_backend_within() -> None:
    """SGLang's runner knows the backend around it, which plans the layers with a state, too."""
    within = Backend()
    within.prepared, within.loaded = "step", None  # type: ignore[assignment]
    around = SimpleNamespace(full_attn_backend=within, linear_attn_backend=None)
    assert views_of(around) is views_of(within) is within  # type: ignore[arg-type]
    assert views_of(SimpleNamespace()) is None  # type: ignore[arg-type]
    runner = SimpleNamespace(attn_backend=around, capture_forward_mode=ForwardMode.DECODE)
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    assert not graphs.around_can_run_decode(lambda *_: True, runner, batch), "there is no graph with views"
    graphs.after_capture(None, runner)
    assert graphs.around_can_run_decode(lambda *_: True, runner, batch) and within.seen == [("end", None)]


def test_layers_over_a_batch_that_was_not_planned_are_refused() -> None:
    backend = ViewBackend.__new__(ViewBackend)
    backend.prepared, backend.loaded, backend._planned = "step", None, False
    with pytest.raises(ValueError, match="was not planned: expected init_forward_metadata"):
        backend.forward_extend(torch.zeros(1, 4), None, None, SimpleNamespace(), None)


def test_where_sglang_wants_attention() -> None:
    """Between pieces of a prefill's graph it names memory; what is left there by a pass of other rows is nobody's."""
    out = torch.zeros(5, 6)
    batch = SimpleNamespace(_attn_output=out)
    found = compat.attention_output(batch, 5, 2, 3)
    assert found is not None and found.shape == (5, 2, 3) and found.data_ptr() == out.data_ptr()
    assert compat.attention_output(batch, 4, 2, 3) is None
    assert compat.attention_output(SimpleNamespace(_attn_output=None), 5, 2, 3) is None
    assert compat.attention_output(SimpleNamespace(), 5, 2, 3) is None
