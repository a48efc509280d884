"""Attention with clamped distances of FlashInfer's dense kernels, whose outputs are merged by their log-sum-exps.

- *Near:* rows see the window through a sliding window of `width` tokens, causal.
- *Far in the window:* row r sees the tokens up to begin + r - width. That is causal attention again, over fewer
  columns: FlashInfer aligns its mask at the end.
- *Beyond:* all rows see all of the memory. Sinks are part of it as soon as they are far from every row. In the first
  chunks of a stream they are near to every row; in between the logits of their few tokens are written down.

**Splits.** FlashInfer's kernel for Hopper gives some rows of one head to one multiprocessor, however many tokens they
see: few rows leave most of a GPU idle. So tokens that all rows see are cut in splits, which have heads of their own:
[tokens, kv_heads, dim] is [tokens / splits, splits * kv_heads, dim] in the same memory. Nearby tokens that some rows do
not see, at both ends of the window, are attended to apart from these. FlashInfer's kernels for other GPUs cut keys
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

from sglang_ext.kernels.clamped_attention import reference
from sglang_ext.kernels.clamped_attention.dispatch import merge
from sglang_ext.kernels.clamped_attention.types import (
    ChunkQuery,
    FarKeys,
    Part,
    SeenKeys,
    check_beyond,
    check_window,
)

Prefill = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""FlashInfer's `single_prefill_with_kv_cache`."""
EVERYTHING = -1
"""FlashInfer's `window_left` for no sliding window."""
ROWS, ROWS_OF_64 = 128, 192
"""Rows of one head that a multiprocessor of Hopper gets; where heads have 64 components."""
LEAST = 256
"""Tokens of a split, at least: fewer are no more work than the split's own output."""
MOST = 16
"""Splits, at most."""
FEWEST_OF_WINDOW = 4
"""Splits that a window is cut in, or none: two save less than the window's ends cost (256 rows take 70 us, and 66)."""


def attend_window(
    query: ChunkQuery,
    window: SeenKeys,
    *,
    width: int,
    scale: float,
    prefill: Prefill | None = None,
    processors: int | None = None,
) -> Part:
    """`reference.attend_window` in half precision, without synchronisation.

    Args:
        query, window, width, scale: as for the reference.
        prefill: stands for FlashInfer's function in tests.
        processors: of the GPU, likewise.

    Returns:
        In one split, with natural log-sum-exps.
    """
    check_window(query, window, width)
    rows, wide = query.near.shape[0], torch.promote_types(query.near.dtype, torch.float32)
    parts = _near(query, window, width, scale, prefill, processors)
    far = query.begin + rows - width - window.first
    if far > 0:
        before = max(0, rows - far)  # so many rows see nothing far away
        part = _run(prefill, query.far[before:], window.far[:far], window.values[:far], scale, causal=True)
        parts.append(part)
    if len(parts) == 1:
        return Part(parts[0].out, parts[0].lse * parts[0].log_of_base)
    found = parts[0]
    for part in parts[1:]:
        found = merge(found, part, wide)  # it is merged once more
    return found


def _near(
    query: ChunkQuery, window: SeenKeys, width: int, scale: float, prefill: Prefill | None, processors: int | None
) -> list[Part]:
    """Attention to nearby tokens: in one part, or in that to the tokens that all rows see, and that to the others."""
    rows, tokens = query.near.shape[0], window.near.shape[0]
    first = max(0, tokens - width)  # from here on, all rows see what is not behind them
    splits = _splits(query, tokens - rows - first, processors)
    if splits < FEWEST_OF_WINDOW:
        return [_run(prefill, query.near, window.near, window.values, scale, causal=True, left=width - 1)]
    first += (tokens - rows - first) % splits
    seen = slice(first, tokens - rows)
    middle = _split(prefill, query.near, window.near[seen], window.values[seen], scale, splits)
    begin = max(0, tokens - rows - width + 1)  # what the first row sees
    ends = lambda each: torch.cat([each[begin:first], each[tokens - rows :]])  # noqa: E731
    # Between a row and the first token that it sees lie all tokens but those of the middle.
    left = width - 1 - (seen.stop - seen.start)
    return [middle, _run(prefill, query.near, ends(window.near), ends(window.values), scale, causal=True, left=left)]


def attend_beyond(
    query: ChunkQuery,
    sinks: SeenKeys,
    memory: FarKeys,
    *,
    width: int,
    scale: float,
    prefill: Prefill | None = None,
    processors: int | None = None,
) -> Part:
    """`reference.attend_beyond`, likewise; in splits, and to base 2, where there is one call."""
    check_beyond(query, sinks, memory, width)
    count = sinks.near.shape[0]
    near = count > 0 and query.begin - (sinks.first + count - 1) < width  # some sink, to the first row
    if not near and count:
        memory = FarKeys(torch.cat([sinks.far, memory.keys]), torch.cat([sinks.values, memory.values]))
    parts, tokens = [], memory.keys.shape[0]
    if tokens:
        splits = math.gcd(_splits(query, tokens, processors), tokens)
        parts.append(_split(prefill, query.far, memory.keys, memory.values, scale, splits))
    if near and query.begin + query.near.shape[0] - 1 - sinks.first < width:
        parts.append(_run(prefill, query.near, sinks.near, sinks.values, scale, causal=False))
    elif near:
        nothing = FarKeys(memory.keys[:0], memory.values[:0])
        parts.append(reference.attend_beyond(query, sinks, nothing, width=width, scale=scale))
    return parts[0] if len(parts) == 1 else merge(parts[0], parts[1], parts[0].lse.dtype)


def _splits(query: ChunkQuery, tokens: int, processors: int | None) -> int:
    """Into how many splits, a power of two, some tokens are cut that all rows see."""
    rows, heads, dim = query.near.shape
    room = _processors(query.near.device) if processors is None else processors
    busy, count = heads * -(-rows // (ROWS_OF_64 if dim == 64 else ROWS)), 1
    while 2 * count <= MOST and 2 * count * busy <= room and tokens // (2 * count) >= LEAST:
        count *= 2
    return count


@lru_cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU whose kernels leave keys whole; 1 for any other device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _split(
    prefill: Prefill | None, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, splits: int
) -> Part:
    """Attention of all rows to all tokens. Every split has as many: split s has the tokens s, s + splits and so on."""
    if splits > 1:
        query = query.repeat(1, splits, 1)
        keys, values = (each.reshape(-1, splits * each.shape[1], each.shape[2]) for each in (keys, values))
    part = _run(prefill, query, keys, values, scale, causal=False)
    return Part(part.out, part.lse, splits, base2=True)


def _run(
    prefill: Prefill | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    causal: bool,
    left: int = EVERYTHING,
) -> Part:
    run = _flashinfer() if prefill is None else prefill
    out, lse = run(
        query, keys, values, causal=causal, kv_layout="NHD", sm_scale=scale, window_left=left, return_lse=True
    )
    return Part(out, lse, base2=True)


def _flashinfer() -> Prefill:
    from flashinfer import single_prefill_with_kv_cache

    found: Prefill = single_prefill_with_kv_cache
    return found
