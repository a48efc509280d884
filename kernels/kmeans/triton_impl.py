"""k-means over keys in Triton, all layers in one launch: assignment and update are matrix products.

`_assign` scores a tile of tokens against all centroids of its segment: k' . c' = k . c' - mean . c', so keys are
used as they lie in the cache and what depends on the mean (and for `l2` on |c'|^2) is one number a centroid. `_update`
sums a tile of clusters as the product of a 0/1 matrix of labels with the keys, which is exact but for the float32
accumulation and always in the same order. 64K tokens, 8 heads, 512 clusters a segment, 10 iterations: 0.69 TFLOP a
layer each for assignment and update. `cuda_impl.py` has the update as sums in shared memory instead.

Layers have caches of their own: kernels find them by a table of addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.kmeans.clusters import ClusterPlan, Clusters, bounds, check, members
from sglang_ext.kernels.kmeans.types import KmeansTuning, Sums

TUNING = KmeansTuning()

# Columns of the table of segments: first token, tokens, first cell, clusters.


@triton.jit
def _cache_of(caches, layer, like):
    """The layer's cache, of the type that `like` points to."""
    cache = tl.load(caches + layer).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(cache, 16)


@triton.jit(do_not_specialize=["num_segments"])  # these numbers differ from run to run
def _measure(
    caches, slots, segments, like, means, largest, num_segments,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The mean of a segment's vectors, and the largest magnitude of each component."""
    head, segment, layer = tl.program_id(0), tl.program_id(1) % num_segments, tl.program_id(1) // num_segments
    token, length = tl.load(segments + segment * 4), tl.load(segments + segment * 4 + 1)
    cache = _cache_of(caches, layer, like)
    d, t = tl.arange(0, DIM_PAD), tl.arange(0, TOKENS)
    total = tl.zeros([DIM_PAD], tl.float32)
    top = tl.zeros([DIM_PAD], tl.float32)
    for begin in tl.range(0, length, TOKENS):
        visible = begin + t < length
        slot = tl.load(slots + token + begin + t, mask=visible, other=0).to(tl.int64)
        vectors = tl.load(
            cache + (slot * KV_HEADS + head)[:, None] * DIM + d[None, :],
            mask=visible[:, None] & (d < DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        total += tl.sum(vectors, 0)
        top = tl.maximum(top, tl.max(tl.abs(vectors), 0))
    row = (tl.program_id(1) * KV_HEADS + head) * DIM + d
    tl.store(means + row, tl.div_rn(total, length.to(tl.float32)), mask=d < DIM)  # as exact as a mean of equals
    tl.store(largest + row, top, mask=d < DIM)


@triton.jit(do_not_specialize=["cells", "num_segments"])
def _begin(
    caches, slots, segments, centres, biases, means, cells, num_segments,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, CLUSTERS: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    """The first centroids of a segment, less its mean."""
    head, segment, layer = tl.program_id(1), tl.program_id(2) % num_segments, tl.program_id(2) // num_segments
    token, length = tl.load(segments + segment * 4), tl.load(segments + segment * 4 + 1)
    cell, count = tl.load(segments + segment * 4 + 2), tl.load(segments + segment * 4 + 3)
    d = tl.arange(0, DIM_PAD)
    number = tl.program_id(0) * CLUSTERS + tl.arange(0, CLUSTERS)
    visible = number < count
    chosen = (number.to(tl.int64) * length // count).to(tl.int32)
    slot = tl.load(slots + token + chosen, mask=visible, other=0).to(tl.int64)
    keys = tl.load(
        _cache_of(caches, layer, centres) + (slot * KV_HEADS + head)[:, None] * DIM + d[None, :],
        mask=visible[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    mean = tl.load(means + (tl.program_id(2) * KV_HEADS + head) * DIM + d, mask=d < DIM, other=0.0)
    place = (layer * KV_HEADS + head) * cells + cell + number
    _store_centres(centres, biases, keys.to(tl.float32), mean, place, visible, d, DIM, L2)


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


@triton.jit(do_not_specialize=["tokens", "cells", "num_segments"])
def _assign(
    caches, slots, segments, centres, biases, labels, tokens, cells, num_segments,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TOKENS: tl.constexpr, CENTROIDS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head, segment, layer = tl.program_id(1), tl.program_id(2) % num_segments, tl.program_id(2) // num_segments
    token, length = tl.load(segments + segment * 4), tl.load(segments + segment * 4 + 1)
    cell, count = tl.load(segments + segment * 4 + 2), tl.load(segments + segment * 4 + 3)
    number = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < length:
        d, c = tl.arange(0, DIM_PAD), tl.arange(0, CENTROIDS)
        row = layer * KV_HEADS + head
        visible = number < length
        slot = tl.load(slots + token + number, mask=visible, other=0).to(tl.int64)
        keys = tl.load(
            _cache_of(caches, layer, centres) + (slot * KV_HEADS + head)[:, None] * DIM + d[None, :],
            mask=visible[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        # The best of each column of tiles, so that nothing is reduced across threads before the end.
        best = tl.full([TOKENS, CENTROIDS], float("-inf"), tl.float32)
        tile = tl.zeros([TOKENS, CENTROIDS], tl.int32)
        for begin in tl.range(0, count, CENTROIDS):
            place = row * cells + cell + begin + c
            inside = begin + c < count
            centre = tl.load(
                centres + place.to(tl.int64)[:, None] * DIM + d[None, :],
                mask=inside[:, None] & (d < DIM)[None, :],
                other=0.0,
            )
            bias = tl.load(biases + place, mask=inside, other=float("-inf"))
            score = tl.dot(keys, tl.trans(centre), input_precision=PRECISION) + bias[None, :]
            better = score > best  # the first among equals
            tile = tl.where(better, begin, tile)
            best = tl.where(better, score, best)
        top = tl.max(best, 1)
        label = tl.min(tl.where(best == top[:, None], tile + c[None, :], count - 1), 1)
        tl.store(labels + row.to(tl.int64) * tokens + token + number, cell + label, mask=visible)


@triton.jit(do_not_specialize=["tokens", "cells", "num_segments"])
def _update(
    caches, slots, segments, labels, centres, biases, means, out, tokens, cells, num_segments,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    CLUSTERS: tl.constexpr, L2: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Means of a tile of clusters: as the next centres, or, in the last call, as results (0 for empty clusters)."""
    head, segment, layer = tl.program_id(1), tl.program_id(2) % num_segments, tl.program_id(2) // num_segments
    token, length = tl.load(segments + segment * 4), tl.load(segments + segment * 4 + 1)
    cell, count = tl.load(segments + segment * 4 + 2), tl.load(segments + segment * 4 + 3)
    if LAST:
        count = (count + WIDTH - 1) // WIDTH * WIDTH  # the padding of tiles gets its zeros too
    c, d, t = tl.arange(0, CLUSTERS), tl.arange(0, DIM_PAD), tl.arange(0, TOKENS)
    number = tl.program_id(0) * CLUSTERS + c
    if tl.program_id(0) * CLUSTERS < count:
        cache = _cache_of(caches, layer, out)
        row = layer * KV_HEADS + head
        acc = tl.zeros([CLUSTERS, DIM_PAD], tl.float32)
        size = tl.zeros([CLUSTERS], tl.int32)
        for begin in tl.range(0, length, TOKENS):
            visible = begin + t < length
            at = token + begin + t
            label = tl.load(labels + row.to(tl.int64) * tokens + at, mask=visible, other=-1) - cell
            slot = tl.load(slots + at, mask=visible, other=0).to(tl.int64)
            vectors = tl.load(
                cache + (slot * KV_HEADS + head)[:, None] * DIM + d[None, :],
                mask=visible[:, None] & (d < DIM)[None, :],
                other=0.0,
            )
            belongs = number[:, None] == label[None, :]  # no cluster is number -1 - cell
            acc += tl.dot(belongs.to(vectors.dtype), vectors, input_precision=PRECISION)
            size += tl.sum(belongs.to(tl.int32), 1)
        mean = tl.div_rn(acc, tl.maximum(size, 1).to(tl.float32)[:, None])
        inside = number < count
        if LAST:
            tile = layer * (cells // WIDTH) + (cell + number) // WIDTH
            place = (tile.to(tl.int64) * KV_HEADS + head) * WIDTH + (cell + number) % WIDTH
            mask = inside[:, None] & (d < DIM)[None, :]
            tl.store(out + place[:, None] * DIM + d[None, :], mean.to(out.dtype.element_ty), mask=mask)
        else:
            middle = tl.load(means + (tl.program_id(2) * KV_HEADS + head) * DIM + d, mask=d < DIM, other=0.0)
            place = row * cells + cell + number
            # A cluster that lost all its tokens stays where it is.
            _store_centres(centres, biases, mean, middle, place, inside & (size > 0), d, DIM, L2)


def _shape(kv_heads: int, dim: int) -> dict[str, int]:
    return {"KV_HEADS": kv_heads, "DIM": dim, "DIM_PAD": max(16, triton.next_power_of_2(dim))}


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def update(sums: Sums, last: bool) -> None:
    """Means of the clusters: the next centres, or the results where it is the `last` one."""
    tuning, plan = sums.tuning, sums.plan
    tiles = triton.cdiv(max(plan.tiles) * plan.width, tuning.sum_clusters)
    _update[(tiles, *sums.grid)](
        sums.caches, sums.slots, sums.segments, sums.labels, sums.centres, sums.biases, sums.means, sums.out,
        plan.tokens, sums.cells, len(plan.lengths), **_shape(sums.labels.shape[1], sums.out.shape[-1]),
        WIDTH=plan.width, TOKENS=tuning.sum_tokens, CLUSTERS=tuning.sum_clusters, L2=sums.l2, LAST=last,
        PRECISION=_precision(sums.out.dtype), num_warps=tuning.sum_warps, num_stages=tuning.sum_stages,
    )  # fmt: skip


def kmeans_layers(
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    plan: ClusterPlan,
    *,
    iterations: int = 10,
    assignment: str = "inner",
    tuning: KmeansTuning = TUNING,
    update: Callable[[Sums, bool], None] = update,
) -> Clusters:
    """`reference.kmeans_layers` on the device, without synchronisation; the same result in every run.

    Args:
        key_caches: a layer each, [num_slots, kv_heads, head_dim] contiguous, bfloat16, float16 or float32, of one
            shape. Centroids are scored in this dtype, summed in float32.
        value_caches: a layer each, [num_slots, kv_heads, value_dim] contiguous, of one shape and the keys' dtype.
        slots: [tokens] integer, on the caches' device.
        plan, iterations, assignment: as in the reference.
        tuning: see `KmeansTuning`.
        update: who sums: this module's `update`, or `cuda_impl.update`.

    Returns:
        As the reference: tensors with layers in front.

    Raises:
        ValueError: as in the reference; caches that are not contiguous, or begin inside 16 bytes.
    """
    check(key_caches, value_caches, slots, plan, iterations, assignment)
    if not all(cache.is_contiguous() for cache in (*key_caches, *value_caches)) or not slots.is_contiguous():
        raise ValueError("caches or slots are not contiguous: expected contiguous tensors")
    if any(cache.data_ptr() % 16 for cache in (*key_caches, *value_caches)):
        raise ValueError(
            "a cache begins at an address that is no multiple of 16: expected whole tensors, not parts of one"
        )
    layers, (_, kv_heads, dim), value_dim = len(key_caches), key_caches[0].shape, value_caches[0].shape[2]
    dtype, device, count = key_caches[0].dtype, key_caches[0].device, len(plan.lengths)
    token, tile = bounds(plan.lengths), bounds(plan.tiles)
    cells = tile[-1] * plan.width
    table = [(token[i], length, tile[i] * plan.width, plan.clusters[i]) for i, length in enumerate(plan.lengths)]
    segments = _copied(table, torch.int32, device)
    caches = _copied([[c.data_ptr() for c in each] for each in (key_caches, value_caches)], torch.int64, device)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(layers, *shape, dtype=torch.float32, device=device)

    keys = Sums(
        caches=caches[0],
        slots=slots,
        segments=segments,
        labels=torch.empty(layers, kv_heads, plan.tokens, dtype=torch.int32, device=device),
        largest=floats(count, kv_heads, dim),
        means=floats(count, kv_heads, dim),
        centres=torch.empty(layers, kv_heads, cells, dim, dtype=dtype, device=device),
        biases=floats(kv_heads, cells),
        out=torch.empty(layers, tile[-1], kv_heads, plan.width, dim, dtype=dtype, device=device),
        l2=assignment == "l2",
        plan=plan,
        tuning=tuning,
    )
    values = replace(
        keys,
        caches=caches[1],
        largest=floats(count, kv_heads, value_dim),
        means=floats(count, kv_heads, value_dim),
        out=torch.empty(layers, tile[-1], kv_heads, plan.width, value_dim, dtype=value_caches[0].dtype, device=device),
    )
    shape = _shape(kv_heads, dim)
    for each in (keys, values):
        _measure[keys.grid](
            each.caches, slots, segments, each.out, each.means, each.largest, count,
            **_shape(kv_heads, each.out.shape[-1]), TOKENS=tuning.sum_tokens, num_warps=tuning.sum_warps,
        )  # fmt: skip
    _begin[(triton.cdiv(max(plan.clusters), tuning.sum_clusters), *keys.grid)](
        keys.caches, slots, segments, keys.centres, keys.biases, keys.means, cells, count,
        **shape, CLUSTERS=tuning.sum_clusters, L2=keys.l2, num_warps=tuning.sum_warps,
    )  # fmt: skip
    for iteration in range(iterations):
        _assign[(triton.cdiv(max(plan.lengths), tuning.tokens), *keys.grid)](
            keys.caches, slots, segments, keys.centres, keys.biases, keys.labels, plan.tokens, cells, count,
            **shape, TOKENS=tuning.tokens, CENTROIDS=tuning.centroids, PRECISION=_precision(dtype),
            num_warps=tuning.assign_warps, num_stages=tuning.assign_stages,
        )  # fmt: skip
        update(keys, iteration == iterations - 1)
    update(values, True)
    order, sizes, starts = members(keys.labels, cells)
    by_tile = [x.view(layers, kv_heads, tile[-1], plan.width).transpose(1, 2).contiguous() for x in (sizes, starts)]
    return Clusters(keys.out, values.out, by_tile[0], by_tile[1], order, keys.labels)


def _copied(numbers: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    table = torch.tensor(numbers, dtype=dtype)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def kmeans(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    plan: ClusterPlan,
    *,
    iterations: int = 10,
    assignment: str = "inner",
    tuning: KmeansTuning = TUNING,
    update: Callable[[Sums, bool], None] = update,
) -> Clusters:
    """`kmeans_layers` of one layer, as `reference.kmeans`."""
    return kmeans_layers(
        [key_cache], [value_cache], slots, plan, iterations=iterations, assignment=assignment, tuning=tuning,
        update=update,
    ).layer(0)  # fmt: skip
