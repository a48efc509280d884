"""Dense attention in plain PyTorch, as `kernels.dense_attention.attend` is defined; what SGLang's kernel takes."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def plain_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    width: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [rows, heads, dim] in the query's dtype, natural log-sum-exp [rows, heads], heads first in memory)."""
    rows, columns = query.shape[0], keys.shape[0]
    own = torch.arange(rows, device=query.device).unsqueeze(1) + columns - rows
    column = torch.arange(columns, device=query.device)
    seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    if causal:
        seen &= column <= own
    if width is not None:
        seen &= own - column < width
    wide = torch.promote_types(query.dtype, torch.float32)
    k, v = (each.to(wide).repeat_interleave(query.shape[1] // keys.shape[1], 1) for each in (keys, values))
    logits = torch.einsum("rhd,thd->hrt", query.to(wide), k) * scale
    logits = logits.masked_fill(~seen, float("-inf"))
    out = torch.einsum("hrt,thd->rhd", logits.softmax(-1), v).to(query.dtype).contiguous()
    return out, logits.logsumexp(-1).transpose(0, 1)


def stand_in(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Any]) -> None:
    """Have a function stand for SGLang's `flash_attn_with_kvcache`, which cannot be imported without a GPU."""
    module = SimpleNamespace(flash_attn_with_kvcache=kernel)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(flash_attn=module))


def check_signature(stands_in: Callable[..., Any]) -> None:
    """Assert that SGLang's `flash_attn_with_kvcache`, as installed, takes what a stand-in for it takes.

    It cannot be imported without a GPU, so its source is read.
    """
    (folder,) = find_spec("sgl_kernel").submodule_search_locations  # type: ignore[union-attr, misc]
    source = ast.parse((Path(folder) / "flash_attn.py").read_text(encoding="utf-8"))
    (function,) = [
        each for each in source.body if isinstance(each, ast.FunctionDef) and each.name == "flash_attn_with_kvcache"
    ]
    asked = inspect.signature(stands_in).parameters
    assert set(asked) <= {each.arg for each in function.args.args}
    assert list(asked)[:3] == [each.arg for each in function.args.args[:3]]
