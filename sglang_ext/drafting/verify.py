"""What a verification accepts, in plain PyTorch.

A draft is one token a position, not a distribution. So the exact rule of speculative sampling (Leviathan et al., 2023,
section 2.3) becomes: draw the target's token at every position, and go on for as long as it is the drafted one. Each
token of the answer is then drawn from the target's own distribution given the tokens before it; greedily, it is the
target's best one.
"""

from __future__ import annotations

import torch


def accepted(drafts: torch.Tensor, drawn: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """How many of the drawn tokens hold: those up to the first that was not the next draft, and that one itself.

    Args:
        drafts: [requests, tokens] integer: the request's last token, and the drafts behind it.
        drawn: [requests, tokens] integer: what the target gives behind each of them, were all before it right.
        most: [requests] integer: how many a request takes at most; at least 1.

    Returns:
        [requests] int32, at least 1 each.
    """
    right = (drafts[:, 1:] == drawn[:, :-1]).int()
    return torch.minimum(right.cumprod(dim=1).sum(dim=1) + 1, most).to(torch.int32)


def row_positions(lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """[requests * tokens] int64: the columns of rows that follow `lengths` [requests] columns, `tokens` a request."""
    rows = torch.arange(tokens, dtype=torch.int64, device=lengths.device)
    return (lengths.to(torch.int64).unsqueeze(1) + rows).flatten()
