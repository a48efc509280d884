"""Documents that hold results: their sections, and the pages that summaries lead to, one for each results file.

Pages lie in the folder `results` beside the document with the summaries. What stands on a page below its section is
written by hand, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.launch.bench._headlines import headlines
from sglang_ext.launch.bench._markdown import BENCH, Markers, has_section, markers, render, replace_section
from sglang_ext.launch.bench._results_files import Results, read_text
from sglang_ext.launch.bench._summary import PAGES, QUALITY, SPEED, summary, titles


def _headlines(results: Sequence[Results]) -> str:
    return headlines((each.path, each.figures) for each in results)


PAGE = markers("page")
HEADLINES = markers("headlines")
SUMMARIES = SPEED_SUMMARY, QUALITY_SUMMARY = markers("speed"), markers("quality")
SECTIONS: Mapping[Markers, Callable[[Sequence[Results]], str]] = {
    HEADLINES: _headlines,
    SPEED_SUMMARY: lambda results: summary(results, SPEED),
    QUALITY_SUMMARY: lambda results: summary(results, QUALITY),
    BENCH: render,
}
"""Markers in a document -> what stands between them."""


@dataclass(frozen=True)
class Document:
    """A file and the text that it should have.

    Attributes:
        path: the file.
        before: its text, or None where there is no such file.
        after: the text with the results in it.
    """

    path: Path
    before: str | None
    after: str

    @property
    def current(self) -> bool:
        """Whether the file has this text."""
        return self.before == self.after

    def write(self) -> None:
        """Write the file, and its folder when it is missing."""
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_bytes(self.after.encode())  # bytes: line ends stay what they are


def documents(path: Path, results: Sequence[Results]) -> list[Document]:
    """A document, and behind it the pages that its summaries link.

    Raises:
        ValueError: no file, markers that are wrong, a row that is declared and missing, or a page without results.
    """
    text = read_text(path)
    found = [Document(path, text, replace_sections(text, results, path))]
    return found + (pages(path, results) if any(has_section(text, each) for each in SUMMARIES) else [])


def replace_sections(text: str, results: Sequence[Results], where: Path) -> str:
    """`text` with the results in all sections that it has; `where` names it in errors.

    Raises:
        ValueError: there are no markers, or not one line of each of a pair, or not the rows of a section.
    """
    held = [section for section in SECTIONS if has_section(text, section)]
    for section in held or [BENCH]:
        text = replace_section(text, SECTIONS[section](results), where, section)
    return text


def pages(document: Path, results: Sequence[Results]) -> list[Document]:
    """The page of each results file that has rows, for the summaries of a document.

    Raises:
        ValueError: a results file has no title, a page has wrong markers, or there is none of its results.
    """
    folder, named = document.parent / PAGES, titles(results)
    _refuse_strays(folder, named)
    return [
        _page(folder / f"{each.path.stem}.md", named[each.path.stem], document.name, each)
        for each in results
        if each.figures
    ]


def _page(path: Path, title: str, document: str, results: Results) -> Document:
    before = read_text(path) if path.exists() else None
    made = f"# {title}\n\n[All results](../{document})\n\n{render([results])}"
    return Document(
        path, before, replace_section("\n".join([*PAGE, ""]) if before is None else before, made, path, PAGE)
    )


def _refuse_strays(folder: Path, named: Mapping[str, str]) -> None:
    for path in sorted(folder.glob("*.md")):
        if path.stem not in named and has_section(read_text(path), PAGE):
            raise ValueError(
                f"{path}: got a page with a line {PAGE[0]}, expected rows in {path.stem}.json; remove the page, or run "
                "the benchmark that writes them"
            )
