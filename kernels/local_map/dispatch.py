"""Who computes a chunk's map anew: Triton's kernels on a GPU, the reference elsewhere."""

from __future__ import annotations

from sglang_ext.kernels.local_map.types import BlockTiles, LocalMap, Received


def received(chunks: LocalMap, *, out: Received | None = None) -> Received:
    """`reference.received` (see there), by the Triton kernels where the queries live on a GPU."""
    if not chunks.query_near.is_cuda:
        from sglang_ext.kernels.local_map.reference import received as run
    else:
        from sglang_ext.kernels.local_map.triton_impl import received as run
    return run(chunks, out=out)


def fill_tiles(chunks: LocalMap, blocks: BlockTiles) -> None:
    """`reference.fill_tiles` (see there), by the Triton kernel where the queries live on a GPU."""
    if not chunks.query_near.is_cuda:
        from sglang_ext.kernels.local_map.reference import fill_tiles as run
    else:
        from sglang_ext.kernels.local_map.triton_impl import fill_tiles as run
    run(chunks, blocks)
