"""A fourth system, as another package would add it: what leaves a stream's window is kept on the host, whole.

Each layer and key-value head fetches the `picked` blocks whose mean key it likes best, with what the layers before it
liked counted in (`carry`); all fetched tokens are seen `far` positions away. It stands for systems to come, and for no
paper: `test_fourth_system.py` installs this file and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_ext.attention.policy import Caches, Request
from sglang_ext.attention.stream_policy import StreamPolicy
from sglang_ext.config import policy_options
from sglang_ext.kernels.rope import rotate
from sglang_ext.systems.registry import System


@dataclass(frozen=True)
class AtticOptions:
    """Options of the system.

    Attributes:
        window: newest tokens that are always seen.
        block: tokens that leave together.
        picked: blocks that a head fetches.
        far: distance at which it sees them.
    """

    window: int = 12
    block: int = 4
    picked: int = 2
    far: int = 20

    @property
    def slots(self) -> int:
        return self.window + self.block

    def cut(self, column: int) -> int:
        """The first column that the one at `column` sees in the window."""
        return max(0, column + 1 - self.window) // self.block * self.block


@dataclass
class HostBlocks:
    """What one layer of a stream has on the host: keys [kv_heads, block, head_dim], not rotated, and values."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Attic:
    """One stream: what it has on the host, by layer, and how many tokens lie before its request's first column."""

    layers: dict[int, HostBlocks] = field(default_factory=dict)
    offset: int = 0

    @property
    def blocks(self) -> int:
        return sum(len(layer.keys) for layer in self.layers.values())


class AtticPolicy(StreamPolicy):
    """`--attention-backend attic`."""

    def __init__(self) -> None:
        self.config = policy_options(AtticOptions)
        self._running: dict[int, Attic] = {}
        self._idle: set[Attic] = set()  # between two turns

    # ---- requests ----

    def slots(self, options: Mapping[str, Any], tokens: int) -> int:
        return min(self.config.slots, tokens)

    def positions(self, request: Request, begin: int, end: int) -> list[int]:
        return [0] * (end - begin)  # a key is rotated where it is read

    def start(self, request: Request) -> None:
        self._running.setdefault(request.slot, Attic())

    def finish(self, request: Request) -> None:
        self._running.pop(request.slot, None)

    def park(self, slot: int) -> Attic:
        attic = self._running.pop(slot)
        self._idle.add(attic)
        return attic

    def resume(self, slot: int, state: Attic, tokens: int) -> None:
        self._idle.remove(state)
        state.offset = tokens
        self._running[slot] = state

    def drop(self, state: Attic) -> None:
        self._idle.remove(state)

    def stats(self) -> Mapping[str, int]:
        everywhere = [*self._running.values(), *self._idle]
        return {"streams": len(self._running), "host_blocks": sum(attic.blocks for attic in everywhere)}

    # ---- in every layer ----

    def attend(
        self,
        request: Request,
        caches: Caches,
        slots: torch.Tensor,
        begin: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        attic = self._running[request.slot]
        host = attic.layers.setdefault(caches.layer, HostBlocks())
        out = query.new_empty(*query.shape[:2], values.shape[-1])
        for row in range(query.shape[0]):
            column = attic.offset + begin + row
            self._move(host, caches, slots, column)
            cell = slots[column % self.config.slots].long()
            caches.keys[cell], caches.values[cell] = keys[row], values[row]
            grouped = query[row].view(keys.shape[1], -1, query.shape[-1])
            near = self._near(caches, slots, column)
            far = self._far(host, caches, grouped, (request.slot, column))
            out[row] = _softmax(grouped, [near, *far], caches.scale).flatten(0, 1)
        return out

    def _columns(self, slots: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        return slots[torch.arange(begin, end) % self.config.slots].long()

    def _move(self, host: HostBlocks, caches: Caches, slots: torch.Tensor, column: int) -> None:
        """Blocks that have left the window go to the host; the step past an answer's end may have moved one before."""
        size = self.config.block
        while len(host.keys) * size < self.config.cut(column):
            cells = self._columns(slots, len(host.keys) * size, (len(host.keys) + 1) * size)
            host.keys.append(caches.keys[cells].transpose(0, 1).cpu())
            host.values.append(caches.values[cells].transpose(0, 1).cpu())

    def _near(self, caches: Caches, slots: torch.Tensor, column: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of the window, [kv_heads, tokens, dim], each key rotated to its distance."""
        begin = self.config.cut(column)
        cells = self._columns(slots, begin, column + 1)
        distance = torch.arange(begin, column + 1) - column
        return rotate(caches.keys[cells].transpose(0, 1), distance, caches.rope), caches.values[cells].transpose(0, 1)

    def _far(
        self, host: HostBlocks, caches: Caches, query: torch.Tensor, at: tuple[int, int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The same of the blocks that each head fetches, if there are any."""
        if not host.keys:
            return []
        means = torch.stack([block.mean(1) for block in host.keys], 1)  # [kv_heads, blocks, head_dim]
        liked = torch.einsum("hgd,hbd->hb", query, means)
        votes = caches.carry.get(at, torch.zeros(liked.shape[1]))
        caches.carry[at] = votes + liked.mean(0)
        picked = (liked + votes).topk(min(self.config.picked, liked.shape[1])).indices.tolist()
        fetch = lambda blocks: torch.stack([torch.cat([blocks[b][h] for b in own]) for h, own in enumerate(picked)])  # noqa: E731
        keys, values = fetch(host.keys), fetch(host.values)
        return [(rotate(keys, torch.tensor(-self.config.far), caches.rope), values)]


def _softmax(query: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]], scale: float) -> torch.Tensor:
    keys, values = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    weights = torch.softmax(torch.einsum("hgd,htd->hgt", query, keys) * scale, -1)
    return torch.einsum("hgt,htd->hgd", weights, values)


SYSTEM = System(
    summary="What leaves a stream's window is kept on the host, and fetched by blocks.",
    policy="attic_system:AtticPolicy",
    options=AtticOptions,
    streams=True,
)
