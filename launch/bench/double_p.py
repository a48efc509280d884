"""``sglang-ext bench double_p``: decoding over clusters, beside dense attention and what bandwidth allows.

In Llama-3.1-8B's shape, bfloat16, on one NVIDIA GPU; what is of captured keys is also of another `--model`, which reads
`--books` where they are named:

- kernels: attention of one decode layer on planted keys of three stated levels of peakedness, and its stages;
- recovered: how much of the attention of the reference model's trained heads Double-P and the baselines recover, with
  the budgets that their authors recommend (no times: also without a GPU, `--device cpu`);
- errors: where centroids err on such keys, how many tokens and clusters heads need, and what other clusterings and
  other thresholds cost (no times either);
- captured: the same, and attention over rows tiled from these keys beside the baselines where they recover as much;
- engine: time per output token over prompts whose keys are planted likewise, against stock SGLang; clustering against
  the prefill of the same tokens; memory of the clusters.

Every row names its baseline, measured in the same run. Nothing is timed whose output was not checked before; kept
fractions and the recovered mass stand beside the times.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

import torch

from sglang_ext.attention.choice import KERNELS, KERNELS_ENV
from sglang_ext.launch.bench._record import Curve, Figure, json_file, save, stock_backends, table, tensor_parallel
from sglang_ext.policies.double_p import DoubleP
from sglang_ext.types import JsonObject

RESULTS = Path(__file__).resolve().parent / "results" / "double_p.json"
LEVELS = ("flat", "middle", "peaked")
PARTS = ("kernels", "recovered", "errors", "captured", "engine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--shape", choices=("llama-3.1-8b", "tiny"), default="llama-3.1-8b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 65536, 131072], metavar="TOKENS")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--p1", type=float, default=0.95, help="estimated mass that is kept (default: 0.95)")
    parser.add_argument("--p2", type=float, default=0.7, help="estimated mass that is exact (default: 0.7)")
    parser.add_argument("--group", choices=("union", "mean"), default="union", help="sets of a group (default: union)")
    parser.add_argument("--texts", type=int, default=32, help="recovered, errors, captured: how many (default: 32)")
    parser.add_argument("--text-length", type=int, default=16384, metavar="TOKENS", help="of such a text")
    parser.add_argument("--model", type=Path, help="a Llama's folder; of captured keys (default: the embedded model)")
    parser.add_argument(
        "--books", type=Path, nargs="+", default=[], metavar="FILE", help="in UTF-8, whose pieces are the texts"
    )
    parser.add_argument("--captured", type=Path, help="file that keeps their keys (1.1 GB for 8 texts)")
    parser.add_argument(
        "--captured-length", type=int, default=65536, metavar="TOKENS", help="of a timed row of captured keys"
    )
    parser.add_argument("--captured-batch", type=int, default=8, metavar="N", help="timed rows of captured keys")
    parser.add_argument(
        "--levels",
        choices=tuple(LEVELS),
        nargs="+",
        default=list(LEVELS),
        help="engine half: peakedness (default: all)",
    )
    parser.add_argument("--engine-length", type=int, default=65536, metavar="TOKENS", help="of a prompt, engine half")
    parser.add_argument(
        "--engine-batch",
        type=int,
        nargs="+",
        default=[1, 8],
        metavar="N",
        help="prompts that are answered together; each is measured, engine half (default: 1 8)",
    )
    parser.add_argument("--decode-tokens", type=int, default=256, help="output tokens a run, engine half")
    parser.add_argument(
        "--drafted", type=int, default=0, metavar="N", help="our engine drafts N tokens, and verifies them, engine half"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each, engine half (default: 3)")
    parser.add_argument("--layers", type=int, default=0, help="of both engines' model (default: the shape's)")
    parser.add_argument(
        "--together", action="store_true", help="all engines resident, in turns; needs memory for all (see --layers)"
    )
    stock_backends(parser)
    tensor_parallel(parser)
    parser.add_argument("--kernels", choices=KERNELS, help=f"of our engine, {KERNELS_ENV} (default: flashinfer)")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of all engines, as JSON")
    parser.add_argument(
        "--policy", type=json.loads, default={}, help="more options of Double-P, as JSON (min_tokens, segment, ...)"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: for what is recovered; for the rest to try the benchmark itself, TRITON_INTERPRET=1",
    )
    parser.add_argument(
        "--out", type=json_file, default=RESULTS, help="JSON file (default: launch/bench/results/double_p.json)"
    )
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


def main(args: argparse.Namespace) -> int:
    from sglang_ext.launch.bench import _double_p_baselines as baselines
    from sglang_ext.launch.bench import _double_p_captured as captured
    from sglang_ext.launch.bench import _double_p_error_rows as errors
    from sglang_ext.launch.bench import _double_p_kernels as kernels
    from sglang_ext.launch.bench import _double_p_texts as captured_texts
    from sglang_ext.launch.bench._double_p_errors import check_window
    from sglang_ext.launch.bench._double_p_rows import cluster_on
    from sglang_ext.launch.bench._gpu import require_gpu

    device = require_gpu() if args.device == "cuda" else torch.device("cpu")
    config = DoubleP(**{"p1": args.p1, "p2": args.p2, "group": args.group, **args.policy})
    source = captured_texts.TextSource(args.model or captured_texts.MODEL, tuple(args.books))
    if (args.model or args.books) and args.only not in ("recovered", "errors", "captured"):
        raise ValueError("--model, --books: expected --only recovered, errors or captured; other parts capture no keys")
    if args.only in (None, "errors"):  # not after an hour
        check_window(config)
    if args.only in (None, "captured"):
        length, batch = args.captured_length, args.captured_batch
        captured.check_texts(args.texts, args.text_length, length, batch, model=source.model)
    figures: list[Figure] = []
    more: JsonObject = {}
    if args.only in (None, "kernels"):
        figures += kernels.measure(device, args.shape, args.lengths, args.batches, config)
    curves: list[Curve] = []
    if args.only in (None, "recovered", "errors", "captured"):
        texts = captured_texts.capture(device, args.texts, args.text_length, args.captured, source)
        if args.only != "errors":
            rows, curve = captured.measure(texts, config, source.words, cluster_on(device))
            figures += rows
            curves.append(curve)
        if args.only in (None, "errors"):
            rows, more_curves = errors.measure(texts, config, source.words, cluster_on(device))
            figures += rows
            curves += more_curves
        if args.only in (None, "captured"):
            figures += baselines.measure(device, texts, config, length, batch, source.words)
        del texts
    if args.only in (None, "engine"):
        from sglang_ext.launch.bench import _double_p_engine as engine

        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the engines' now
        rows, more["engine"] = engine.measure(device, args, config)
        figures += rows
    save(args.out, figures, curves, commit=args.commit, **more)
    print(table(figures))
    print(f"written: {args.out}")
    return 0
