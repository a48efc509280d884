"""Which of SGLang's attention backends ours are mixed over, and what they refuse."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_ext import compat, lines
from sglang_ext.attention import backend, choice, select
from sglang_ext.serving import checks
from sglang_ext.systems.registry import systems
from tests.plugin.test_streams import arguments


def test_what_serves_batches_without_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own choice where we have it, and what was asked for; nothing runs there on a server of streams."""
    double_p, streams = systems()["double_p"], systems()["cascade"]
    monkeypatch.delenv(choice.PLAIN_ENV, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert choice.plain_attention(double_p, lambda: "fa3") == "fa3"
    assert {choice.plain_attention(double_p, lambda name=name: name) for name in ("trtllm_mha", "triton")} == {
        "flashinfer"
    }
    for asked in ("fa3", "flashinfer"):
        monkeypatch.setenv(choice.PLAIN_ENV, asked)
        assert choice.plain_attention(double_p, lambda: pytest.fail("asked for by name")) == asked
        assert choice.plain_attention(streams, lambda: "fa3") == "flashinfer"
    with pytest.raises(ValueError, match=r"a model in float16 and a KV cache in float8.*--dtype bfloat16"):
        monkeypatch.setenv(choice.PLAIN_ENV, "fa3")
        choice.plain_attention(double_p, lambda: "fa3", float8_in_float16=True)
    monkeypatch.setenv(choice.PLAIN_ENV, "auto")
    assert choice.plain_attention(double_p, lambda: "fa3", float8_in_float16=True) == "flashinfer"
    for wrong in ("fa4", ""):
        monkeypatch.setenv(choice.PLAIN_ENV, wrong)
        with pytest.raises(ValueError, match=f"{choice.PLAIN_ENV}={wrong}: expected one of auto, fa3, flashinfer"):
            choice.plain_attention(streams, lambda: "fa3")
        (problem,) = checks.refusals(arguments())  # before the model is loaded
        assert problem.startswith(f"{choice.PLAIN_ENV}={wrong}")
    monkeypatch.setenv(choice.PLAIN_ENV, "fa3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(ValueError, match="fa3 on a GPU of compute capability 10: it serves 8 and 9"):
        choice.asked_plain_attention()


def test_what_is_mixed_over_sglangs_backends_is_there() -> None:
    """They cannot all be imported without a GPU."""
    for name in select._BACKENDS.values():
        module, kind = name.split(":")
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        assert f"class {kind}(ViewBackend, " in Path(spec.origin).read_text()


def test_sglang_says_which_backend_it_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["server_args", "use_mla_backend", "model_config"]
    if lines.current() is lines.OLDER:
        from sglang.srt.server_args import ServerArgs

        assert list(inspect.signature(ServerArgs._get_default_attn_backend).parameters) == ["self", *asked[1:]]
        args = SimpleNamespace(_get_default_attn_backend=lambda *given: (args, *given))
    else:
        from sglang_ext.compat import v0_5_23

        assert list(inspect.signature(v0_5_23.get_default_attn_backend).parameters) == asked
        monkeypatch.setattr(v0_5_23, "get_default_attn_backend", lambda *given: given)
        args = SimpleNamespace()
    runner = SimpleNamespace(server_args=args, use_mla_backend=False, model_config=1)
    assert compat.default_attention(runner) == (args, False, 1)


def test_what_a_layer_passes_that_nobody_reads_is_refused() -> None:
    backend._refuse({"sinks": None})
    with pytest.raises(ValueError, match="passes sinks, q_rope, which views do not serve"):
        backend._refuse({"sinks": 1, "q_rope": 2, "k_rope": None})
