"""How many pools and requests a fleet of servers carries, on paper: `sglang-ext pool plan --fleet`.

The rates are those of results files (`sglang-ext bench dbsa --out FILE`), read by the names of their rows. The rest is
arithmetic that this module says: requests go to the one server that is their pool's home, pools are spread evenly, and
every pool is asked as often as any other, which is the worst case for memory that holds only some of them.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from sglang_ext.launch.bench._record import Figure
from sglang_ext.launch.bench._results_files import figure_of, read_text
from sglang_ext.launch.bench._shapes import SHAPES
from sglang_ext.serving.plan import ROOM_FOR_REQUESTS
from sglang_ext.types import JsonObject, Options

RESULTS = Path(__file__).resolve().parent / "bench" / "results"
ENGINE, COPIES = RESULTS / "dbsa_engine.json", RESULTS / "ltri_kernels.json"
ENCODING, ANSWERING, COPYING = "encoding a pool of", "answering with 4 tokens", "fetch of 16 blocks of 512 KiB"
"""How the rows begin that the rates are read from."""
SHAPE = "llama-3.1-8b"  # of rows that name none
WEIGHT_BYTES = 2  # of a number: half precision
GIB = 1 << 30
GPUS, POOLS = (1, 8, 64), (10, 1_000, 100_000)
"""What a plan without numbers of its own is made for."""


@dataclass(frozen=True)
class Rates:
    """What one server was measured to do.

    Attributes:
        gpu: the GPU's name.
        gpus: that the server has.
        source: of the rates of encoding and answering: file and commit.
        memory: of all its GPUs, in bytes.
        weights: in bytes, of a model of the shape that was measured.
        token_bytes: keys and values of a token, on all its GPUs together.
        encoded: tokens of pools that it encodes a second.
        answered: requests over a pool that it answers a second; the best of the rows.
        at_a_time: requests that were under way then.
        copied: bytes of keys and values that come back from host memory a second.
        copied_source: of that: GPU, file and commit.
    """

    gpu: str
    gpus: int
    source: str
    memory: float
    weights: float
    token_bytes: float
    encoded: float
    answered: float
    at_a_time: int
    copied: float
    copied_source: str


@dataclass(frozen=True)
class FleetSize:
    """What is planned for.

    Attributes:
        gpus: GPUs of all servers together.
        pools: pools of the whole fleet.
        pool_tokens: tokens of each pool.
        host_gb: host memory of each server for evicted blocks, in GiB (`host_gb` of the policy).
        memory_fraction: share of the GPU's memory that weights, keys and values take (SGLang's --mem-fraction-static).
        in_a_row: requests over one pool before its server is asked for another one.

    Raises:
        ValueError: a value is out of range; says which.
    """

    gpus: int
    pools: int
    pool_tokens: int = 90_000
    host_gb: float = 128.0
    memory_fraction: float = 0.85
    in_a_row: int = 100

    def __post_init__(self) -> None:
        for name in ("gpus", "pools", "pool_tokens", "in_a_row"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a whole number of at least 1")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction={self.memory_fraction}: expected a number above 0, of at most 1")
        if not 0 <= self.host_gb < math.inf:
            raise ValueError(f"host_gb={self.host_gb}: expected GiB of at least 0")


@dataclass(frozen=True)
class Capacity:
    """What a fleet carries.

    Attributes:
        gpus, pools: as planned for.
        tokens: of all pools.
        kv_bytes: their keys and values.
        homes: servers that are the home of a pool.
        per_server: pools of the server that has most.
        on_gpu: pools of that server that its KV cache holds at once.
        on_host: further pools whose blocks lie in its host memory.
        again: further pools, which are encoded again when a request needs them.
        host_bytes: host memory that evicted blocks take, of all servers.
        first_seconds: until every pool was encoded once.
        scattered, bound: requests that the fleet answers a second where each one is over another pool than the one
            before it, and what bounds that.
        grouped, grouped_bound: the same with `FleetSize.in_a_row` requests over a pool, one behind the other.
    """

    gpus: int
    pools: int
    tokens: int
    kv_bytes: float
    homes: int
    per_server: int
    on_gpu: int
    on_host: int
    again: int
    host_bytes: float
    first_seconds: float
    scattered: float
    bound: str
    grouped: float
    grouped_bound: str


# ---- rates ----


def measured(engine: Path = ENGINE, copies: Path = COPIES) -> Rates:
    """The rates of a results file of `sglang-ext bench dbsa`, and that of copies from host memory of another one.

    Raises:
        ValueError: a file is no results file of a GPU, or lacks a row; says which.
    """
    record, rows = _read(engine)
    machine, memory = record["machine"], record["engine"]["memory"]["ours"]
    (encoding,) = _rows(rows, ENCODING, engine)[:1]
    answering = [row for row in _rows(rows, ANSWERING, engine) if row.name.startswith(ANSWERING + ", ")]
    best = min(answering, key=lambda row: row.timing.median)
    other, copy_rows = _read(copies)
    (copying,) = _rows(copy_rows, COPYING, copies)[:1]
    notes = encoding.notes
    return Rates(
        gpu=machine["gpu"],
        gpus=machine["gpus"],
        source=f"{engine.name}, commit {record['commit'][:7]}",
        memory=machine["gpus"] * machine["gpu_memory_gib"] * GIB,
        weights=weight_bytes(notes.get("shape", SHAPE), notes.get("layers", 0)),
        token_bytes=memory["kv_bytes"] / memory["tokens"],
        encoded=notes["pool_tokens"] / encoding.timing.median,
        answered=1 / best.timing.median,
        at_a_time=best.notes["concurrency"],
        copied=copying.notes["bytes"] / copying.timing.median,
        copied_source=f"{other['machine']['gpu']}, {copies.name}, commit {other['commit'][:7]}",
    )


def _read(path: Path) -> tuple[JsonObject, list[Figure]]:
    try:
        record = json.loads(read_text(path))
        rows = [figure_of(row, f"row {number}") for number, row in enumerate(record["figures"], 1)]
        if not record["machine"].get("gpu"):
            raise ValueError("no GPU made it")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected a results file of a GPU, as sglang-ext bench writes it ({error})"
        ) from error
    return record, rows


def _rows(rows: Sequence[Figure], begin: str, path: Path) -> list[Figure]:
    found = [row for row in rows if row.name.startswith(begin)]
    if not found:
        raise ValueError(
            f"{path}: it has no row that begins with {begin!r}; measure it: sglang-ext bench dbsa --out FILE"
        )
    return found


def weight_bytes(shape: str, layers: int = 0) -> float:
    """Bytes of the weights of a model of one of `bench._shapes.SHAPES`, with as many `layers` (0: its own number)."""
    found = SHAPES[shape]
    hidden, heads, kv_heads, width = (
        found[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    attention = hidden * width * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * found["intermediate_size"] + 2 * hidden
    total = 2 * found["vocab_size"] * hidden + (layers or found["num_hidden_layers"]) * layer + hidden
    return float(WEIGHT_BYTES * total)


# ---- the plan ----


def carried(rates: Rates, fleet: FleetSize) -> Capacity:
    """What a fleet carries at these rates.

    Raises:
        ValueError: no server fits, or none of the pools fits into one.
    """
    servers = fleet.gpus // rates.gpus
    if servers < 1:
        raise ValueError(f"gpus={fleet.gpus}: a server has {rates.gpus} GPUs in {rates.source}")
    room = (fleet.memory_fraction * rates.memory - rates.weights) / rates.token_bytes
    fit = int((room - rates.at_a_time * ROOM_FOR_REQUESTS) // fleet.pool_tokens)
    if fit < 1:
        raise ValueError(
            f"pool_tokens={fleet.pool_tokens}: the KV cache of a server has room for {max(0, int(room)):,} tokens"
        )
    homes = min(servers, fleet.pools)
    per_server = -(-fleet.pools // servers)
    pool_bytes = fleet.pool_tokens * rates.token_bytes
    on_gpu = min(per_server, fit)
    on_host = min(per_server - on_gpu, int(fleet.host_gb * GIB // pool_bytes))
    again = per_server - on_gpu - on_host
    encoding, copying = fleet.pool_tokens / rates.encoded, pool_bytes / rates.copied

    def answered(in_a_row: int) -> tuple[float, str]:
        """(requests a second, what bounds them)."""
        seconds = {
            "answering": 1 / rates.answered,
            "copies from the host": on_host / per_server * copying / in_a_row,
            "encoding again": again / per_server * encoding / in_a_row,
        }
        bound = max(seconds, key=lambda name: seconds[name])
        if bound == "answering" and homes < servers:
            bound = f"pools: {servers - homes} servers have none"
        return homes / sum(seconds.values()), bound

    scattered, bound = answered(1)
    grouped, grouped_bound = answered(fleet.in_a_row)
    return Capacity(
        gpus=fleet.gpus,
        pools=fleet.pools,
        tokens=fleet.pools * fleet.pool_tokens,
        kv_bytes=fleet.pools * pool_bytes,
        homes=homes,
        per_server=per_server,
        on_gpu=on_gpu,
        on_host=on_host,
        again=again,
        host_bytes=homes * on_host * pool_bytes,
        first_seconds=per_server * encoding,
        scattered=scattered,
        bound=bound,
        grouped=grouped,
        grouped_bound=grouped_bound,
    )


# ---- for people ----


def header(fleet: FleetSize) -> tuple[str, ...]:
    """Titles of the columns of `row`."""
    in_a_row = f"requests/s, {fleet.in_a_row} in a row"
    return (
        "GPUs",
        "pools",
        "tokens",
        "keys and values",
        "pools of a server",
        "in its KV cache",
        "on its host",
        "encoded again",
        "host memory",
        "all encoded once in",
        "requests/s, scattered",
        "bound by",
        in_a_row,
        "bound by",
    )


def row(found: Capacity) -> list[str]:
    """One fleet, in words."""
    return [
        f"{found.gpus:,}",
        f"{found.pools:,}",
        _short(found.tokens),
        _tib(found.kv_bytes),
        f"{found.per_server:,}",
        f"{found.on_gpu:,}",
        f"{found.on_host:,}",
        f"{found.again:,}",
        _tib(found.host_bytes),
        _time(found.first_seconds),
        _rate(found.scattered),
        found.bound,
        _rate(found.grouped),
        found.grouped_bound,
    ]


def sources(rates: Rates, fleet: FleetSize) -> list[str]:
    """What a plan was made from, a sentence each."""
    return [
        f"One server is {rates.gpus} x {rates.gpu}. It encodes {rates.encoded:,.0f} tokens of pools a second, and"
        f" answers {rates.answered:,.0f} requests over a pool a second, {rates.at_a_time} at a time"
        f" ({rates.source}).",
        f"What comes back from host memory comes at {rates.copied / 1e9:,.1f} GB/s: the rate at which blocks of"
        f" Ltri-LLM do ({rates.copied_source}), for that of pools was not measured on a GPU.",
        f"Reckoned, not measured: weights, keys and values take {fleet.memory_fraction:.0%} of the GPU's memory, which"
        f" leaves {(fleet.memory_fraction * rates.memory - rates.weights) / rates.token_bytes:,.0f} tokens of"
        f" {rates.token_bytes / 1024:,.0f} KiB for pools and requests; each server has {fleet.host_gb:g} GiB of host"
        " memory for blocks; pools are spread and asked evenly; a pool comes back, or is encoded again, whole.",
    ]


def markdown(rates: Rates, fleets: Sequence[FleetSize]) -> str:
    """The sources and a table, for a document."""
    lines = [header(fleets[0]), ["---:"] * len(header(fleets[0])), *(row(carried(rates, each)) for each in fleets)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    wrapped = (textwrap.fill(f"- {each}", 120, subsequent_indent="  ") for each in sources(rates, fleets[0]))
    return "\n".join(wrapped) + "\n\n" + table


def fleets(
    gpus: Sequence[int] = GPUS, pools: Sequence[int] = POOLS, options: Options = MappingProxyType({})
) -> list[FleetSize]:
    """Every number of GPUs with every number of pools; `options` are the other fields of `FleetSize`."""
    return [FleetSize(each, count, **options) for each in gpus for count in pools]


def _short(count: float) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            few = count < 999.5 * size  # three digits: 1,000 of them would be 1e+03
            return f"{count / size:.3g} {unit}" if few else f"{count / size:,.0f} {unit}"
    return f"{count:,.0f}"


def _tib(count: float) -> str:
    return f"{count / GIB:,.0f} GiB" if count < 1024 * GIB else f"{count / GIB / 1024:,.1f} TiB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"


def _rate(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:,.2g}"
