"""How much of the code says what its values are: few uses of `Any`, `object` and `cast`, fewer of `type: ignore`."""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "launch", "policies", "retrievers", "sglang_ext")
VAGUE, MOST_VAGUE = {"Any", "object", "cast"}, 100
MOST_IGNORED = 5


def sources() -> list[Path]:
    """The package's files, but for `compat`, which adapts what SGLang leaves untyped."""
    files = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return sorted(path for path in files if "compat" not in path.relative_to(ROOT).parts)


def vague(text: str) -> int:
    """How often names in `VAGUE` stand in a file's code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.NAME and token.string in VAGUE for token in tokens)


def test_few_values_are_anything() -> None:
    found = Counter({str(path.relative_to(ROOT)): vague(path.read_text(encoding="utf-8")) for path in sources()})
    assert sum(found.values()) <= MOST_VAGUE, found.most_common(10)
    assert vague("from typing import Any, cast\nx: Any = cast(object, 'Any')") == 5


def test_few_lines_are_not_checked() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"#\s*type:\s*ignore", line)
    ]
    assert len(found) <= MOST_IGNORED, found
