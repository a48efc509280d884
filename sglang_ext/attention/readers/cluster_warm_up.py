"""What decoding steps over clusters compile, at the start of a server: no request is to wait for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import torch

from sglang_ext.attention.double_p import DoublePPolicy
from sglang_ext.attention.readers.cluster_rows import HEADROOM
from sglang_ext.attention.readers.plans import ROOM, Planner
from sglang_ext.cache.cluster_pool import ClusterMemory, tiles_of
from sglang_ext.kernels.cluster_attention import joint_impl
from sglang_ext.kernels.cluster_attention.buffers import RowBuffers
from sglang_ext.kernels.cluster_attention.rows import TILE, PlannedRow, RowCapacity
from sglang_ext.kernels.cluster_attention.triton_impl import padded
from sglang_ext.kernels.cluster_attention.types import ClusterTuning, aligned
from sglang_ext.kernels.top_p import cuda_impl
from sglang_ext.kernels.top_p.types import WITHOUT_GAPS, Numbering

LARGEST = 4096
"""Rows (of a request and a key-value head) of the largest batch that is compiled at the start: 512 requests with 8
key-value heads. Kernels for more take long to compile, and few servers decode so many outside of CUDA graphs.
"""


def batches(most: int, kv_heads: int) -> list[int]:
    """The smallest batch for each number of rows that the kernels are compiled for (`padded`).

    Args:
        most: requests that decode at a time.
        kv_heads: key-value heads of each.
    """
    sizes: dict[int, int] = {}
    for batch in range(1, max(1, min(most, LARGEST // kv_heads)) + 1):
        sizes.setdefault(padded(batch * kv_heads), batch)
    return list(sizes.values())


def warm_up(
    planner: Planner,
    policy: DoublePPolicy,
    memory: ClusterMemory,
    tuning: ClusterTuning,
    rows_for: Callable[[RowCapacity, ClusterTuning], RowBuffers],
) -> None:
    """Run every kernel that steps outside of CUDA graphs need, in one rotation of the query and in several.

    What graphs need is compiled as they are captured, and what batches of more than `LARGEST` rows need when they come.

    Args:
        planner, policy, memory: whose steps they are; clusters of a few tokens are made, and given back.
        tuning: of the kernels outside of CUDA graphs.
        rows_for: makes the buffers of a batch.

    Raises:
        ValueError: there is no room for the clusters of one run.
    """
    config, shape, model = policy.config, planner.shape, planner.model
    table, caches = model.table, model.caches()
    layer = min(caches)
    run = memory.make(table[0, : min(config.append, table.shape[1])], 0)
    memory.settle()
    if run is None:
        raise ValueError("no room for one run of clusters: expected a larger KV cache")
    one = PlannedRow(
        tiles=np.array(run.place.tiles, dtype=np.int32),
        sized=np.array(run.place.tiles, dtype=np.int32),
        rotations=np.zeros(len(run.place.tiles), dtype=np.int32),
        deltas=(0,),
        spans=(),
        tail=(0, 0),
        p=config.stages,
        tokens=run.tokens,
    )
    width, device = memory.width, table.device
    cells = int(tiles_of(min(table.shape[1], model.slots), config.cluster * width) * HEADROOM) * width
    needed = RowCapacity.of([one], [ROOM]).rounded()
    kinds = [(replace(needed, rows=batch), tuning) for batch in batches(table.shape[0], shape.kv_heads)]
    if cells > cuda_impl.MAX_CELLS:  # the longest rows are scored, searched and read in Triton
        longest = replace(needed, tiles=cuda_impl.MAX_CELLS // width + 1)
        kinds.insert(0, (longest, replace(tuning, joint=False, fused=False)))
    step = torch.ones(1, dtype=torch.int64, device=device)
    keys, values = caches[layer]
    for (capacity, each), rotations in product(kinds, (1, 2)):
        rows = rows_for(replace(capacity, rotations=rotations), each)
        rows.load([one], [1], table.view(-1))
        rows.advance(step, step)
        query = keys.new_zeros(capacity.rows, shape.heads, shape.head_dim, dtype=shape.dtype)
        rows.attend(query, keys, values, memory.layers[layer], shape.scale)
    if config.group == "union":
        # Longer rows come in other kernels, and those that see blocks from several distances.
        clusters = query[:1].unsqueeze(1), memory.layers[layer], rows.clusters(1)
        if not (tuning.joint and joint_impl.warm_up(*clusters, cells)):
            cuda_impl.warm_up(device, shape.group, cells, WITHOUT_GAPS, width)
        cuda_impl.warm_up(device, shape.group, cells, Numbering(width, aligned(TILE)))
