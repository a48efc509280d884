"""The few rows of the results that a reader looks for first, in words of their own: README's table.

Which rows these are stands here; every figure comes from a results file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.launch.bench._record import Figure, Timing

HEADER = "| what | ours | beside it | ratio |\n|---|---|---|---|"


@dataclass(frozen=True)
class Headline:
    """A row of a results file.

    Attributes:
        file: the results file's stem.
        row: how the row's name begins.
        baseline: how the name of what stands beside it begins.
        what, beside: both, for the reader.
        instead: how the name of another row begins, which stands beside it in the place of the baseline: what a reader
            would do else, where the study compares all rows with one.
    """

    file: str
    row: str
    baseline: str
    what: str
    beside: str
    instead: str = ""


SMOLLM2 = "SmolLM2-135M-Instruct, banking77, pools of 4000 tokens, "
HEADLINES = (
    Headline(
        "dbsa_engine", "encoding a pool of", "dense prefill",
        "DBSA: encoding a pool of 90,000 tokens", "dense prefill, stock SGLang",
    ),
    Headline(
        "dbsa_engine", "answering with 4 tokens, 1 at a time", "Fixed ICL, cached",
        "DBSA: an answer over that pool, one at a time", "the pool as a cached prefix, stock SGLang",
    ),
    Headline(
        "dbsa_engine", "answering with 4 tokens, 1 at a time", "RetICL",
        "the same", "retrieved demonstrations prefilled each time, stock SGLang",
    ),
    Headline(
        "dbsa_engine", "answering with 4 tokens, 32 at a time", "Fixed ICL, cached",
        "DBSA: the same, 32 at a time", "the pool as a cached prefix, stock SGLang",
    ),
    Headline(
        "double_p_engine_16_layers", "time per output token, 8 requests of 65536 tokens, 16 layers", "stock SGLang",
        "Double-P: a decoding step of 8 requests of 64K tokens", "stock SGLang",
    ),
    Headline(
        "double_p_engine_16_layers", "time per output token, 1 requests of 65536 tokens, 16 layers", "stock SGLang",
        "Double-P: the same, 1 request", "stock SGLang",
    ),
    Headline(
        "cascade_engine", "a prompt of 131072 tokens", "dense prefill",
        "Cascades: reading a prompt of 128K tokens, window 16K", "dense prefill, stock SGLang",
    ),
    Headline(
        "quality_dbsa_smollm2", f"{SMOLLM2}DBSA by example", "Fixed ICL",
        "DBSA: right answers of SmolLM2, blocks of one demonstration", "the best 30% of the pool in each prompt",
        f"{SMOLLM2}RetICL by example",
    ),
)  # fmt: skip


def headlines(rows: Iterable[tuple[Path, Sequence[Figure]]]) -> str:
    """The table as Markdown.

    Args:
        rows: of every results file.

    Raises:
        ValueError: a headline has not exactly one row.
    """
    by_file = {path.stem: figures for path, figures in rows}
    return "\n".join([HEADER, *(_line(each, *_row(each, by_file.get(each.file, ()))) for each in HEADLINES)])


def _row(headline: Headline, figures: Sequence[Figure]) -> tuple[Figure, Timing, float]:
    """(the row, what stands beside it, how many times as good it is)."""
    found = [f for f in figures if f.name.startswith(headline.row) and f.baseline.startswith(headline.baseline)]
    one = found[0] if len(found) == 1 and found[0].unit in _UNITS else None
    if one is not None and not headline.instead and one.baseline_timing is not None and one.ratio is not None:
        return one, one.baseline_timing, one.ratio
    others = [f.timing for f in figures if headline.instead and f.name.startswith(headline.instead)]
    if one is not None and len(others) == 1:
        ratio = one.timing.median / others[0].median
        return one, others[0], ratio if one.unit == "share" else 1 / ratio
    also = f" and one {headline.instead!r} (got {len(others)})" if headline.instead else ""
    raise ValueError(
        f"the headline {headline.what!r}: got {len(found)} rows {headline.row!r} beside {headline.baseline!r} in "
        f"{headline.file}.json, expected one, a time or a share with a ratio{also}; run that benchmark, or mend"
        " HEADLINES"
    )


def _line(headline: Headline, figure: Figure, beside: Timing, ratio: float) -> str:
    ours, theirs = (_UNITS[figure.unit](timing.median) for timing in (figure.timing, beside))
    return f"| {headline.what} | {ours} | {headline.beside}: {theirs} | **{ratio:.3g}x** |"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _share(value: float) -> str:
    return f"{value:.1%}"


_UNITS = {"ms": _time, "share": _share}
"""How a median is written, by the unit of its row; times are in seconds."""
