"""The scores of blocks and the election for a device: kernels in CUDA or Triton on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

import torch

from sglang_ext.kernels.block_votes import reference
from sglang_ext.kernels.block_votes.types import BlockIndex, QuerySpans, check, check_election


def score_blocks(
    query: QuerySpans, index: BlockIndex, *, kind: str = "sum", out: torch.Tensor | None = None
) -> torch.Tensor:
    """`reference.score_blocks` (see there; equations 8 and 9), by kernels where the index lives on a GPU.

    The kernels in CUDA compute what they can (`refusal` of `cuda_impl` and `cuda_mass`), and those in Triton the rest.

    Args:
        query, index, kind, out: as in the reference; on a GPU contiguous.

    Returns:
        [batch, max_blocks] float32, on the index's device; float64 for float64, on a CPU alone.

    Raises:
        ValueError: as in the reference; on a GPU `triton_impl.score_blocks` says what it refuses, and values out of
            their range cannot be refused.
    """
    score = reference.score_blocks
    if index.vectors.is_cuda:
        from sglang_ext.kernels.block_votes import cuda_impl, cuda_mass, triton_impl

        check(query, index, kind, out)  # `refusal` takes what fits
        score = triton_impl.score_blocks
        for module in (cuda_impl, cuda_mass):
            if module.refusal(index.vectors.device, query, index, kind) is None:
                score = module.score_blocks
    return score(query, index, kind=kind, out=out)


def elect(
    votes: torch.Tensor,
    scores: torch.Tensor | None,
    *,
    weight: float | torch.Tensor,
    count: int,
    mode: str = "inclusive",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.elect` (see there; section 3.5), by kernels where the votes live on a GPU.

    The kernel in CUDA elects what it can (`cuda_election.refusal`), and the one in Triton the rest.

    Args:
        votes, scores, weight, count, mode, out: as in the reference; on a GPU contiguous.

    Returns:
        [batch, count] int32 numbers of blocks, best first, -1 beyond, on the votes' device.

    Raises:
        ValueError: as in the reference; on a GPU `triton_impl.elect` says what it refuses.
    """
    choose = reference.elect
    if votes.is_cuda:
        from sglang_ext.kernels.block_votes import cuda_election, triton_impl

        check_election(votes, scores, weight, count, mode, out)
        choose = triton_impl.elect
        if cuda_election.refusal(votes.device, votes, scores, count) is None:
            choose = cuda_election.elect
    return choose(votes, scores, weight=weight, count=count, mode=mode, out=out)
