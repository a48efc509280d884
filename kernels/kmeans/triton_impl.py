"""k-means over keys in Triton: assignment and update are matrix products, nothing is summed with atomics.

`_assign` scores a tile of tokens against all centroids of its segment: k' . c' = k . c' - mean . c', so keys are
used as they lie in the cache and what depends on the mean (and for `l2` on |c'|^2) is one number a centroid. `_update`
sums a tile of clusters as the product of a 0/1 matrix of labels with the keys, which is exact but for the float32
accumulation and always in the same order. 64K tokens, 8 heads, 512 clusters a segment, 10 iterations: 2 * 0.34 TFLOP a
layer each for assignment and update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.kmeans.clusters import Clusters, Plan, bounds, check, sorted_members


@dataclass(frozen=True)
class Tuning:
    """What is chosen by measurement.

    Attributes:
        tokens, centroids: tile of an assignment.
        assign_warps, assign_stages: of `_assign`.
        sum_clusters, sum_tokens: tile of an update.
        sum_warps, sum_stages: of `_update`.
    """

    tokens: int = 128
    centroids: int = 64
    assign_warps: int = 8
    assign_stages: int = 3
    sum_clusters: int = 64
    sum_tokens: int = 64
    sum_warps: int = 4
    sum_stages: int = 3


TUNING = Tuning()

# Columns of the table of segments.
TOKEN, LENGTH, CELL, COUNT = 0, 1, 2, 3


@triton.jit
def _start(
    key_cache, slots, segments, centres, biases, means, cells,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TOKENS: tl.constexpr, CLUSTERS: tl.constexpr,
    L2: tl.constexpr,
):  # fmt: skip
    """The mean key of a segment, and its first centroids less that mean."""
    head, segment = tl.program_id(0), tl.program_id(1)
    token, length = tl.load(segments + segment * 4), tl.load(segments + segment * 4 + 1)
    cell, count = tl.load(segments + segment * 4 + 2), tl.load(segments + segment * 4 + 3)
    d, t, c = tl.arange(0, DIM_PAD), tl.arange(0, TOKENS), tl.arange(0, CLUSTERS)
    total = tl.zeros([DIM_PAD], tl.float32)
    for begin in tl.range(0, length, TOKENS):
        visible = begin + t < length
        slot = tl.load(slots + token + begin + t, mask=visible, other=0).to(tl.int64)
        keys = tl.load(
            key_cache + (slot * KV_HEADS + head)[:, None] * DIM + d[None, :],
            mask=visible[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        total += tl.sum(keys.to(tl.float32), 0)
    mean = total / length
    tl.store(means + (segment * KV_HEADS + head) * DIM + d, mean, mask=d < DIM)
    for begin in tl.range(0, count, CLUSTERS):
        number = begin + c
        visible = number < count
        chosen = (number.to(tl.int64) * length // count).to(tl.int32)
        slot = tl.load(slots + token + chosen, mask=visible, other=0).to(tl.int64)
        keys = tl.load(
            key_cache + (slot * KV_HEADS + head)[:, None] * DIM + d[None, :],
            mask=visible[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        _store_centres(centres, biases, keys.to(tl.float32), mean, head * cells + cell + number, visible, d, DIM, L2)


@triton.jit
def _store_centres(centres, biases, centroid, mean, place, visible, d, DIM: tl.constexpr, L2: tl.constexpr):
    # The bias belongs to the centre as it is stored: rounding both apart would favour some centroids.
    centre = (centroid - mean[None, :]).to(centres.dtype.element_ty)
    exact = centre.to(tl.float32)
    bias = -tl.sum(exact * mean[None, :], 1)
    if L2:
        bias -= tl.sum(exact * exact, 1) * 0.5
    mask = visible[:, None] & (d < DIM)[None, :]
    tl.store(centres + place.to(tl.int64)[:, None] * DIM + d[None, :], centre, mask=mask)
    tl.store(biases + place, bias, mask=visible)


@triton.jit
def _assign(
    key_cache, slots, segments, centres, biases, labels, tokens, cells,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TOKENS: tl.constexpr, CENTROIDS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head, segment = tl.program_id(1), tl.program_id(2)
    token, length = tl.load(segments + segment * 4), tl.load(segments + segment * 4 + 1)
    cell, count = tl.load(segments + segment * 4 + 2), tl.load(segments + segment * 4 + 3)
    number = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < length:
        d, c = tl.arange(0, DIM_PAD), tl.arange(0, CENTROIDS)
        visible = number < length
        slot = tl.load(slots + token + number, mask=visible, other=0).to(tl.int64)
        keys = tl.load(
            key_cache + (slot * KV_HEADS + head)[:, None] * DIM + d[None, :],
            mask=visible[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        best = tl.full([TOKENS], float("-inf"), tl.float32)
        label = tl.zeros([TOKENS], tl.int32)
        for begin in tl.range(0, count, CENTROIDS):
            place = head * cells + cell + begin + c
            inside = begin + c < count
            centre = tl.load(
                centres + place.to(tl.int64)[:, None] * DIM + d[None, :],
                mask=inside[:, None] & (d < DIM)[None, :],
                other=0.0,
            )
            bias = tl.load(biases + place, mask=inside, other=float("-inf"))
            score = tl.dot(keys, tl.trans(centre), input_precision=PRECISION) + bias[None, :]
            top, where = tl.max(score, 1, return_indices=True)
            label = tl.where(top > best, begin + where, label)
            best = tl.maximum(top, best)
        tl.store(labels + head * tokens + token + number, cell + label, mask=visible)


@triton.jit
def _update(
    cache, slots, segments, labels, centres, biases, means, out, tokens, cells,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    CLUSTERS: tl.constexpr, L2: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Means of a tile of clusters: as the next centres, or, in the last call, as results (0 for empty clusters)."""
    head, segment = tl.program_id(1), tl.program_id(2)
    token, length = tl.load(segments + segment * 4), tl.load(segments + segment * 4 + 1)
    cell, count = tl.load(segments + segment * 4 + 2), tl.load(segments + segment * 4 + 3)
    if LAST:
        count = (count + WIDTH - 1) // WIDTH * WIDTH  # the padding of tiles gets its zeros too
    c, d, t = tl.arange(0, CLUSTERS), tl.arange(0, DIM_PAD), tl.arange(0, TOKENS)
    number = tl.program_id(0) * CLUSTERS + c
    if tl.program_id(0) * CLUSTERS < count:
        acc = tl.zeros([CLUSTERS, DIM_PAD], tl.float32)
        size = tl.zeros([CLUSTERS], tl.int32)
        for begin in tl.range(0, length, TOKENS):
            visible = begin + t < length
            at = token + begin + t
            label = tl.load(labels + head * tokens + at, mask=visible, other=-1) - cell
            slot = tl.load(slots + at, mask=visible, other=0).to(tl.int64)
            vectors = tl.load(
                cache + (slot * KV_HEADS + head)[:, None] * DIM + d[None, :],
                mask=visible[:, None] & (d < DIM)[None, :],
                other=0.0,
            )
            belongs = number[:, None] == label[None, :]  # no cluster is number -1 - cell
            acc += tl.dot(belongs.to(vectors.dtype), vectors, input_precision=PRECISION)
            size += tl.sum(belongs.to(tl.int32), 1)
        mean = acc / tl.maximum(size, 1).to(tl.float32)[:, None]
        inside = number < count
        if LAST:
            all_cells = cell + number
            place = ((all_cells // WIDTH).to(tl.int64) * KV_HEADS + head) * WIDTH + all_cells % WIDTH
            mask = inside[:, None] & (d < DIM)[None, :]
            tl.store(out + place[:, None] * DIM + d[None, :], mean.to(out.dtype.element_ty), mask=mask)
        else:
            middle = tl.load(means + (segment * KV_HEADS + head) * DIM + d, mask=d < DIM, other=0.0)
            place = head * cells + cell + number
            # A cluster that lost all its tokens stays where it is.
            _store_centres(centres, biases, mean, middle, place, inside & (size > 0), d, DIM, L2)


def kmeans(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    plan: Plan,
    *,
    iterations: int = 10,
    assignment: str = "inner",
    tuning: Tuning = TUNING,
) -> Clusters:
    """`reference.kmeans` on the device, without synchronisation; the same result in every run.

    Args:
        key_cache: [num_slots, kv_heads, head_dim] contiguous, bfloat16, float16 or float32. Centroids are scored in
            this dtype, summed in float32.
        value_cache: [num_slots, kv_heads, value_dim] contiguous.
        slots: [tokens] integer, on the caches' device.
        plan, iterations, assignment: as in the reference.
        tuning: see `Tuning`.

    Returns:
        As the reference.

    Raises:
        ValueError: as in the reference; caches that are not contiguous.
    """
    check(key_cache, value_cache, slots, plan, iterations, assignment)
    if not key_cache.is_contiguous() or not value_cache.is_contiguous() or not slots.is_contiguous():
        raise ValueError("caches or slots are not contiguous: expected contiguous tensors")
    kv_heads, dim, value_dim, device = key_cache.shape[1], key_cache.shape[2], value_cache.shape[2], key_cache.device
    token, tile = bounds(plan.lengths), bounds(plan.tiles)
    cells = tile[-1] * plan.width
    table = [(token[i], length, tile[i] * plan.width, plan.clusters[i]) for i, length in enumerate(plan.lengths)]
    segments = torch.tensor(table, dtype=torch.int32)
    if device.type == "cuda":
        segments = segments.pin_memory().to(device, non_blocking=True)
    centres = torch.empty(kv_heads, cells, dim, dtype=key_cache.dtype, device=device)
    biases = torch.empty(kv_heads, cells, dtype=torch.float32, device=device)
    means = torch.empty(len(table), kv_heads, dim, dtype=torch.float32, device=device)
    labels = torch.empty(kv_heads, plan.tokens, dtype=torch.int32, device=device)
    centroids = torch.empty(tile[-1], kv_heads, plan.width, dim, dtype=key_cache.dtype, device=device)
    values = torch.empty(tile[-1], kv_heads, plan.width, value_dim, dtype=value_cache.dtype, device=device)
    l2 = assignment == "l2"
    precision = "ieee" if key_cache.dtype == torch.float32 else "tf32"
    key_shape = {"KV_HEADS": kv_heads, "DIM": dim, "DIM_PAD": max(16, triton.next_power_of_2(dim))}
    value_shape = {"KV_HEADS": kv_heads, "DIM": value_dim, "DIM_PAD": max(16, triton.next_power_of_2(value_dim))}
    sums = {
        "WIDTH": plan.width, "TOKENS": tuning.sum_tokens, "CLUSTERS": tuning.sum_clusters, "L2": l2,
        "PRECISION": precision, "num_warps": tuning.sum_warps, "num_stages": tuning.sum_stages,
    }  # fmt: skip
    grid = (kv_heads, len(table))
    _start[grid](
        key_cache, slots, segments, centres, biases, means, cells, **key_shape,
        TOKENS=tuning.sum_tokens, CLUSTERS=tuning.sum_clusters, L2=l2, num_warps=tuning.sum_warps,
    )  # fmt: skip
    cluster_tiles = triton.cdiv(max(plan.tiles) * plan.width, tuning.sum_clusters)
    for iteration in range(iterations):
        _assign[(triton.cdiv(max(plan.lengths), tuning.tokens), *grid)](
            key_cache, slots, segments, centres, biases, labels, plan.tokens, cells, **key_shape,
            TOKENS=tuning.tokens, CENTROIDS=tuning.centroids, PRECISION=precision,
            num_warps=tuning.assign_warps, num_stages=tuning.assign_stages,
        )  # fmt: skip
        _update[(cluster_tiles, *grid)](
            key_cache, slots, segments, labels, centres, biases, means, centroids, plan.tokens, cells,
            **key_shape, **sums, LAST=iteration == iterations - 1,
        )  # fmt: skip
    _update[(cluster_tiles, *grid)](
        value_cache, slots, segments, labels, centres, biases, means, values, plan.tokens, cells,
        **value_shape, **sums, LAST=True,
    )  # fmt: skip
    order, sizes, starts = sorted_members(labels, cells)
    by_tile = [x.view(kv_heads, tile[-1], plan.width).transpose(0, 1).contiguous() for x in (sizes, starts)]
    return Clusters(centroids, values, by_tile[0], by_tile[1], order, labels)
