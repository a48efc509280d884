"""What is compiled beside a server's start is waited for when SGLang makes its cache, before the first request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import plugin, settings
from sglang_ext.attention import backend as backends
from sglang_ext.attention.readers.clusters import ClusterReader
from sglang_ext.attention.readers.planned import PlannedReader
from sglang_ext.cache import radix, streams


@pytest.mark.parametrize("system", ["dbsa", "cascade"])
def test_the_reader_is_ready_before_there_is_a_cache(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def cache(*_: Any) -> Any:
        order.append("cache")
        return SimpleNamespace(
            hooks=[], release_hooks=[], on_rewrite=[], on_restore=[], serve=lambda _: None, host=None
        )

    reader = SimpleNamespace(ready=lambda: order.append("ready"))
    policy = SimpleNamespace(node_hooks=lambda: [])
    backend = SimpleNamespace(reader=reader, policy=policy, release=None, rewritten=None, restored=None)
    monkeypatch.setattr(backends, "view_backend", lambda _: backend)
    monkeypatch.setattr(radix, "BlockRadixCache", cache)
    monkeypatch.setattr(streams, "StreamCache", cache)
    monkeypatch.setattr(settings, "server_settings", lambda: SimpleNamespace(open_conversations=False))
    runner = SimpleNamespace(server_args=SimpleNamespace(attention_backend=system, tp_size=1))
    context: Any = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), params=None)
    plugin._build_radix_cache(context)
    assert order == ["ready", "cache"]


@pytest.mark.parametrize("reader", [PlannedReader, ClusterReader])
def test_a_reader_with_prefills_waits_for_them(reader: type[Any]) -> None:
    order: list[str] = []
    made = reader.__new__(reader)
    made.prefills = SimpleNamespace(ready=lambda: order.append("prefills"))
    made.ready()
    assert order == ["prefills"]
