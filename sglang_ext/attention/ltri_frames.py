"""Frames of chunks of Ltri-LLM: CUDA graphs have the same number of rows for every chunk.

A frame begins where a block begins, and has whole blocks. A chunk has some of its rows, and the others compute nothing
that is kept: what they would store goes to SGLang's padding slot, which nobody sees, and they add nothing to the
attention map. There are two kinds: for chunks that begin at a multiple of `chunk`, whole or not, and for the last
tokens of a prompt, which begin anywhere. Where all chunks see as much (`Ltri.alike_from`), one frame serves the last
tokens, which is shorter than a chunk and begins with their block, and three serve other chunks: of all rows, of a half
and of a quarter. The shorter ones are for the few tokens between a prompt's last whole chunk and its last tokens, such
as a question about a document. Before `alike_from`, each `chunk` tokens have frames of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang_ext.attention.ltri_layer import LayerTokens, SpansT
from sglang_ext.attention.ltri_plan import ALIGNMENT, PADDING_SLOT, ChunkPlan, Seat, Tiles, Tokens, integers
from sglang_ext.policies.ltri import renewed_blocks
from sglang_ext.policies.ltri_options import Ltri


@dataclass(frozen=True)
class Frame:
    """The rows that a graph computes.

    Attributes:
        rows: of the frame; whole blocks.
        own: number of tiles that cut the chunk's own tokens from its first one on; 0 where a chunk begins with the
            frame, so that the frame's blocks have the same tiles, and where tokens ask.
        most: most tokens of a chunk in the frame.
        begin: first token of the frame; None for a frame that serves any place from `Ltri.alike_from` on.
        anywhere: whether a chunk may begin anywhere in the frame's first block, or, where `begin` is set, anywhere in
            the frame; else it begins with the frame.
    """

    rows: int
    own: int
    most: int
    begin: int | None = None
    anywhere: bool = False

    @classmethod
    def whole(cls, settings: Ltri) -> Frame:
        """That of chunks that begin at a multiple of `chunk`."""
        return cls(settings.chunk, 0, settings.chunk)

    @classmethod
    def short(cls, settings: Ltri) -> list[Frame]:
        """Frames of a quarter and half of `chunk` rows, where these are whole blocks; chunks begin as in `whole`."""
        rows = [settings.chunk // part for part in (4, 2) if settings.chunk % (part * settings.block) == 0]
        return [cls(count, 0, count) for count in rows]

    @classmethod
    def first(cls, settings: Ltri) -> list[Frame]:
        """The frames, of both kinds, of each `chunk` tokens from a stream's beginning up to `Ltri.alike_from`."""
        begins = range(0, settings.alike_from or 0, settings.chunk)
        found = [replace(cls.whole(settings), begin=begin) for begin in begins]
        for begin in begins:
            start = max(begin, settings.sinks)  # where sinks are no part of the window
            rows = begin + settings.chunk - start
            if rows >= settings.last:
                found.append(cls._ending(settings, rows, start))
        return found

    @classmethod
    def last(cls, settings: Ltri) -> Frame | None:
        """That of a prompt's last tokens; None where a frame around them has another window, or is too long."""
        block, last = settings.block, settings.last
        rows = -(-(block - 1 + last) // block) * block
        return None if settings.window % block or rows > settings.chunk else cls._ending(settings, rows)

    @classmethod
    def _ending(cls, settings: Ltri, rows: int, begin: int | None = None) -> Frame:
        """One of so many rows for the last tokens of a prompt."""
        own = 0 if settings.tokens_ask else -(-settings.last // settings.block)
        return cls(rows, own, settings.last, begin, anywhere=True)

    def start(self, settings: Ltri, begin: int) -> int:
        """First token of the frame around a chunk that begins at `begin`."""
        return begin - (begin - settings.sinks) % settings.block if self.begin is None else self.begin

    @property
    def tokens_ask(self) -> bool:
        """Whether a chunk's last tokens ask (`LayerTokens.tokens_ask`)."""
        return self.anywhere and self.own == 0

    def fits(self, chunk: LayerTokens[SpansT]) -> bool:
        """Whether the frame serves a chunk."""
        settings, begin, end = chunk.settings, chunk.begin, chunk.end
        if end - begin > self.most or (not self.anywhere and begin % settings.chunk):
            return False
        if chunk.tokens_ask != self.tokens_ask and settings.evicted(begin):
            return False  # tokens ask in the one and spans in the other, which only counts where blocks have left
        if self.begin is not None:
            inside = self.begin <= begin and end <= self.begin + self.rows
            return inside and settings.local(begin) == settings.local(self.begin)
        return settings.alike_from is not None and begin >= settings.alike_from

    def gone(self, settings: Ltri) -> int:
        """Blocks that leave the window with a chunk, at most."""
        most = settings.chunk // settings.block
        return most if self.begin is None else min(most, settings.evicted(self.begin))


def run_frames(settings: Ltri, places: int) -> list[list[Frame]]:
    """The frames of all runs: of 1, 2, 4 and more whole chunks up to `places`; of a prompt's end; of its first chunks.

    Args:
        settings: of the method.
        places: whole chunks of a run, at most.
    """
    whole, last = Frame.whole(settings), Frame.last(settings)
    counts = [1 << power for power in range(places.bit_length()) if 1 << power < places] + [places]
    ends = [] if last is None else [[last], *([frame, last] for frame in (whole, *Frame.short(settings)))]
    return [[whole] * count for count in counts] + ends + [[frame] for frame in Frame.first(settings)]


@dataclass(frozen=True)
class Nowhere:
    """Where things go that nobody looks at.

    Attributes:
        block: a number on the host that is no block's.
        span: a place for spans that is no block's (`SpanRing`).
    """

    block: int
    span: int


@dataclass(frozen=True)
class FramePlan:
    """A chunk of a stream in its frame, in every layer.

    Attributes:
        plan: of the frame's tokens. It has room for all blocks that may leave the window (`Frame.gone`); where fewer
            leave, the rest of the numbers on the host are `Nowhere.block`.
        lead: rows before the chunk.
        count: rows before the chunk's end.
        gone: the blocks that leave the window.
        outside: [rows] bool, rows that are not the chunk's.
        anywhere: see `Frame`.
        asking: [n] int64, the frame's rows of the tokens that may ask (`Ltri.most_askers`), or, where spans ask, of the
            tokens in the chunk's own tiles (`Frame.own`); empty where there are no own tiles.
        asks: [n] int32, 1 where a row of `asking` has a token of the chunk, else 0.
        oldest, newest: [1] int64, places among the frame's blocks of those with the chunk's first and last token.
        before: [block] bool, which tokens of the `oldest` block come before the chunk.
    """

    plan: ChunkPlan
    lead: int
    count: int
    gone: range
    outside: torch.Tensor
    anywhere: bool
    asking: torch.Tensor
    asks: torch.Tensor
    oldest: torch.Tensor
    newest: torch.Tensor
    before: torch.Tensor

    @classmethod
    def on_host(cls, frame: Frame, chunk: LayerTokens[SpansT], seat: Seat, nowhere: Nowhere, before: int) -> FramePlan:
        """The plan of a chunk that the frame fits, on the CPU (`ChunkPlan.on_host`).

        Args:
            frame: around it.
            chunk: in the first layer.
            seat: of its stream.
            nowhere: for blocks that do not leave, or had their spans before.
            before: blocks that have left the window before the chunk.
        """
        settings = chunk.settings
        start = frame.start(settings, chunk.begin)
        lead, count = chunk.begin - start, chunk.end - start
        plan = ChunkPlan.on_host(replace(chunk, begin=start, end=start + frame.rows), seat, before)
        steps = np.arange(frame.own * settings.block)
        if frame.tokens_ask:
            steps = np.arange(settings.most_askers) + (count - lead - settings.most_askers)
        rows = np.arange(frame.rows)
        outside = (rows < lead) | (rows >= count)
        own, blocks = plan.rows, plan.tiles.blocks
        # Sinks are in no block.
        oldest, newest = (max(0, settings.blocks(end) - 1 - blocks.start) for end in (chunk.begin + 1, chunk.end))
        plan.tile_spans.numpy()[:oldest] = nowhere.span  # these blocks were complete before
        there = plan.window.slots.shape[0] - (frame.rows - count)  # columns that have a token
        plan.window.slots.numpy()[there:] = PADDING_SLOT
        plan.listed.numpy()[:, there:] = PADDING_SLOT
        own.cells.numpy()[outside] = own.cells[lead]
        own.slots.numpy()[outside] = PADDING_SLOT
        plan.count.fill_(count)
        renewed = np.array(renewed_blocks(chunk.begin, settings), np.int32) if settings.renewed else None
        parts: Mapping[str, object] = {
            **_gone(plan, settings, frame.gone(settings), nowhere.block),
            "tiles": _tiles(plan, frame, chunk, count),
            "renewed": None if renewed is None else torch.from_numpy(renewed),
        }
        first = chunk.begin - settings.first(blocks.start + oldest)
        return cls(
            plan=ChunkPlan(**{**vars(plan), **parts}),
            lead=lead,
            count=count,
            gone=plan.gone,
            outside=torch.from_numpy(outside),
            anywhere=frame.anywhere,
            asks=torch.from_numpy(((steps >= 0) & (steps < count - lead)).astype(np.int32)),
            asking=torch.from_numpy((steps + lead).clip(0, frame.rows - 1)),
            oldest=torch.from_numpy(np.full(1, oldest)),
            newest=torch.from_numpy(np.full(1, newest)),
            before=torch.from_numpy(np.arange(settings.block) < first),
        )

    # ---- tensors that stand ----

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of a plan by name, but for `ids`. The `slots` of its `Tokens` come last, one after the other."""
        plan = self.plan
        tokens = {name: getattr(plan, name) for name in _TOKENS if getattr(plan, name) is not None}
        found = {name: getattr(plan, name) for name in _LOADED}
        found |= {f"{name}.cells": each.cells for name, each in tokens.items()}
        found |= {f"tiles.{name}": getattr(plan.tiles, name) for name in _TILES}
        if plan.renewed is not None:
            found["renewed"] = plan.renewed
        found |= {f"own.{name}": getattr(self, name) for name in _OWN}
        return found | {f"{name}.slots": each.slots for name, each in tokens.items()}

    def packed(self, pin: bool = False) -> torch.Tensor:
        """[bytes] uint8, `tensors` of a plan on the CPU one behind the other, so that one copy has them all elsewhere.

        Args:
            pin: have them in pinned memory.
        """
        parts = [each.numpy().reshape(-1).view(np.uint8) for each in self.tensors().values()]
        size = sum(len(part) + -len(part) % ALIGNMENT for part in parts)
        packed = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
        into, at = packed.numpy(), 0
        for part in parts:
            into[at : at + len(part)] = part
            at += len(part) + -len(part) % ALIGNMENT
        return packed

    def unpacked(self, packed: torch.Tensor, ids: torch.Tensor) -> tuple[FramePlan, torch.Tensor]:
        """A plan like this one in other memory.

        Args:
            packed: `packed` of a plan, anywhere.
            ids: [n] int32, its blocks' numbers on the host.

        Returns:
            (the plan, [n] int64: all of its tokens' KV slots, which share its memory).
        """
        at, found, slots = 0, dict[str, torch.Tensor](), 0
        for name, each in self.tensors().items():
            size = each.numel() * each.element_size()
            if name.endswith(".slots"):
                slots = slots or at
            found[name] = packed[at : at + size].view(each.dtype).view(each.shape)
            at += size + -size % ALIGNMENT
        plan = self.plan
        parts: dict[str, object] = {name: found[name] for name in _LOADED}
        for name in _TOKENS:
            tokens = getattr(plan, name)
            if tokens is not None:
                parts[name] = replace(tokens, cells=found[f"{name}.cells"], slots=found[f"{name}.slots"])
        parts["tiles"] = Tiles(**{**vars(plan.tiles), **{name: found[f"tiles.{name}"] for name in _TILES}})
        parts["renewed"] = found.get("renewed")
        own = {name: found[f"own.{name}"] for name in _OWN}
        standing = FramePlan(**{**vars(self), **own, "plan": ChunkPlan(**{**vars(plan), **parts, "ids": ids})})
        return standing, packed[slots:].view(torch.int64)


_LOADED = ("listed", "gone_ids", "gone_spans", "at", "first_way", "tile_spans", "before", "blocks", "count")
_TOKENS = ("rows", "window", "sinks", "gone_tokens")
_TILES = ("firsts", "places", "lengths")
_OWN = ("outside", "asking", "asks", "oldest", "newest", "before")
"""Names of: a `ChunkPlan`'s tensors, its `Tokens`, the tensors of its `Tiles`, and a `FramePlan`'s own tensors."""


class StandingPlan:
    """A plan in tensors that keep their addresses, into which other plans of the same frame are loaded.

    Args:
        plan: a plan of the frame, from `FramePlan.on_host`.
        most: length of a stream's `Seat.ids`.
        device: of the tensors.

    Attributes:
        plan: the plan in these tensors; their values are those of the plan that was loaded last.
    """

    def __init__(self, plan: FramePlan, most: int, device: torch.device) -> None:
        packed = plan.packed().to(device)
        ids = torch.full((most,), -1, dtype=torch.int32, device=device)
        self._loaded, self._standing = packed, packed.clone()
        self._in_cells, self._cells = plan.unpacked(self._loaded, ids)
        self.plan, self._slots = plan.unpacked(self._standing, ids)

    def load(self, packed: torch.Tensor, seat: Seat, stored: int) -> None:
        """Have another plan in these tensors.

        Args:
            packed: `FramePlan.packed` of it, `FramePlan.on_host`.
            seat: of its stream, on the device.
            stored: its blocks on the host.
        """
        self._loaded.copy_(packed, non_blocking=True)
        self._standing.copy_(self._loaded)
        torch.index_select(seat.wide_slots, 0, self._cells, out=self._slots)
        cells, slots = (each.plan.listed.view(-1) for each in (self._in_cells, self.plan))
        torch.index_select(seat.slots, 0, cells, out=slots)
        self.plan.plan.ids[:stored].copy_(seat.ids[:stored])


def _gone(plan: ChunkPlan, settings: Ltri, most: int, nowhere: int) -> Mapping[str, object]:
    """Those parts of a plan that say what leaves the window, filled up to so many blocks."""
    if most == 0:
        return {"gone": range(plan.stored, plan.stored), "gone_tokens": None}
    block, tokens = settings.block, plan.gone_tokens
    cells, slots = (plan.rows.cells[:0], plan.rows.slots[:0]) if tokens is None else (tokens.cells, tokens.slots)
    return {
        "gone": range(plan.stored - most, plan.stored),
        "gone_tokens": Tokens(
            settings.first(plan.gone.start),
            _filled(cells, most * block, 0),
            _filled(slots, most * block, PADDING_SLOT),
        ),
        "gone_ids": _filled(plan.gone_ids, most, nowhere),
        "gone_spans": _filled(plan.gone_spans, most, 0),
    }


def _filled(known: torch.Tensor, count: int, value: int) -> torch.Tensor:
    """[count] on the CPU: what is known, and a value behind it."""
    found = np.full(count, value, known.numpy().dtype)
    found[: len(known)] = known.numpy()
    return torch.from_numpy(found)


def _tiles(plan: ChunkPlan, frame: Frame, chunk: LayerTokens[SpansT], count: int) -> Tiles:
    """The tiles of a frame's blocks, and behind them the chunk's own; `lengths` are those of all of them."""
    block, blocks, own = chunk.settings.block, plan.tiles.blocks, frame.own
    numbers = integers(len(blocks) + own)
    steps = numbers * block
    before = chunk.settings.first(blocks.start) - plan.rows.first  # rows before the first block
    lengths = [count - before - steps[: len(blocks)], chunk.end - chunk.begin - steps[:own]]
    firsts = [plan.tiles.firsts[0, : len(blocks)].numpy(), steps[:own] + (chunk.begin - plan.window.first)]
    return Tiles(
        blocks,
        own,
        torch.from_numpy(np.concatenate(firsts)[None]),
        torch.from_numpy(numbers[None]),
        torch.from_numpy(np.concatenate(lengths).clip(0, block)),
    )
