"""The documents list the options that there are, with their defaults, and the systems; their tables are current."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sglang_ext.attention.choice import KERNELS, KERNELS_ENV, PLAIN, PLAIN_ENV
from sglang_ext.config import CHOICES, DEFAULT_RATIO, PoolOptions, RequestOptions
from sglang_ext.launch import docs
from sglang_ext.serving import checks
from sglang_ext.settings import ServerSettings
from sglang_ext.systems.registry import ours

FOLDER = docs.ROOT / "docs"
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in docs.documents()}
OPTIONS = {name: system.options for name, system in ours().items() if system.options is not None}
SAME = {"dbsa+double_p": "double_p"}
"""Systems whose options are another's, in whose table they stand."""


def table_of(mark: str) -> dict[str, tuple[str, str, str]]:
    """Option -> (type or choices, default, meaning), of the one table with a mark."""
    holding = [text for text in TEXTS.values() if f"<!-- {mark} -->" in text]
    assert len(holding) == 1 and holding[0].count(f"<!-- {mark} -->") == 1, f"{mark}: expected one table"
    section = holding[0].split(f"<!-- {mark} -->", 1)[1].split("<!-- end -->", 1)[0]
    rows = re.findall(r"^\| `([\w+]+)` \| (.*?) \| (.*?) \| (.*) \|$", section, flags=re.MULTILINE)
    return {name: (kind, default, meaning) for name, kind, default, meaning in rows}


def expected_default(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """How the default of a field may stand in a table; found without the module that writes them."""
    if field.default is dataclasses.MISSING:
        return ("required",)
    shown = "none" if field.default is None else json.dumps(field.default)
    return (shown, f"`{shown}`", "`{}`".format(shown.strip('"')))


@pytest.mark.parametrize("name", TEXTS)
def test_tables_are_current(name: str) -> None:
    assert docs.updated(TEXTS[name], name) == TEXTS[name], "make docs"


@pytest.mark.parametrize("cls", [PoolOptions, RequestOptions, ServerSettings])
def test_every_option_and_its_default_is_there(cls: type) -> None:
    listed = table_of(f"options: {cls.__name__}")
    assert list(listed) == [field.name for field in dataclasses.fields(cls)]
    for field in dataclasses.fields(cls):
        if (cls, field.name) != (RequestOptions, "ratio"):
            assert listed[field.name][1] in expected_default(field), field.name
        assert listed[field.name][2].strip(), field.name


def test_the_ratio_that_holds_is_there() -> None:
    assert float(table_of("options: RequestOptions")["ratio"][1].strip("`")) == DEFAULT_RATIO


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_every_system_is_there(name: str) -> None:
    cls = OPTIONS[name]
    if name in SAME:
        assert cls is OPTIONS[SAME[name]] and f"`{name}` have the same options" in TEXTS["double_p.md"]
    listed = table_of(f"options: {SAME.get(name, name)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    assert set(listed) == set(fields)
    for option, (_, default, meaning) in listed.items():
        assert default in expected_default(fields[option]) and meaning.strip(), option


def test_every_system_is_there() -> None:
    section = TEXTS["README.md"].split("<!-- systems -->", 1)[1].split("<!-- end -->", 1)[0]
    listed = {name: words for name, words in re.findall(r"^\| `([\w+]+)` \| (.*?) \|", section, flags=re.MULTILINE)}
    assert listed == {name: system.summary for name, system in ours().items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_choices_are_those_that_a_system_takes(name: str) -> None:
    cls = OPTIONS[name]
    for field in dataclasses.fields(cls):
        assert (field.type == "str") == bool(docs.choices(field)), field.name
        for choice in docs.choices(field):
            cls(**{field.name: choice})
        if field.type == "str":
            with pytest.raises(ValueError):
                cls(**{field.name: "nothing of that name"})


def test_what_is_in_a_table() -> None:
    listed = docs.option_table(RequestOptions)
    assert "| `order` | `pool`, `low_to_high`, `high_to_low`, `reversed` | `pool` |" in listed
    assert "| `pool` | text | required |" in listed and "| `block_ids` | list of whole numbers | none |" in listed
    assert docs.option_table(OPTIONS["twilight"]).splitlines()[2].startswith("| `p` | number | `0.95` |")

    @dataclasses.dataclass
    class Silent:
        """Nothing is said of its field."""

        size: int = 3

    with pytest.raises(ValueError, match=r"Silent\.size"):
        docs.option_table(Silent)

    @dataclasses.dataclass
    class Piped:
        """One option.

        Attributes:
            size: `a|b` is one cell.
        """

        size: str = dataclasses.field(default="a", metadata={CHOICES: ("a", "b")})

    assert docs.option_table(Piped).endswith("| `size` | `a`, `b` | `a` | `a\\|b` is one cell. |")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- options: Nobody -->\n<!-- end -->\n", "no such options"),
        ("<!-- options: quest -->\n", "expected a line <!-- end -->"),
        ("<!-- end -->\n", "expected a line <!-- end -->"),
        ("<!-- systems -->\n<!-- options: quest -->\n<!-- end -->\n", "expected a line <!-- end -->"),
    ],
)
def test_marks_that_are_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        docs.updated(text, "a.md")


def test_tables_are_written_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- options: quest -->\nold\n<!-- end -->\n\nafter\n\n<!-- systems -->\n<!-- end -->\n")
    before = page.read_text()
    monkeypatch.setattr(docs, "documents", lambda: [page])
    assert docs.main(["--check"]) == docs.OUTDATED and page.read_text() == before
    assert docs.main([]) == 0 and docs.main(["--check"]) == 0
    assert "up to date" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("before\n\n<!-- options: quest -->\n\n| option |") and "old" not in text
    assert "`budget`" in text and "\n\nafter\n\n<!-- systems -->\n\n| `--attention-backend` |" in text


def test_every_refused_argument_is_there() -> None:
    for name, _, _ in (*checks._REFUSED, *checks._REFUSED_STREAMS):
        flag = "--" + name.replace("_", "-")
        assert f"`{flag}" in TEXTS["troubleshooting.md"], flag


def test_kernels_are_explained_once() -> None:
    for value in (*KERNELS, *PLAIN):
        assert re.search(rf"^\| `{value}` \|", TEXTS["gpu.md"], flags=re.MULTILINE), value
    others = {name for name, text in TEXTS.items() if KERNELS_ENV in text} - {"gpu.md"}
    assert others == {"troubleshooting.md"}  # which names the variable and leads to gpu.md
    assert {name for name, text in TEXTS.items() if PLAIN_ENV in text} == {"gpu.md"}


def test_the_picture_can_be_read_in_light_and_in_dark() -> None:
    text = (FOLDER / "architecture.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and "viewBox" in root.attrib
    assert "prefers-color-scheme: dark" in text
    light, dark = text.split("@media", 1)[0], text.split("@media", 1)[1].split("</style>", 1)[0]
    for name in re.findall(r"\.([a-z]+) \{[^}]*#", light):
        assert f".{name}" in dark, f"{name} has a colour in the light mode alone"
    for path in re.findall(r'class="file"[^>]*>([^<]+)<', text):
        assert (docs.ROOT / "sglang_ext" / path).exists(), path
