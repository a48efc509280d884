"""Servers without pools say why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_ext.serving.poolless import no_pools


@pytest.mark.parametrize(
    ("backend", "layers", "words"),
    [
        ("dbsa", (), ""),
        ("double_p", ("full_attention",) * 3, ""),
        ("cascade", (), "every request of this server is a stream"),
        (
            "double_p",
            ("sliding_attention", "full_attention"),
            "1 of 2 layers of this server's model have sliding windows",
        ),
    ],
)
def test_why(backend: str, layers: tuple[str, ...], words: str) -> None:
    manager = SimpleNamespace(
        server_args=SimpleNamespace(attention_backend=backend),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(layer_types=layers)),
    )
    said = no_pools(manager)
    assert said.startswith(words) and bool(said) == bool(words)
    assert not words or f"--attention-backend {backend}" in said
