"""Adding tokens to the cascading cache in plain PyTorch: one token at a time, and a whole stride at once.

The rule (Cascading KV cache, section 3.2 and Algorithm 2). Behind the sinks, token by token, step u = 0, 1, 2, ...:
the new token enters sub-cache 0. A sub-cache that accepts appends the token; if it is full, the oldest makes room and
enters the next sub-cache in the same step; from the last one it is dropped. A sub-cache that does not accept compares
the token with its newest entry: the higher score stays in that place, on a tie the incoming token; the other is
dropped. While the window is not full all sub-caches accept; afterwards sub-cache i accepts in step u when 2^i divides
u. A score that is not a number loses against none and wins against none: the newest entry stays.

A stride at once. Once the window is full, sub-cache i receives a token in the steps that 2^(i-1) divides and accepts
every second of them, so an entry meets exactly one challenger, half a period later, before anything can push it out:
`ring_i[accept k] = winner(evicted_{i-1}[2k], evicted_{i-1}[2k+1])`. What sub-cache i-1 evicts in a step is its oldest
entry, and within `size` steps all of these are entries from before the first of them. So at most `size` steps at a time
have no order among them but from the deepest sub-cache to the newest, and each step drops exactly one token.
"""

from __future__ import annotations

import torch

from sglang_ext.kernels.cascade_update.state import CascadeState, Rings


def token_update(
    state: CascadeState,
    rows: torch.Tensor,
    seen: torch.Tensor,
    count: torch.Tensor,
    rings: Rings,
    selection: bool = True,
) -> None:
    """`stride_update` token by token, straight from the rule: slow, and the definition of the fast ones."""
    state.check(rows, seen, count, rings)
    for row, before, new in _requests(rows, seen, count, rings):
        lanes = [a[:, row] for a in (state.token, state.cell, state.score)]  # [layers, heads, entries] each
        for n in range(before, before + new):
            waiting = rings.sinks + rings.window + n % rings.stride
            moving = [a[..., waiting].clone() for a in lanes]
            freed = torch.full_like(moving[1], n + rings.stride)
            step, full = n - rings.sinks, n - rings.sinks >= rings.window
            counts, heads = rings.counts(n), rings.heads(n)
            if step < 0:
                for array, value in zip(lanes, moving, strict=True):
                    array[..., n] = value
            for level in range(rings.cascades if step >= 0 else 0):
                base = rings.sinks + level * rings.size
                if counts[level] < rings.size:
                    for array, value in zip(lanes, moving, strict=True):
                        array[..., base + counts[level]] = value
                    break
                if not full or step % 2**level == 0:
                    oldest = base + heads[level]
                    evicted = [a[..., oldest].clone() for a in lanes]
                    for array, value in zip(lanes, moving, strict=True):
                        array[..., oldest] = value
                    moving = evicted
                    if level == rings.cascades - 1:
                        freed = moving[1]
                    continue
                newest = base + (heads[level] - 1) % rings.size
                resident = [a[..., newest].clone() for a in lanes]
                wins = moving[2] >= resident[2] if selection else torch.zeros_like(moving[1], dtype=torch.bool)
                for array, value, old in zip(lanes, moving, resident, strict=True):
                    array[..., newest] = torch.where(wins, value, old)
                freed = torch.where(wins, resident[1], moving[1])
                break
            lanes[0][..., waiting] = n + rings.stride
            lanes[1][..., waiting] = freed
            lanes[2][..., waiting] = 0.0


def stride_update(
    state: CascadeState,
    rows: torch.Tensor,
    seen: torch.Tensor,
    count: torch.Tensor,
    rings: Rings,
    selection: bool = True,
) -> None:
    """Add the first `count` tokens of each request's open stride to its sub-caches, in place.

    Their scores are read from the open stride's part of `state.score`, which is zero afterwards; the cells that the
    tokens `stride` later will take, one freed in each step, replace theirs in `state.cell`. Keys and values stay.

    Args:
        state: entries of all lanes.
        rows: [batch] integer, different rows of the state.
        seen: [batch] integer, tokens added before.
        count: [batch] integer, tokens to add now, 0 to stride.
        rings: sizes of the cascade.
        selection: False drops every token that meets a sub-cache which does not accept (the paper's Table 3).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a count is not in 0 .. stride.
    """
    state.check(rows, seen, count, rings)
    for row, before, new in _requests(rows, seen, count, rings):
        lanes = [a[:, row] for a in (state.token, state.cell, state.score)]
        end, full = before + new, rings.sinks + rings.window
        at = before
        while at < end:
            stop = min(end, at + rings.size)
            for bound in (rings.sinks, full):  # each phase by itself
                stop = bound if at < bound < stop else stop
            if at < full:
                _fill(lanes, at, stop, rings)
            else:
                _cascade(lanes, at - rings.sinks, stop - rings.sinks, rings, selection)
            at = stop


def _requests(rows: torch.Tensor, seen: torch.Tensor, count: torch.Tensor, rings: Rings) -> list[tuple[int, int, int]]:
    found = list(zip(rows.tolist(), seen.tolist(), count.tolist(), strict=True))
    for row, before, new in found:
        if before < 0 or not 0 <= new <= rings.stride:
            raise ValueError(
                f"row {row}: {new} tokens to add behind {before}; expected 0 to {rings.stride} (the stride) behind 0 "
                "or more; add longer runs stride by stride"
            )
    return found


def _pending(begin: int, end: int, rings: Rings, device: torch.device) -> torch.Tensor:
    return rings.sinks + rings.window + torch.arange(begin, end, device=device) % rings.stride


def _fill(lanes: list[torch.Tensor], begin: int, end: int, rings: Rings) -> None:
    """Tokens [begin, end), all sinks or all within the first window, at most `size` of the latter."""
    waiting = _pending(begin, end, rings, lanes[0].device)
    fresh = torch.arange(begin, end, device=waiting.device, dtype=torch.int32) + rings.stride
    index = torch.arange(begin, end, device=waiting.device)
    for array, after in zip(lanes, (fresh, fresh, torch.zeros((), device=fresh.device)), strict=True):
        if begin < rings.sinks:
            array[..., index] = array[..., waiting]
        else:
            # Every sub-cache accepts, and all rings turn together: a token keeps its index from ring to ring.
            behind = index - rings.sinks
            for level in reversed(range(1, rings.cascades)):
                passed = (behind % rings.size + rings.sinks + level * rings.size)[behind >= level * rings.size]
                array[..., passed] = array[..., passed - rings.size]
            array[..., rings.sinks + behind % rings.size] = array[..., waiting]
        array[..., waiting] = after


def _cascade(lanes: list[torch.Tensor], begin: int, end: int, rings: Rings, selection: bool) -> None:
    """Steps [begin, end) behind a full window, at most `size` of them."""
    device = lanes[0].device
    token, cell, score = lanes
    waiting = _pending(begin + rings.sinks, end + rings.sinks, rings, device)
    new = [a[..., waiting] for a in lanes]
    token[..., waiting] += rings.stride
    score[..., waiting] = 0.0
    last = rings.cascades - 1

    def place(level: int, step: torch.Tensor) -> torch.Tensor:
        """Entry of ring `level` that the accepting `step` writes, and whose oldest token it evicts."""
        return rings.sinks + level * rings.size + ((step >> level) + (-rings.window >> level)) % rings.size

    def freed(step: torch.Tensor) -> torch.Tensor:
        return rings.sinks + rings.window + (step + rings.sinks) % rings.stride

    def multiples(period: int) -> torch.Tensor:
        first = -(-begin // period) * period
        return torch.arange(first, max(first, end), period, device=device)

    dropped = multiples(1 << last)
    cell[..., freed(dropped)] = cell[..., place(last, dropped)]
    for level in range(last, 0, -1):
        accepted = multiples(1 << level)
        for array in lanes:
            array[..., place(level, accepted)] = array[..., place(level - 1, accepted)]
        half = 1 << (level - 1)
        challenging = multiples(half)
        challenging = challenging[challenging % (2 * half) == half]
        resident, incoming = place(level, challenging - half), place(level - 1, challenging)
        wins = score[..., incoming] >= score[..., resident]
        wins = wins if selection else torch.zeros_like(wins)
        cell[..., freed(challenging)] = torch.where(wins, cell[..., resident], cell[..., incoming])
        for array in lanes:
            array[..., resident] = torch.where(wins, array[..., incoming], array[..., resident])
    steps = torch.arange(begin, end, device=device)
    for array, value in zip(lanes, new, strict=True):
        array[..., place(0, steps)] = value
