"""``sglang-ext bench cascade``: the cascading KV cache beside dense attention and StreamingLLM.

One attention layer in Llama-3.1-8B's shape, bfloat16, on one NVIDIA GPU: a long prompt stride by stride, the cache
update alone, and decoding with a full window. Every row names its baseline, measured in the same run. Nothing is timed
whose output was not checked before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_ext.launch.bench._record import save, table
from sglang_ext.policies.cascade import Cascade

RESULTS = Path(__file__).resolve().parent / "results" / "cascade_kernels.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=2**20, help="tokens of the long prompt (default: 1048576)")
    parser.add_argument("--window", type=int, default=16384, help="tokens kept behind the sinks (default: 16384)")
    parser.add_argument("--cascades", type=int, default=4, help="sub-caches (default: 4)")
    parser.add_argument("--sinks", type=int, default=64, help="first tokens, always kept (default: 64)")
    parser.add_argument("--stride", type=int, default=4096, help="tokens computed together (default: 4096)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="rows that decode")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file (default: launch/bench/results/cascade_kernels.json)"
    )
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


def main(args: argparse.Namespace) -> int:
    from sglang_ext.launch.bench._cascade_kernels import measure
    from sglang_ext.launch.bench._gpu import require_gpu

    cascade = Cascade(args.window, args.cascades, args.sinks, args.stride)
    figures = measure(require_gpu(), cascade, args.tokens, args.batch)
    save(args.out, figures, commit=args.commit)
    print(table(figures))
    print(f"written: {args.out}")
    return 0
