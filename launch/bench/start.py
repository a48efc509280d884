"""``sglang-ext bench start``: how long a server takes to start, ours beside stock SGLang's, with cold and warm caches.

A start ends when `/health` answers, which is after SGLang's own warm-up request. The first start of each server finds
no compiled code: all caches of compilers that it uses are in a folder of its own, which is new. The further starts find
what the first one left there. Servers take turns, and have SGLang's default flags but for the attention backend and for
weights, which are random. The files of the model and of Python are in the machine's page cache from the second start
on; one start that is not counted comes before all others.

Rows have the time of a start. The results file also has, for each start, how long the parts took whose time SGLang's
log names.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_ext.launch.bench._record import SHAPE, Figure, Timing, json_file, save, stock_backends, table
from sglang_ext.launch.bench._shapes import SHAPES, write_model
from sglang_ext.launch.bench._turns import STOCK, say
from sglang_ext.launch.demo_server import free_port, running
from sglang_ext.types import JsonObject

RESULTS = Path(__file__).resolve().parent / "results"
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "XDG_CACHE_HOME": "",
}
"""Variables that say where compilers keep what they made -> the folder, within that of a server."""
WARM_AIM = 1.15
"""Times a warm start of stock SGLang that ours may take."""
COLD_AIM = 45.0
"""Seconds more than a cold start of stock SGLang that ours may take."""
ELAPSED = re.compile(
    r"^(?P<what>[A-Z][^.]*?)(?: ends?| done)?\. .*?elapsed[=:] ?(?P<seconds>\d+\.\d+) ?s", re.IGNORECASE
)
"""A line of SGLang's log that says how long a part took."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--systems",
        nargs="+",
        default=["dbsa", "double_p"],
        metavar="NAME",
        help="--attention-backend of our servers (default: dbsa double_p)",
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default=SHAPE, help=f"of the model (default: {SHAPE})")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="of it (default: the shape's)")
    parser.add_argument("--context", type=int, default=131_072, metavar="TOKENS", help="of the model (default: 131072)")
    parser.add_argument("--warm", type=int, default=2, metavar="N", help="starts with warm caches (default: 2)")
    parser.add_argument("--flags", default="", help="more flags of all servers, in one argument")
    stock_backends(parser)
    parser.add_argument(
        "--out", type=json_file, default=RESULTS / "start.json", help="(default: launch/bench/results/start.json)"
    )
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


@dataclass
class Starts:
    """How long the starts of one server took.

    Attributes:
        name: of it.
        cold: seconds with no compiled code.
        warm: seconds of the further starts.
        parts: of the first and of each further start: what the log says took how many seconds.
    """

    name: str
    cold: float = 0.0
    warm: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    def add(self, seconds: float, parts: dict[str, float]) -> None:
        """Another start."""
        if self.parts:
            self.warm.append(seconds)
        else:
            self.cold = seconds
        self.parts.append(parts)


def command(role: str, backend: str, model: Path, port: int, flags: str) -> list[str]:
    """The command line that starts a server of one role, `ours` or `stock`."""
    words = ["-m", "sglang_ext.launch.cli", "serve", str(model)]
    if role == "stock":
        words = ["-m", "sglang.launch_server", "--model-path", str(model)]
    words += ["--attention-backend", backend, "--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, *words, *shlex.split(flags)]


def environment(role: str, caches: Path) -> dict[str, str]:
    """The variables of a server whose compilers keep what they make in a folder."""
    kept = {name: str(caches / folder) for name, folder in CACHES.items()}
    return {**(STOCK if role == "stock" else {}), **kept}


def parts(log: str) -> dict[str, float]:
    """What a server's log says took how long: seconds by the first words of the line; the sum where these repeat."""
    found = dict[str, float]()
    for line in log.splitlines():
        if match := ELAPSED.search(line.split("] ", 1)[-1]):
            found[match["what"].strip()] = found.get(match["what"].strip(), 0.0) + float(match["seconds"])
    return found


def start(words: Sequence[str], port: int, variables: Mapping[str, str]) -> tuple[float, dict[str, float]]:
    """(Seconds until the server answers, `parts` of its log)."""
    begin = time.perf_counter()
    with running(words, port, variables) as server:
        return time.perf_counter() - begin, parts(Path(server.log).read_text(errors="replace"))


def figures(ours: Sequence[Starts], stock: Sequence[Starts]) -> list[Figure]:
    """Two rows of each of our servers, beside the server of stock SGLang that starts fastest."""
    rows = list[Figure]()
    for each in ours:
        best = min(stock, key=lambda other: other.cold)
        more = each.cold - best.cold
        aim = f"at most {COLD_AIM:.0f} s more"
        rows.append(_row(f"{each.name}, cold caches", [each.cold], best, [best.cold], aim, more <= COLD_AIM))
        if not each.warm:
            continue
        best = min(stock, key=lambda other: Timing.of(other.warm).median)
        ratio = Timing.of(each.warm).median / Timing.of(best.warm).median
        aim = f"at most {WARM_AIM:.3g}x"
        rows.append(_row(f"{each.name}, warm caches", each.warm, best, best.warm, aim, ratio <= WARM_AIM))
    return rows


def _row(name: str, ours: Sequence[float], best: Starts, theirs: Sequence[float], aim: str, met: bool) -> Figure:
    own, other = Timing.of(ours), Timing.of(theirs)
    ratio = own.median / other.median
    return Figure(f"start of a server, {name}", own, best.name, other, ratio, aim, met)


def main(args: argparse.Namespace) -> int:
    """Start all servers in turns, print the table, and write it.

    Raises:
        ValueError: no warm start is wanted.
        ServerError: a server does not start.
    """
    if args.warm < 1:
        raise ValueError(f"--warm {args.warm}: expected at least 1")
    roles = [("ours", each) for each in args.systems] + [("stock", each) for each in args.stock_backend]
    names = {(role, each): each if role == "ours" else f"stock SGLang on {each}" for role, each in roles}
    found = {key: Starts(name) for key, name in names.items()}
    with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as temporary:
        folder = Path(temporary)
        write_model(folder / "model", args.shape, args.context, args.layers)

        def begun(role: str, backend: str, caches: Path) -> tuple[float, dict[str, float]]:
            port = free_port()
            words = command(role, backend, folder / "model", port, args.flags)
            return start(words, port, environment(role, caches))

        begun(*roles[-1], folder / "uncounted")
        for at in range(args.warm + 1):
            for number, (role, backend) in enumerate(roles):
                seconds, of_log = begun(role, backend, folder / f"caches-{number}")
                longest = sorted(of_log.items(), key=lambda pair: -pair[1])[:3]
                spent = "".join(f"; {what}: {part:.1f} s" for what, part in longest)
                say(f"{names[role, backend]}, {'warm' if at else 'cold'} caches: {seconds:.1f} s{spent}")
                found[role, backend].add(seconds, of_log)
            keep(found, args)  # a run that is cut short keeps what it has
    print(f"written: {args.out}")
    return 0


def keep(found: Mapping[tuple[str, str], Starts], args: argparse.Namespace) -> None:
    """Print the table of what was started so far, and write it.

    Args:
        found: (role, attention backend) -> its starts, as many of each.
    """
    rows = figures(*([each for (role, _), each in found.items() if role == of] for of in ("ours", "stock")))
    print(table(rows), flush=True)
    kept: JsonObject = {
        each.name: {"cold": each.cold, "warm": each.warm, "parts": each.parts} for each in found.values()
    }
    save(args.out, rows, commit=args.commit, starts=kept)
