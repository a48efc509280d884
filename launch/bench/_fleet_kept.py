"""Which loads ``sglang-ext bench fleet`` is to measure, and what its file of results has of them already."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch.cuda import device_count

from sglang_ext.launch.bench._code import code_hash
from sglang_ext.launch.bench._fleet_load import PoolsAsked
from sglang_ext.launch.bench._fleet_rows import figures
from sglang_ext.launch.bench._record import AND, command_lines, save
from sglang_ext.launch.bench._router import POLICIES
from sglang_ext.types import JsonObject

SIZES = ("shape", "layers", "max_total_tokens", "pool_tokens", "block_size", "ratio", "answer", "flags")
SETTINGS = (*SIZES, "concurrency", "seconds", "warm_up")
"""What a load depends on, beside its pools, its servers and its policy."""


class FleetResults:
    """What was measured so far, and the file that keeps it.

    Args:
        args: of the command.

    Raises:
        ValueError: the file has results of other settings, or of other code.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.settings: JsonObject = {**{name: getattr(args, name) for name in SETTINGS}, "gpus": device_count()}
        self.alone: list[JsonObject] = []
        self.loads: list[JsonObject] = []
        self.commands: list[str] = []
        if args.out.exists() and not args.anew:
            self._read(json.loads(args.out.read_text()))

    def _read(self, record: JsonObject) -> None:
        mine = {**self.settings, "code": code_hash()}
        known = {**record.get("settings", {}), "code": record.get("code")}
        if other := [name for name, value in mine.items() if known.get(name) != value]:
            raise ValueError(
                f"{self.args.out} has results of other settings: {', '.join(f'{n}={known.get(n)}' for n in other)};"
                f" expected {', '.join(f'{n}={mine[n]}' for n in other)}: measure --anew, or name another --out"
            )
        self.alone, self.loads = list(record["alone"]), list(record["loads"])
        self.commands = record["command"].split(AND)

    def has_alone(self, asked: PoolsAsked) -> bool:
        """Whether one server alone was measured with these pools."""
        return any(_asked(each) == asked for each in self.alone)

    def has(self, asked: PoolsAsked, servers: int, policy: str) -> bool:
        """Whether a fleet was measured with these pools."""
        return any((_asked(each), each["servers"], each["policy"]) == (asked, servers, policy) for each in self.loads)

    def add_alone(self, asked: PoolsAsked, found: JsonObject) -> None:
        """Keep a load on one server alone."""
        self.alone.append({"pools": asked.pools, "popularity": asked.popularity, **found})
        self._save()

    def add(self, asked: PoolsAsked, servers: int, policy: str, found: JsonObject) -> None:
        """Keep a load on a fleet."""
        about = {"pools": asked.pools, "popularity": asked.popularity, "servers": servers, "policy": policy}
        self.loads.append({**about, **found})
        self._save()

    def compared(self) -> list[JsonObject]:
        """The loads on fleets, each with that on one server alone (`alone`, of `pools_alone` pools), in order."""
        alone = {_asked(each): each for each in self.alone}
        order = [*POLICIES].index
        ordered = sorted(
            self.loads, key=lambda each: (each["popularity"], each["pools"], each["servers"], order(each["policy"]))
        )
        shares = [share(_asked(each), each["servers"]) for each in ordered]
        return [
            {**each, "pools_alone": asked.pools, "alone": alone[asked]}
            for each, asked in zip(ordered, shares, strict=True)
        ]

    def _save(self) -> None:
        save(
            self.args.out,
            figures(self.compared(), self.settings["gpus"]),
            commit=self.args.commit,
            command=command_lines(self.commands),
            settings=self.settings,
            alone=self.alone,
            loads=self.loads,
        )


@dataclass(frozen=True)
class FleetWanted:
    """Loads that are to be measured.

    Attributes:
        alone: those on one server alone.
        loads: (servers, policy) -> those on a fleet.
    """

    alone: Sequence[PoolsAsked]
    loads: Mapping[tuple[int, str], Sequence[PoolsAsked]]

    @classmethod
    def of(cls, args: argparse.Namespace) -> FleetWanted:
        """All that a command asks for."""
        asked = [PoolsAsked(*each) for each in product(dict.fromkeys(args.pools), dict.fromkeys(args.popularity))]
        alone = dict.fromkeys(share(each, count) for count in args.servers for each in asked)
        policies = list(dict.fromkeys(args.policies))
        fleets = {(count, name): asked for count in args.servers for name in policies[: None if count > 1 else 1]}
        return cls(list(alone), fleets)

    def without(self, results: FleetResults) -> FleetWanted:
        """What of it is not measured yet."""
        left = {
            (count, name): [each for each in asked if not results.has(each, count, name)]
            for (count, name), asked in self.loads.items()
        }
        alone = [each for each in self.alone if not results.has_alone(each)]
        return FleetWanted(alone, {at: asked for at, asked in left.items() if asked})

    def __bool__(self) -> bool:
        return bool(self.alone or self.loads)

    @property
    def servers(self) -> int:
        """How many servers it takes."""
        return max([1, *(count for count, _ in self.loads)])

    @property
    def pools(self) -> int:
        """How many pools it takes."""
        return max(each.pools for asked in (self.alone, *self.loads.values()) for each in asked)


def share(asked: PoolsAsked, servers: int) -> PoolsAsked:
    """What a server of a fleet is asked about on average, for one server alone."""
    return PoolsAsked(math.ceil(asked.pools / servers), asked.popularity)


def _asked(load: JsonObject) -> PoolsAsked:
    return PoolsAsked(load["pools"], load["popularity"])
