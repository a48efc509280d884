"""Servers without pools say why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_ext.serving.poolless import no_pools


def config_of(layers: tuple[str, ...]) -> SimpleNamespace:
    """The configuration of a text model whose layers are of these kinds."""
    ids = {kind: [i for i, each in enumerate(layers) if each == kind] for kind in set(layers)}
    if "linear_attention" not in ids:
        return SimpleNamespace(layer_types=layers)
    return SimpleNamespace(
        layer_types=layers,
        linear_layer_ids=ids["linear_attention"],
        full_attention_layer_ids=ids["full_attention"],
    )


@pytest.mark.parametrize(
    ("backend", "page", "layers", "words", "named"),
    [
        ("dbsa", 1, (), "", ""),
        ("double_p", None, ("full_attention",) * 3, "", ""),
        ("cascade", 1, (), "every request of this server is a stream", "--attention-backend cascade"),
        ("ltri", 1, (), "every request of this server is a stream", "--attention-backend ltri"),
        ("infllm", 1, (), "every request of this server is a stream", "--attention-backend infllm"),
        ("double_p", 16, (), "this server has no pools", "--page-size 16"),
        (
            "double_p",
            1,
            ("sliding_attention", "full_attention"),
            "1 of 2 layers of this server's model have sliding windows",
            "--attention-backend double_p",
        ),
        (
            "double_p",
            1,
            ("linear_attention", "linear_attention", "full_attention"),
            "2 of 3 layers of this server's model keep a state",
            "--attention-backend double_p",
        ),
    ],
)
def test_why(backend: str, page: int | None, layers: tuple[str, ...], words: str, named: str) -> None:
    manager = SimpleNamespace(
        server_args=SimpleNamespace(attention_backend=backend, page_size=page),
        model_config=SimpleNamespace(hf_text_config=config_of(layers)),
    )
    said = no_pools(manager)
    assert said.startswith(words) and bool(said) == bool(words)
    assert named in said
