"""The few rows of each results file that the page of results shows: its parts on speed and on quality.

Which rows these are stands here, and what the page of each file is called; every figure comes from a results file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from sglang_ext.launch.bench._markdown import figure_table, origin
from sglang_ext.launch.bench._record import Figure
from sglang_ext.launch.bench._results_files import Results

WIDTH = 120
"""Characters of a line of the documents."""
PAGES = "results"
"""The folder of the pages, beside the document with the summary."""


@dataclass(frozen=True)
class ShownRow:
    """A row of a results file.

    Attributes:
        name: how the row's name begins.
        baseline: how the name of what stands beside it begins.
    """

    name: str
    baseline: str = ""

    def of(self, figures: Sequence[Figure], file: str) -> Figure:
        """The row, among those of a file.

        Raises:
            ValueError: not exactly one begins so.
        """
        found = [f for f in figures if f.name.startswith(self.name) and f.baseline.startswith(self.baseline)]
        if len(found) != 1:
            raise ValueError(
                f"the summary of {file}.json: got {len(found)} rows {self.name!r} beside {self.baseline!r}, expected "
                "one; run that benchmark, or mend SPEED or QUALITY in launch/bench/_summary.py"
            )
        return found[0]


@dataclass(frozen=True)
class FileSummary:
    """What stands of a results file on the page of results.

    Attributes:
        file: the results file's stem.
        title: of the file's own page, and of its rows.
        rows: the rows that matter most, met aims and missed ones alike; none where the page of the file says it all.
    """

    file: str
    title: str
    rows: tuple[ShownRow, ...] = ()


SPEED = (
    FileSummary(
        "dbsa_engine",
        "DBSA in an engine, one GPU",
        (
            ShownRow("encoding a pool of", "dense prefill"),
            ShownRow("answering with 4 tokens, 1 at a time", "Fixed ICL, cached"),
            ShownRow("answering with 4 tokens, 1 at a time", "RetICL"),
            ShownRow("answering with 4 tokens, 32 at a time", "Fixed ICL, cached"),
            ShownRow("answering with a label, 32 at a time", "Fixed ICL, cached"),
            ShownRow("a plain request with 4 tokens, 32 at a time", "zero-shot"),
        ),
    ),
    FileSummary(
        "dbsa_engine_tp2",
        "DBSA in an engine, two GPUs",
        (
            ShownRow("encoding a pool of", "dense prefill"),
            ShownRow("answering with 4 tokens, 32 at a time", "Fixed ICL, cached"),
        ),
    ),
    FileSummary(
        "dbsa_engine_70b_tp2",
        "DBSA in an engine, half of a 70B shape, two GPUs",
        (
            ShownRow("encoding a pool of", "dense prefill"),
            ShownRow("answering with 4 tokens, 32 at a time", "Fixed ICL, cached"),
        ),
    ),
    FileSummary(
        "dbsa_engine_small_blocks",
        "DBSA in an engine, blocks of 5 demonstrations",
        (ShownRow("answering with 4 tokens, 32 at a time", "Fixed ICL, cached"),),
    ),
    FileSummary("dbsa_engine_examples", "DBSA over single demonstrations, 8,000 tokens"),
    FileSummary("dbsa_engine_examples_30k", "DBSA over single demonstrations, 30,000 tokens"),
    FileSummary(
        "dbsa_host",
        "A pool that comes back from host memory",
        (
            ShownRow("a pool of"),
            ShownRow(
                "the longest time between two tokens of an answer, while short prompts are read that evict blocks"
            ),
        ),
    ),
    FileSummary(
        "serve",
        "A server under load",
        (
            ShownRow("questions over pools: goodput"),
            ShownRow("a token while a pool of 90000 tokens is encoded"),
        ),
    ),
    FileSummary(
        "serve_delayed",
        "A server under load whose prefills wait",
        (ShownRow("questions over pools: goodput"),),
    ),
    FileSummary(
        "serve_encoding",
        "A server that encodes 128 tokens at a time",
        (ShownRow("a token while a pool of 90000 tokens is encoded"),),
    ),
    FileSummary(
        "start",
        "Start of a server",
        (
            ShownRow("start of a server, dbsa, cold caches"),
            ShownRow("start of a server, dbsa, warm caches"),
        ),
    ),
    FileSummary(
        "dbsa_kernels",
        "DBSA's kernels",
        (ShownRow("encoding attention, one layer", "dense causal prefill"),),
    ),
    FileSummary(
        "double_p_engine",
        "Double-P in an engine, one GPU",
        (
            ShownRow("time per output token, 8 requests of 65536 tokens, 32 layers (peaked"),
            ShownRow("time per output token, 8 requests of 65536 tokens, 32 layers (middle"),
            ShownRow("prefill of 65536 tokens with their clustering"),
        ),
    ),
    FileSummary(
        "double_p_engine_16_layers",
        "Double-P in an engine, 16 layers, one GPU",
        (ShownRow("time per output token, 8 requests of 65536 tokens"),),
    ),
    FileSummary(
        "double_p_engine_16_layers_exact",
        "Double-P in an engine, p2 0.95",
        (ShownRow("time per output token, 8 requests of 65536 tokens"),),
    ),
    FileSummary(
        "double_p_engine_tp2",
        "Double-P in an engine, 16 layers, two GPUs",
        (ShownRow("time per output token, 8 requests of 65536 tokens"),),
    ),
    FileSummary(
        "double_p_engine_drafted",
        "Double-P drafts, 16 layers",
        (ShownRow("a round of 8 drafts and their verification, which gives 1 to 9 tokens, 8 requests"),),
    ),
    FileSummary(
        "double_p_kernels",
        "Double-P's kernels",
        (
            ShownRow("decode attention, one layer, middle planted keys, batch 1, 64K"),
            ShownRow("decode attention, one layer, middle planted keys, batch 8, 64K"),
            ShownRow("decode attention, one layer, peaked planted keys, batch 8, 64K"),
            ShownRow("middle planted keys, batch 8, 64K: the step"),
        ),
    ),
    FileSummary(
        "cascade_engine",
        "Cascades in an engine",
        (ShownRow("a prompt of 262144 tokens"),),
    ),
    FileSummary(
        "cascade_engine_tp2",
        "Cascades in an engine, two GPUs",
        (ShownRow("a prompt of 131072 tokens"),),
    ),
    FileSummary(
        "cascade_kernels",
        "Kernels of cascades",
        (
            ShownRow("score and cache update of a stride"),
            ShownRow("decode attention, one layer, 18496 tokens kept, batch 32"),
        ),
    ),
    FileSummary(
        "ltri_engine",
        "Ltri-LLM in an engine",
        (
            ShownRow("a prompt of 524288 tokens", "20 s"),
            ShownRow("another question about a document of 524288 tokens", "30 ms"),
            ShownRow("a decoding step, batch 8", "over 6272 tokens"),
        ),
    ),
    FileSummary(
        "ltri_kernels",
        "Ltri-LLM's kernels",
        (ShownRow("scores of 4096 blocks by `max`", "15 us"),),
    ),
    FileSummary(
        "verification",
        "Verifying drafts by dense attention",
    ),
    FileSummary(
        "fleet",
        "A fleet behind SMG",
        (ShownRow("32 pools (uniform) on 4 servers, consistent_hashing: share of selected blocks"),),
    ),
    FileSummary(
        "fleet_gpu",
        "A fleet behind SMG, a GPU each",
        (ShownRow("16 pools (uniform) on 2 servers, manual: share of selected blocks"),),
    ),
)
"""The part on speed."""

QUALITY = (
    FileSummary(
        "quality_dbsa",
        "DBSA beside Fixed ICL and RetICL, embedded model",
        (
            ShownRow("banking77, pools of 4000 tokens, RetICL by example"),
            ShownRow("banking77, pools of 4000 tokens, DBSA 30%:"),
            ShownRow("banking77, pools of 4000 tokens, DBSA by example"),
        ),
    ),
    FileSummary("quality_dbsa_ablations", "DBSA with one thing changed, embedded model"),
    FileSummary("quality_dbsa_ablations_smollm2", "DBSA with one thing changed, SmolLM2-135M"),
    FileSummary("quality_block_scores", "How blocks are scored, embedded model"),
    FileSummary("quality_block_scores_smollm2", "How blocks are scored, SmolLM2-135M"),
    FileSummary("quality_written_smollm2", "DBSA at written positions, SmolLM2-135M"),
    FileSummary("retrieval", "What retrievers find in real demonstrations"),
    FileSummary(
        "quality_dbsa_smollm2",
        "DBSA beside Fixed ICL and RetICL, SmolLM2-135M",
        (
            ShownRow("SmolLM2-135M-Instruct, banking77, pools of 7000 tokens, RetICL by example"),
            ShownRow("SmolLM2-135M-Instruct, banking77, pools of 7000 tokens, DBSA 30%:"),
            ShownRow("SmolLM2-135M-Instruct, banking77, pools of 7000 tokens, DBSA by example"),
        ),
    ),
    FileSummary(
        "quality_blocks_smollm2",
        "DBSA over smaller blocks, banking77, SmolLM2-135M-Instruct",
        (ShownRow("SmolLM2-135M-Instruct, banking77, pools of 4000 tokens, DBSA 30%, blocks of 5 behind"),),
    ),
    FileSummary(
        "quality_blocks_sets_smollm2",
        "DBSA over smaller blocks, clinc150 and nlu, SmolLM2-135M-Instruct",
    ),
    FileSummary(
        "quality_labels",
        "The most likely label",
    ),
    FileSummary(
        "quality_double_p_gpu",
        "Double-P in kernels",
        (ShownRow("banking77, 7 a class, Double-P"),),
    ),
    FileSummary(
        "quality_double_p",
        "Double-P beside RetroInfer, Quest and Twilight",
        (
            ShownRow("banking77, 7 a class, Double-P"),
            ShownRow("banking77, 7 a class, RetroInfer"),
            ShownRow("banking77, 7 a class, Twilight, as many kept"),
        ),
    ),
    FileSummary(
        "double_p_recovered",
        "Attention that Double-P and others recover",
        (ShownRow("recovered attention to the middle, captured keys, 16384 tokens: Double-P (0.95, 0.7)"),),
    ),
    FileSummary("double_p_captured", "Double-P's time over captured keys"),
    FileSummary("double_p_recovered_smollm2", "Attention that is recovered, SmolLM2-135M"),
    FileSummary(
        "double_p_errors",
        "Where Double-P's centroids err, embedded model",
        (ShownRow("clusters that must be exact for an error of at most 5%"),),
    ),
    FileSummary("double_p_errors_smollm2", "Where Double-P's centroids err, SmolLM2-135M-Instruct"),
    FileSummary(
        "quality_ruler_smollm2",
        "Tasks like RULER's, SmolLM2-135M",
        (ShownRow("SmolLM2-135M-Instruct, single-key needle, 8192 tokens, Double-P (0.95, 0.7), in kernels"),),
    ),
    FileSummary(
        "quality_ruler_smollm2_streams",
        "Tasks like RULER's on streams, SmolLM2-135M",
        (ShownRow("SmolLM2-135M-Instruct, single-key needle, 4096 tokens, 4 cascades:"),),
    ),
    FileSummary(
        "drafts",
        "Tokens that Double-P foresees, embedded model",
    ),
    FileSummary(
        "quality_cascade",
        "Cascades beside StreamingLLM",
        (
            ShownRow("stream, 65536 tokens, 4 cascades: perplexity of labels"),
            ShownRow("passkey, 16384 tokens, 4 cascades: digits right"),
        ),
    ),
    FileSummary(
        "quality_book_2048",
        "Two books of 512K tokens, window 2,048, SmolLM2-135M",
        (
            ShownRow("SmolLM2-135M-Instruct, anarchist_faq, 524288 tokens, 2 cascades: perplexity"),
            ShownRow("SmolLM2-135M-Instruct, anarchist_faq, 524288 tokens, 4 cascades: perplexity"),
        ),
    ),
    FileSummary(
        "quality_book_4096",
        "Two books of 512K tokens, window 4,096, SmolLM2-135M",
        (ShownRow("SmolLM2-135M-Instruct, anarchist_faq, 524288 tokens, 2 cascades: perplexity"),),
    ),
    FileSummary(
        "quality_ltri",
        "Ltri-LLM and InfLLM",
        (ShownRow("passkey in banking77 texts, 16384 tokens, Ltri-LLM, max:"),),
    ),
)
"""The part on quality."""


def summary(results: Sequence[Results], part: Sequence[FileSummary]) -> str:
    """One part as Markdown: for each of its files a heading, a line that leads to its page, and a table.

    Raises:
        ValueError: a file or a row that the part declares is missing.
    """
    by_file = {each.path.stem: each for each in results}
    if missing := [f"{each.file}.json" for each in part if each.file not in by_file]:
        raise ValueError(
            f"results files of the summary: got no {', '.join(missing)}, expected all that SPEED and QUALITY in "
            "launch/bench/_summary.py declare; run their benchmarks, or mend it"
        )
    return "\n\n".join(_section(each, by_file[each.file]) for each in part)


def _section(declared: FileSummary, results: Results) -> str:
    rows = [row.of(results.figures, declared.file) for row in declared.rows]
    table = f"\n\n{figure_table(rows)}" if rows else ""
    return f"### {declared.title}\n\n{_line(results)}{table}"


def _line(results: Results) -> str:
    """Where all rows are, how many aims they meet, and where they come from."""
    aims = [figure.met for figure in results.figures if figure.met is not None]
    met = f", {sum(aims)} of {len(aims)} aims met" if aims else ""
    rows = f"[All rows ({len(results.figures)})]({PAGES}/{results.path.stem}.md){met}:"
    return "\n".join(wrap(f"{rows} {origin(results)}", WIDTH, break_long_words=False, break_on_hyphens=False))


def titles(results: Sequence[Results]) -> dict[str, str]:
    """The title of the page of each results file that has rows, by the file's stem.

    Raises:
        ValueError: no summary declares the file.
    """
    declared = {each.file: each.title for each in (*SPEED, *QUALITY)}
    named = [each.path for each in results if each.figures]
    if unknown := [str(path) for path in named if path.stem not in declared]:
        raise ValueError(
            f"{', '.join(unknown)}: got no summary, expected one for each results file with rows; add it to SPEED or "
            "QUALITY in launch/bench/_summary.py"
        )
    return {path.stem: declared[path.stem] for path in named}
