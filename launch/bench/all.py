"""``sglang-ext bench all``: every benchmark whose rows stand in docs/RESULTS.md, one after the other.

A run that was cut short goes on where it stopped: what has ended is noted in ``all.json`` in the results folder, with a
hash of the product's code (`_code`). A benchmark that ended with other code is run again, so that in the end all rows
are of one state of the code. One that fails holds up no other one; the exit status is 1 then, and the next run tries it
again. The studies of quality need --data, the folder of the classification sets, and are left out without it; so are
those of a real model without --model, those of books without --books, and benchmarks of several GPUs on a machine with
fewer.

The tables of docs/ follow from the results with ``sglang-ext bench report --markdown README.md docs/RESULTS.md``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.launch.bench._code import code_hash
from sglang_ext.launch.bench._record import results_folder
from sglang_ext.launch.bench._results_files import read_text
from sglang_ext.types import JsonObject

RESULTS = Path(__file__).resolve().parent / "results"
JOURNAL = "all.json"
EAGER_PREFILL = '{"cuda_graph_backend_prefill":"disabled"}'
SIXTEEN = ("--layers", "16", "--levels", "middle", "--engine-batch", "1", "8")
"""Of the model: 8 rows of 64K tokens fit a GPU of 80 GB, and so one and two of these can be compared."""
QUARTER = ("--tokens", "262144", "--dense-tokens", "131072")
"""A prompt of a quarter of a million tokens costs each of its later parts what a million's parts cost."""
CAPTURED = ("double_p", "--device", "cpu", "--texts", "4")
SCORED_SETS = ("banking77", "nlu", "clinc150", "trec_fine")
HALF = '{"dtype":"float16","disable_cuda_graph":true}'
DELAYED = "--enable-prefill-delayer --prefill-delayer-queue-min-ratio 0.25 --prefill-delayer-max-delay-ms 100"
"""SGLang's flags with which a prefill waits until it has a quarter as many requests as decode, but 0.1 s at most."""


@dataclass(frozen=True)
class Benchmark:
    """One command.

    Attributes:
        name: of it, in --only.
        words: behind ``sglang-ext bench``.
        out: its --out, within the results folder; empty where that is the folder itself.
        gpus: that it needs.
        needs: arguments of this command without which it is left out, and which it is given.
    """

    name: str
    words: tuple[str, ...]
    out: str = ""
    gpus: int = 1
    needs: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark("dbsa-kernels", ("dbsa", "--only", "kernels"), "dbsa_kernels.json"),
    Benchmark("dbsa-engine", ("dbsa", "--only", "engine", "--repeats", "5", "--rounds", "2"), "dbsa_engine.json"),
    Benchmark(
        "dbsa-engine-tp2",
        ("dbsa", "--only", "engine", "--tp", "2", "--concurrency", "1", "32", "--label-tokens", "4")
        + ("--decode-tokens", "0", "--larger", "0", "--repeats", "5", "--rounds", "2"),
        "dbsa_engine_tp2.json",
        gpus=2,
    ),
    Benchmark(
        "dbsa-engine-70b-tp2",
        ("dbsa", "--only", "engine", "--tp", "2", "--shape", "llama-3.1-70b", "--layers", "40", "--apart")
        + ("--concurrency", "1", "8", "32", "--label-tokens", "4", "--no-labels")
        + ("--decode-tokens", "0", "--larger", "0", "--repeats", "5", "--rounds", "2"),
        "dbsa_engine_70b_tp2.json",
        gpus=2,
    ),
    Benchmark(
        "dbsa-engine-small-blocks",
        ("dbsa", "--only", "engine", "--block-size", "5", "--apart", "--concurrency", "1", "32", "--label-tokens", "4")
        + ("--no-labels", "--decode-tokens", "0", "--larger", "0", "--repeats", "5", "--rounds", "2"),
        "dbsa_engine_small_blocks.json",
    ),
    Benchmark(
        "dbsa-engine-examples",
        ("dbsa", "--only", "engine", "--tokens", "8000", "--label-tokens", "8", "--no-labels", "--decode-tokens", "0")
        + ("--larger", "0", "--block-size", "10"),
        "dbsa_engine_examples.json",
    ),
    Benchmark(
        "dbsa-engine-examples-30k",
        ("dbsa", "--only", "engine", "--tokens", "30000", "--label-tokens", "8", "--no-labels", "--decode-tokens", "0")
        + ("--larger", "0", "--block-size", "10", "--concurrency", "1", "32"),
        "dbsa_engine_examples_30k.json",
    ),
    Benchmark("dbsa-host", ("dbsa", "--only", "host"), "dbsa_host.json"),
    Benchmark(
        "double_p-kernels",
        ("double_p", "--only", "kernels", "--lengths", "65536", "131072", "--batches", "1", "8"),
        "double_p_kernels.json",
    ),
    Benchmark(
        "double_p-engine",
        ("double_p", "--only", "engine", "--repeats", "5", "--engine", EAGER_PREFILL),
        "double_p_engine.json",
    ),
    Benchmark(
        "double_p-engine-16-layers",
        ("double_p", "--only", "engine", *SIXTEEN, "--repeats", "5"),
        "double_p_engine_16_layers.json",
    ),
    Benchmark(
        "double_p-engine-16-layers-exact",
        ("double_p", "--only", "engine", *SIXTEEN, "--p2", "0.95", "--repeats", "5"),
        "double_p_engine_16_layers_exact.json",
    ),
    Benchmark(
        "double_p-engine-tp2",
        ("double_p", "--only", "engine", "--tp", "2", *SIXTEEN, "--repeats", "5", "--engine", EAGER_PREFILL),
        "double_p_engine_tp2.json",
        gpus=2,
    ),
    Benchmark(
        "double_p-engine-drafted",
        ("double_p", "--only", "engine", *SIXTEEN, "--drafted", "8", "--repeats", "5", "--engine", EAGER_PREFILL),
        "double_p_engine_drafted.json",
    ),
    Benchmark(
        "double_p-recovered",
        ("double_p", "--only", "recovered", "--device", "cpu", "--texts", "32"),
        "double_p_recovered.json",
    ),
    Benchmark("double_p-captured", ("double_p", "--only", "captured"), "double_p_captured.json"),
    Benchmark("double_p-errors", (*CAPTURED, "--only", "errors"), "double_p_errors.json"),
    *(
        Benchmark(
            f"double_p-{part}-smollm2",
            (*CAPTURED, "--only", part, "--text-length", "8192"),
            f"double_p_{part}_smollm2.json",
            needs=("books", "model"),
        )
        for part in ("errors", "recovered")
    ),
    Benchmark("retrieval", ("retrieval",), "retrieval.json", needs=("data",)),
    Benchmark("cascade-kernels", ("cascade", "--only", "kernels")),
    Benchmark("cascade-engine", ("cascade", "--only", "engine", *QUARTER)),
    Benchmark("cascade-engine-tp2", ("cascade", "--only", "engine", "--tp", "2", *QUARTER), gpus=2),
    Benchmark("ltri-kernels", ("ltri", "--only", "kernels")),
    Benchmark("ltri-engine", ("ltri", "--only", "engine")),
    Benchmark("ltri-engine-tp2", ("ltri", "--only", "engine", "--roles", "ltri", "stock", "--tp", "2"), gpus=2),
    Benchmark("serve", ("serve",), "serve.json"),
    Benchmark("serve-delayed", ("serve", "--mixes", "questions", "--flags", DELAYED), "serve_delayed.json"),
    Benchmark(
        "serve-encoding",
        ("serve", "--mixes", "encoding", "--roles", "ours", "--flags", f"{DELAYED} --encoding-tokens 128"),
        "serve_encoding.json",
    ),
    Benchmark("start", ("start",), "start.json"),
    Benchmark("verification", ("verification",), "verification.json"),
    Benchmark("drafts", ("drafts",), "drafts.json", needs=("data",)),
    Benchmark("drafts-smollm2", ("drafts",), "drafts_smollm2.json", needs=("books", "model")),
    Benchmark(
        "fleet-gpu",
        ("fleet", "--policies", "consistent_hashing", "manual", "cache_aware", "--layers", "8", "--block-size", "50")
        + ("--pool-tokens", "20000", "--max-total-tokens", "155000"),
        "fleet_gpu.json",
        gpus=4,
    ),
    Benchmark(
        "fleet",
        ("fleet", "--shape", "tiny", "--policies", "consistent_hashing", "sticky_round_robin", "manual", "cache_aware")
        + ("--popularity", "uniform", "zipf", "--pool-tokens", "300", "--block-size", "2", "--max-total-tokens", "2300")
        + ("--concurrency", "4", "--answer", "1"),
        "fleet.json",
    ),
    Benchmark(
        "quality-dbsa",
        ("quality", "--suite", "dbsa", "--sets", "banking77", "--pool-tokens", "2000", "4000", "--queries", "50")
        + ("--methods", "main", "granularity-example"),
        "quality_dbsa.json",
        needs=("data",),
    ),
    Benchmark(
        "quality-dbsa-ablations",
        ("quality", "--suite", "dbsa", "--methods", "dbsa-30", "ablations", "--sets", "banking77")
        + ("--pool-tokens", "4000", "--queries", "50"),
        "quality_dbsa_ablations.json",
        needs=("data",),
    ),
    Benchmark(
        "quality-dbsa-ablations-smollm2",
        ("quality", "--suite", "dbsa", "--methods", "dbsa-30", "ablations", "--sets", "banking77")
        + ("--pool-tokens", "2000", "4000", "--queries", "20"),
        "quality_dbsa_ablations_smollm2.json",
        needs=("data", "model"),
    ),
    Benchmark(
        "quality-block-scores",
        ("quality", "--suite", "dbsa", "--methods", "scores", "--sets", *SCORED_SETS, "--pool-tokens", "4000")
        + ("--queries", "40"),
        "quality_block_scores.json",
        needs=("data",),
    ),
    Benchmark(
        "quality-block-scores-smollm2",
        ("quality", "--suite", "dbsa", "--methods", "scores", "--sets", "clinc150", "nlu", "--pool-tokens", "4000")
        + ("--queries", "100", "--concurrency", "32", "--kernels", "auto"),
        "quality_block_scores_smollm2.json",
        needs=("data", "model"),
    ),
    Benchmark(
        "quality-dbsa-smollm2",
        ("quality", "--suite", "dbsa", "--sets", "banking77", "--pool-tokens", "2000", "4000", "7000")
        + ("--methods", "main", "block-score-text", "granularity-example", "cut-behind-100", "grouping-cluster")
        + ("--queries", "100", "--concurrency", "32", "--kernels", "auto"),
        "quality_dbsa_smollm2.json",
        needs=("data", "model"),
    ),
    Benchmark(
        "quality-written-smollm2",
        ("quality", "--suite", "dbsa", "--methods", "written", "--sets", "banking77", "--pool-tokens", "2000", "4000")
        + ("7000", "--queries", "100", "--concurrency", "32", "--kernels", "auto"),
        "quality_written_smollm2.json",
        needs=("data", "model"),
    ),
    *(
        Benchmark(
            f"quality-{name}-smollm2",
            ("quality", "--suite", "dbsa", "--methods", "blocks", "--sets", *sets, "--pool-tokens", *sizes)
            + ("--queries", "100", "--concurrency", "32", "--kernels", "auto"),
            f"quality_{name.replace('-', '_')}_smollm2.json",
            needs=("data", "model"),
        )
        for name, sets, sizes in (
            ("blocks", ("banking77",), ("4000", "7000")),
            ("blocks-sets", ("clinc150", "nlu"), ("7000",)),
        )
    ),
    Benchmark(
        "quality-labels",
        ("quality", "--suite", "dbsa", "--methods", "labels", "--sets", "banking77", "clinc150", "--labels", "0")
        + ("--pool-tokens", "4000", "--queries", "30", "--draws", "2", "--concurrency", "1"),
        "quality_labels.json",
        needs=("data",),
    ),
    Benchmark(
        "quality-double_p",
        ("quality", "--suite", "double_p", "--queries", "400", "--passkey", "4096", "--parallel", "2"),
        "quality_double_p.json",
        needs=("data",),
    ),
    Benchmark(
        "quality-double_p-gpu",
        ("quality", "--suite", "double_p", "--queries", "3080", "--passkey", "4096", "8192", "16384", "--parallel", "2")
        + ("--methods", "dense", "double_p-kernels", "--kernels", "triton", "--engine", '{"dtype":"float16"}'),
        "quality_double_p_gpu.json",
        needs=("data",),
    ),
    Benchmark(
        "quality-cascade",
        ("quality", "--suite", "cascade", "--parallel", "7", "--kernels", "triton", "--engine", HALF),
        "quality_cascade.json",
        needs=("data",),
    ),
    Benchmark(
        "quality-ltri",
        ("quality", "--suite", "ltri", "--passkey", "4096", "16384")
        + ("--prompts", "100", "--host-gb", "4", "--parallel", "4", "--kernels", "flashinfer", "--methods", "dense")
        + ("streaming_llm", "infllm", "random", "given", "ltri-sum", "ltri-max", "ltri-max-4-spans"),
        "quality_ltri.json",
        needs=("data",),
    ),
    Benchmark(
        "quality-ruler",
        ("quality", "--suite", "ruler", "--passkey", "4096", "--prompts", "40", "--host-gb", "2", "--methods", "dense")
        + ("double_p", "quest", "retroinfer", "twilight", "streaming_llm", "cascade-4", "infllm", "ltri-max"),
        "quality_ruler.json",
        needs=("data",),
    ),
    Benchmark(
        "quality-ruler-smollm2",
        ("quality", "--suite", "ruler", "--prompts", "100", "--methods", "dense", "double_p")
        + ("quest", "retroinfer", "twilight", "--engine", '{"dtype":"float16"}'),
        "quality_ruler_smollm2.json",
        needs=("data", "model"),
    ),
    Benchmark(
        "quality-ruler-smollm2-streams",
        ("quality", "--suite", "ruler", "--prompts", "100", "--heads", "all", "--host-gb", "4")
        + ("--methods", "dense", "double_p-kernels", "streaming_llm", "cascade-4", "cascade-4-unselected", "infllm")
        + ("ltri-sum", "ltri-max", "ltri-ruler", "--kernels", "triton", "--engine", HALF),
        "quality_ruler_smollm2_streams.json",
        needs=("data", "model"),
    ),
    *(
        Benchmark(
            f"quality-book-{window}",
            ("quality", "--suite", "book", "--stream", "524288", "--window", str(window), "--stride", "128")
            + ("--concurrency", "1", "--parallel", "6", "--host-gb", "16", "--heads", "all")
            + ("--kernels", "triton", "--engine", HALF),
            f"quality_book_{window}.json",
            needs=("books", "model"),
        )
        for window in (2048, 4096)
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [each.name for each in BENCHMARKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="say what is left to run, and run nothing")
    parser.add_argument("--data", help="folder of the classification sets; without it, studies of quality are left out")
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct; without it, its studies are left out")
    parser.add_argument("--books", nargs="+", metavar="FILE", help="texts of 512K tokens or more, likewise")
    parser.add_argument(
        "--out", type=results_folder, default=RESULTS, help="folder of the JSON files (default: launch/bench/results)"
    )
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


def gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def main(args: argparse.Namespace) -> int:
    code, failed, journal = code_hash(), [], args.out / JOURNAL
    chosen = [each for each in BENCHMARKS if each.name in args.only]
    for benchmark in chosen:
        line = shlex.join(["sglang-ext", "bench", *benchmark.words])
        if lacking := [f"--{name}" for name in benchmark.needs if not getattr(args, name)]:
            print(f"{benchmark.name}: left out, because it needs {' and '.join(lacking)}", flush=True)
            continue
        if benchmark.gpus > 1 and benchmark.gpus > gpus():
            print(f"{benchmark.name}: left out, because it needs {benchmark.gpus} GPUs", flush=True)
            continue
        if done(journal).get(benchmark.name, {}).get("code") == code:
            print(f"{benchmark.name}: done with this code", flush=True)
            continue
        print(f"{benchmark.name}: {line}", flush=True)
        if args.list:
            continue
        if benchmark.words[0] in ("quality", "fleet"):
            put_aside(args.out / benchmark.out, code)
        begin = time.perf_counter()
        status = subprocess.run(command(benchmark, args), check=False).returncode
        seconds = time.perf_counter() - begin
        if status:
            failed.append(benchmark.name)
            print(f"{benchmark.name}: failed with exit status {status} after {seconds:.0f} s", flush=True)
            continue
        note(journal, benchmark.name, {"code": code, "seconds": round(seconds)})
    if failed:
        print(f"failed: {', '.join(failed)}; the same command runs them again", file=sys.stderr)
    return 1 if failed else 0


def put_aside(results: Path, code: str) -> None:
    """Rename results of other code to ``.json.old``, of a benchmark that would go on from them."""
    if results.exists() and json.loads(read_text(results)).get("code") != code:
        results.replace(results.with_suffix(".json.old"))


def command(benchmark: Benchmark, args: argparse.Namespace) -> Sequence[str]:
    """What runs a benchmark."""
    words = [sys.executable, "-m", "sglang_ext.launch.cli", "bench", *benchmark.words]
    for name in benchmark.needs:
        given = getattr(args, name)
        words += [f"--{name}", *([given] if isinstance(given, str) else given)]
    return [*words, "--out", str(args.out / benchmark.out), *(["--commit", args.commit] if args.commit else [])]


def done(journal: Path) -> dict[str, JsonObject]:
    """Name of a benchmark that has ended -> the hash of the code that it ran with, and its seconds.

    Raises:
        ValueError: the journal is not one.
    """
    if not journal.exists():
        return {}
    try:
        found: dict[str, JsonObject] = json.loads(read_text(journal))["done"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{journal}: expected what `bench all` has noted there, got something else ({error}); delete the file, and"
            " all benchmarks run again"
        ) from error
    return found


def note(journal: Path, name: str, what: JsonObject) -> None:
    """Keep that a benchmark has ended."""
    known = done(journal)
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.write_text(json.dumps({"bench": "all", "done": {**known, name: what}}, indent=1) + "\n")
