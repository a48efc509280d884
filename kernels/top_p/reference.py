"""Top-p over clusters by sorting, in plain PyTorch: the definition that the threshold search must meet."""

from __future__ import annotations

import torch

from sglang_ext.kernels.top_p.checks import check, check_buffers
from sglang_ext.kernels.top_p.types import UNION, WITHOUT_GAPS, Numbering, SearchedClusters, Selection, SetRule


def top_p_mask(mass: torch.Tensor, p: torch.Tensor | float) -> torch.Tensor:
    """The smallest set by descending mass whose mass reaches p (Double-P, equation 7).

    Equal masses are taken in ascending index order, and only as many of them as are needed, so the set is minimal. An
    entry without mass is in no set; p >= 1 takes every entry with mass, p <= 0 takes none.

    Args:
        mass: [..., n] non-negative floats; need not sum to 1, p is a fraction of the sum.
        p: number, or tensor that broadcasts to mass.shape[:-1].

    Returns:
        [..., n] bool.
    """
    order = torch.sort(mass, dim=-1, descending=True, stable=True)
    running = order.values.cumsum(-1)
    before = torch.nn.functional.pad(running[..., :-1], (1, 0))
    share = torch.as_tensor(p, dtype=mass.dtype, device=mass.device).unsqueeze(-1)
    # An entry is needed while the sum before it falls short. p = 1 is said apart: the last may not change the sum.
    taken = (before < share * running[..., -1:]) | (share >= 1)
    taken = taken & (order.values > 0) & (share > 0)
    return torch.zeros_like(taken).scatter(-1, order.indices, taken)


def select(
    logits: torch.Tensor,
    clusters: SearchedClusters,
    p: torch.Tensor,
    *,
    rule: SetRule = UNION,
    numbering: Numbering = WITHOUT_GAPS,
) -> Selection:
    """Both stages of top-p for every request and key-value head (Double-P, sections 4.2 and 4.3).

    Args:
        logits: [batch, kv_heads, group, cells] log of the estimated mass of each cluster (equation 5), -inf where the
            cluster is empty.
        clusters: what the logits are of.
        p: [batch, 2] (p1, p2), or with `rule.by_count` the numbers of clusters (RetroInfer: stage 1 and exact).
        rule: which clusters are in a set.
        numbering: of the exact clusters' tokens.

    Returns:
        The selection; exact = the second set, approx = the first set without the second.

    Raises:
        ValueError: shapes that do not fit, or an unknown group rule.
    """
    check(logits, clusters, p, rule)
    sizes, starts, cells = clusters.sizes, clusters.starts, clusters.cells
    run, align = numbering.run, numbering.align
    batch, kv_heads, _, width = logits.shape
    out = Selection.empty(batch, kv_heads, width, logits.device, numbering)
    check_buffers(out, numbering)
    for b in range(batch):
        n = int(cells[b])
        probability = torch.softmax(logits[b, ..., :n].to(torch.promote_types(logits.dtype, torch.float32)), -1)
        probability = torch.nan_to_num(probability)  # a head without a single token: no mass anywhere
        if rule.group == "mean":
            probability = probability.mean(1, keepdim=True)
        kept, exact = (_taken(probability, logits[b, ..., :n], p[b, stage], rule.by_count).any(1) for stage in (0, 1))
        approx = kept & ~exact
        for h in range(kv_heads):
            chosen, rest = (exact[h] | (sizes[b, h, :n] < 0)).nonzero().flatten(), approx[h].nonzero().flatten()
            size = sizes[b, h, chosen].long().abs()
            first = torch.zeros_like(size)
            extent = 0
            for one in chosen.div(run, rounding_mode="floor").unique().tolist():
                own = chosen.div(run, rounding_mode="floor") == one
                first[own] = extent + size[own].cumsum(0) - size[own]
                extent += -(-int(size[own].sum()) // align) * align
            out.exact[b, h, : len(chosen)] = chosen.int()
            out.prefix[b, h, : len(chosen)] = first.int()
            out.shift[b, h, : len(chosen)] = (starts[b, h, chosen] - first).int()
            out.approx[b, h, : len(rest)] = rest.int()
            filled = int((sizes[b, h, :n] != 0).sum())
            out.counts[b, h] = torch.tensor(
                [len(chosen), int(size.sum()), len(rest), filled, extent], dtype=torch.int32
            )
    return out


def _taken(probability: torch.Tensor, logits: torch.Tensor, p: torch.Tensor, by_count: bool) -> torch.Tensor:
    present = (logits > float("-inf")).any(1, keepdim=True)
    if not by_count:
        # A cluster may be present with a mass that rounds to 0: p = 1 means everything.
        return (top_p_mask(probability, p.to(probability.dtype)) | (p >= 1)) & present
    rank = torch.sort(torch.where(present, probability, -1.0), dim=-1, descending=True, stable=True).indices.argsort(-1)
    return (rank < p) & present
