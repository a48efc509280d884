"""README.md names the options there are, with their defaults, and files that exist."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from sglang_ext.config import DEFAULT_RATIO, PoolOptions, RequestOptions
from sglang_ext.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def options_under(heading: str) -> dict[str, str]:
    """Option -> default, of the table under a heading."""
    section = README.split(heading, 1)[1].split("\n#", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", section, flags=re.MULTILINE))


def test_every_pool_option_and_its_default_is_there() -> None:
    listed = options_under("### Options of a pool")
    assert list(listed) == [field.name for field in dataclasses.fields(PoolOptions)]
    for field in dataclasses.fields(PoolOptions):
        default = "none" if field.default is None else json.dumps(field.default)
        assert listed[field.name] in (default, default.strip('"')), field.name


def test_every_request_option_is_there() -> None:
    listed = options_under("### Options of a request")
    assert list(listed) == [field.name for field in dataclasses.fields(RequestOptions)]
    assert float(listed["ratio"]) == DEFAULT_RATIO


def test_every_setting_of_a_server_and_its_default_is_there() -> None:
    listed = options_under("### Limits of a server")
    assert list(listed) == [field.name for field in dataclasses.fields(ServerSettings)]
    for field in dataclasses.fields(ServerSettings):
        assert listed[field.name] == json.dumps(field.default), field.name


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_links_and_named_modules_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    places = [ROOT, ROOT / "sglang_ext"]
    for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)", text):
        assert any((place / name).exists() for place in places), name


def test_python_examples_compile() -> None:
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)):
        compile(code, f"README.md, Python example {number + 1}", "exec")
