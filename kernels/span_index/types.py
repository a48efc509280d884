"""By what rule spans are cut, what was found, and the buffers that the kernels need."""

from __future__ import annotations

from dataclasses import dataclass

import torch

RATIOS = ("row", "col", "rowcol")
BLOCKS = (16, 32, 64, 128)
"""Tokens of a tile."""


@dataclass(frozen=True, slots=True)
class SpanRule:
    """How a tile is cut into spans, and how many index vectors each of them gets (Ltri-LLM, sections 3.2 and 3.3).

    Attributes:
        theta: share of a head's entries on and below the diagonal that lie below its threshold (equation 5), between 0
            and 1.
        phi: largest intersection over union of two spans that are both kept (Appendix E), at least 0 and below 1.
        spans: most spans of a tile (C), at least 1.
        most: most index vectors of a span (M // C), at least 1.
        rate: λ of equation 7, at least 0; with a larger one a span gets fewer index vectors.
        ratio: neighbours of a span that its mass is compared with (section 3.3.2, figure 5): what its rows attend to
            before it (`row`), the rows behind it that attend to it (`col`), or both (`rowcol`).
        boxes: compare spans as the squares that they are in the attention map, and not as intervals of tokens.
    """

    theta: float = 0.9
    phi: float = 0.1
    spans: int = 4
    most: int = 3
    rate: float = 3.0
    ratio: str = "row"
    boxes: bool = False


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of some tiles, each tile's in the order of their first tokens.

    Attributes:
        bounds: [batch, spans, 2] int32, first and end token of each span, numbers in its tile; stale where the span's
            count is 0.
        counts: [batch, spans] int32, index vectors of each span; 0 for a span that is not there, and those come last.
    """

    bounds: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def empty(batch: int, spans: int, device: torch.device | str) -> Spans:
        """Uninitialised buffers.

        Args:
            batch: tiles.
            spans: most spans of a tile.
            device: of the buffers.
        """
        bounds = torch.empty(batch, spans, 2, dtype=torch.int32, device=device)
        return Spans(bounds, torch.empty(batch, spans, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class HeadSums:
    """All that the spans of some tiles are cut out of: sums over heads, which ranks with some of the heads may add.

    Attributes:
        levels: [batch] float32 or float64, the heads' thresholds (equation 5), summed.
        summed: [batch, block, block] in the same dtype, attention, summed, thresholds not taken off; 0 above the
            diagonal and in rows that are not there.
    """

    levels: torch.Tensor
    summed: torch.Tensor


@dataclass(frozen=True, slots=True)
class SpanWorkspace:
    """Buffers that the kernels need beside their output; allocate once, before a CUDA graph is captured.

    What they hold after a call, of the tiles that are there:

    Attributes:
        thresholds: [batch, heads] float32, each head's threshold (equation 5).
        summed: [batch, block, block] float32, attention summed over heads, thresholds not taken off; 0 above the
            diagonal and in rows that are not there.
        scores: [batch, block, block] float32, score of the span from token x (the column) to token y (the row), where
            x <= y (equations 4 and 5). The kernels in CUDA leave it as it is.
    """

    thresholds: torch.Tensor
    summed: torch.Tensor
    scores: torch.Tensor

    @staticmethod
    def empty(batch: int, heads: int, block: int, device: torch.device | str) -> SpanWorkspace:
        """Uninitialised buffers.

        Args:
            batch: tiles.
            heads: of a tile.
            block: tokens of a tile.
            device: of the buffers.
        """
        thresholds = torch.empty(batch, heads, dtype=torch.float32, device=device)
        summed = torch.empty(batch, block, block, dtype=torch.float32, device=device)
        return SpanWorkspace(thresholds, summed, torch.empty_like(summed))


def check_rule(rule: SpanRule) -> None:
    """Raise ValueError where a setting is out of its range."""
    if not 0 < rule.theta < 1 or not 0 <= rule.phi < 1:
        raise ValueError(f"theta={rule.theta}, phi={rule.phi}: expected 0 < theta < 1 and 0 <= phi < 1")
    if rule.spans < 1 or rule.most < 1:
        raise ValueError(f"spans={rule.spans}, most={rule.most}: expected at least 1 of each")
    if not rule.rate >= 0:
        raise ValueError(f"rate={rule.rate}: expected at least 0")
    if rule.ratio not in RATIOS:
        raise ValueError(f"ratio={rule.ratio!r}: expected one of {', '.join(RATIOS)}")


def check(tiles: torch.Tensor, rows: torch.Tensor, rule: SpanRule, out: Spans | None) -> None:
    """Raise ValueError where shapes, dtypes, devices or settings do not fit `cut_spans`; values are not looked at."""
    check_rule(rule)
    check_tiles(tiles, rows)
    if out is not None:
        check_spans(out, tiles.shape[0], rule.spans)
        _check_devices(tiles, out.bounds, out.counts)


def check_tiles(tiles: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise ValueError where shapes, dtypes or devices do not fit `sum_heads`; values are not looked at."""
    if tiles.dim() != 4 or tiles.shape[2] != tiles.shape[3] or tiles.shape[3] not in BLOCKS or tiles.shape[1] < 1:
        raise ValueError(
            f"tiles of shape {tuple(tiles.shape)}: expected [batch, heads, block, block] with at least one head and a "
            f"block of {', '.join(map(str, BLOCKS))} tokens"
        )
    if tiles.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"tiles are {tiles.dtype}: expected float32 or float64")
    _check_ints(("rows", rows, (tiles.shape[0],)))
    _check_devices(tiles, rows)


def check_sums(sums: HeadSums, rows: torch.Tensor, rule: SpanRule) -> None:
    """Raise ValueError where shapes, dtypes, devices or settings do not fit `cut_summed`; values are not looked at."""
    check_rule(rule)
    batch, block = rows.shape[0], sums.summed.shape[-1]
    if tuple(sums.summed.shape) != (batch, block, block) or block not in BLOCKS or tuple(sums.levels.shape) != (batch,):
        raise ValueError(
            f"sums of shapes {tuple(sums.levels.shape)} and {tuple(sums.summed.shape)} for {batch} tiles: expected"
            f" [{batch}] and [{batch}, block, block] with a block of {', '.join(map(str, BLOCKS))} tokens"
        )
    if sums.summed.dtype not in (torch.float32, torch.float64) or sums.levels.dtype != sums.summed.dtype:
        raise ValueError(
            f"sums are {sums.levels.dtype} and {sums.summed.dtype}: expected both float32, or both float64"
        )
    _check_ints(("rows", rows, (batch,)))
    _check_devices(sums.levels, sums.summed, rows)


def check_spans(spans: Spans, batch: int, most_spans: int) -> None:
    """Raise ValueError where spans are not those of `batch` tiles with room for `most_spans`, int32 and contiguous."""
    _check_ints(
        ("bounds", spans.bounds, (batch, most_spans, 2)),
        ("counts", spans.counts, (batch, most_spans)),
    )


def check_workspace(workspace: SpanWorkspace, tiles: torch.Tensor) -> None:
    """Raise ValueError where a workspace is for other tiles."""
    batch, heads, block, _ = tiles.shape
    for name, tensor, shape in (
        ("thresholds", workspace.thresholds, (batch, heads)),
        ("summed", workspace.summed, (batch, block, block)),
        ("scores", workspace.scores, (batch, block, block)),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}: expected contiguous "
                f"float32 {shape}; make them with SpanWorkspace.empty"
            )
    _check_devices(tiles, workspace.thresholds, workspace.summed, workspace.scores)


def check_pick(spans: Spans, received: torch.Tensor, most: int, out: torch.Tensor | None) -> None:
    """Raise ValueError where shapes, dtypes, devices or settings do not fit `pick`; values are not looked at."""
    if most < 1:
        raise ValueError(f"most={most}: expected at least 1")
    if received.dim() != 2 or received.shape[1] not in BLOCKS:
        raise ValueError(
            f"received of shape {tuple(received.shape)}: expected [batch, block] with a block of "
            f"{', '.join(map(str, BLOCKS))} tokens"
        )
    if received.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"received is {received.dtype}: expected float32 or float64")
    if spans.counts.dim() != 2:
        raise ValueError(f"counts of shape {tuple(spans.counts.shape)}: expected [batch, spans]")
    batch, most_spans = received.shape[0], spans.counts.shape[1]
    check_spans(spans, batch, most_spans)
    if out is not None:
        _check_ints(("out", out, (batch, most_spans, most)))
    _check_devices(received, spans.bounds, spans.counts, *(() if out is None else (out,)))


def _check_ints(*tensors: tuple[str, torch.Tensor, tuple[int, ...]]) -> None:
    """Raise ValueError where one of (name, tensor, shape) is not contiguous int32 of that shape."""
    for name, tensor, shape in tensors:
        if tuple(tensor.shape) != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}: expected contiguous int32 "
                f"{shape}"
            )


def _check_devices(*tensors: torch.Tensor) -> None:
    """Raise ValueError where tensors are on several devices."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors on {', '.join(sorted(map(str, devices)))}: expected one device")
