"""README.md and the other documents: links and named files exist, examples compile, and lines are short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(f"docs/results/{path.name}" for path in (ROOT / "docs" / "results").glob("*.md"))
LED_TO = ["CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
DOCUMENTS = ["README.md", *LED_TO, *PAGES]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def without_commands(text: str) -> str:
    """A page of results without what `bench report` writes, which has a command on one line."""
    return re.sub(r"^<!-- page:begin -->$.*?^<!-- page:end -->$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """What links can name in a document: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_named_modules_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        file = (ROOT / document).parent / name if name else ROOT / document
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target
    places = [ROOT, ROOT / "sglang_ext"]
    for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)", text):
        assert any((place / name).exists() for place in places), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_examples_compile(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)):
        compile(code, f"{document}, Python example {number + 1}", "exec")


def test_there_are_python_examples() -> None:
    assert "```python" in README and "```python" in (ROOT / "docs" / "pools.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "CONTRIBUTING.md"])
def test_lines_are_short(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    text = without_commands(without_code(text))  # what a command printed stays as it is
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert long == []


def test_the_readme_is_short_and_leads_to_every_document() -> None:
    assert len(README.splitlines()) <= 150
    for document in LED_TO:
        assert f"({document})" in README, document


def test_the_page_of_results_leads_to_all_of_them() -> None:
    text = (ROOT / "docs" / "RESULTS.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"({page.removeprefix('docs/')})" in text, page


def test_the_demo_is_the_run_that_is_kept() -> None:
    kept = json.loads((ROOT / "launch" / "bench" / "results" / "demo.json").read_text(encoding="utf-8"))
    assert f"`{kept['command']}`" in README and kept["commit"][:7] in README and kept["date"] in README
    assert kept["machine"] in README and f"{kept['queries']} queries, {kept['concurrency']} at a time" in README
    printed = re.search(r"demo:begin.*?demo:end", README, flags=re.DOTALL)
    assert printed is not None
    cells = re.findall(r"^\| (\S.*?) +\| +([\d.]+) \| +([\d.]+) \| +([\d,]+) \| +([\d,]+) \|", printed[0], re.MULTILINE)
    assert cells == [
        (
            row["method"],
            f"{row['accuracy']:.3f}",
            f"{row['requests_per_second']:.1f}",
            f"{row['prompt_tokens']:,.0f}",
            f"{row['cached_tokens']:,.0f}",
        )
        for row in kept["rows"]
    ]
