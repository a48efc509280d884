"""The host region of a layer, the cache of its blocks, and what a look-up in the cache finds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NOBODY = -1
"""What stands in integer tensors where there is no block, no way or no row."""

ALIGNED_ROWS = 4
"""Small tensors of several layers have a multiple of it as rows: each layer's begin at a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True)
class HostRegion:
    """The blocks that left the windows of all streams, in one layer. All tensors have one dtype and one device.

    A GPU reads and writes pinned host memory in place (zero copy). The caller passes CUDA tensors that alias the pinned
    memory then: kernels take addresses from them, and copy nothing beforehand.

    Attributes:
        keys: [host_blocks, block, kv_heads, head_dim]. A block is contiguous; the distance between blocks is free.
        values: [host_blocks, block, kv_heads, value_dim], likewise.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, region: torch.Tensor) -> HostRegion:
        """The keys and values of one region, which share its memory.

        Args:
            region: [host_blocks, 2, block, kv_heads, dim], any dtype and device; 0 is the keys and 1 the values.

        Raises:
            ValueError: The region has another shape.
        """
        if region.dim() != 5 or region.shape[1] != 2:
            raise ValueError(f"region {tuple(region.shape)}: expected [host_blocks, 2, block, kv_heads, dim]")
        return cls(region[:, 0], region[:, 1])


@dataclass(frozen=True, slots=True)
class BlockCache:
    """The cache of one layer: each row belongs to one stream and has `ways` places for blocks.

    All tensors are contiguous and lie on one device. The paper's experiments keep 32 blocks a layer on the GPU
    (Ltri-LLM, section 4, implementation details).

    Attributes:
        held: [rows, ways] int32 id of the host block in each way; -1 in an empty way.
        used: [rows, ways] int32 reading of the row's clock when the way was last used; of no meaning in an empty way.
        clock: [rows] int32 number of look-ups that wanted a block. It overflows after 2^31 - 1 look-ups of one stream.
        counters: [rows, 2] int64 number of hits and of misses.
        keys: [rows, ways, block, kv_heads, head_dim] in the region's dtype.
        values: [rows, ways, block, kv_heads, value_dim] likewise.
    """

    held: torch.Tensor
    used: torch.Tensor
    clock: torch.Tensor
    counters: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, rows: int, ways: int, host: HostRegion, device: torch.device | str) -> BlockCache:
        """A cache whose ways are all empty, with room for blocks of `host`.

        Args:
            rows: number of streams.
            ways: number of blocks that a stream keeps.
            host: the layer's region, on any device.
            device: where the cache is to lie.

        Raises:
            ValueError: There are no ways.
        """
        return cls.stacked(1, rows, ways, host, device).layer(0)

    @classmethod
    def stacked(cls, layers: int, rows: int, ways: int, host: HostRegion, device: torch.device | str) -> BlockCache:
        """The caches of several layers in one: every tensor has a dimension of layers in front (see `layer`).

        Args:
            layers: number of layers.
            rows, ways, device: as in `empty`.
            host: the region of any layer; those of all layers have blocks of one shape and dtype.

        Raises:
            ValueError: There are no ways.
        """
        if ways < 1:
            raise ValueError(f"{ways} ways: expected at least 1")
        lead = layers, -(-rows // ALIGNED_ROWS) * ALIGNED_ROWS
        whole = lambda *shape, dtype=torch.int32: torch.zeros(*lead, *shape, dtype=dtype, device=device)  # noqa: E731
        data = [
            torch.empty((layers, rows, ways, *t.shape[1:]), dtype=t.dtype, device=device)
            for t in (host.keys, host.values)
        ]
        held = whole(ways).fill_(NOBODY)
        return cls(held, whole(ways), whole(), whole(2, dtype=torch.int64), *data)

    def layer(self, number: int) -> BlockCache:
        """The cache of one layer of a `stacked` one; it shares its memory."""
        rows = self.keys.shape[1]
        tensors = self.held, self.used, self.clock, self.counters, self.keys, self.values
        return BlockCache(*(tensor[number, :rows] for tensor in tensors))

    def reset(self, rows: torch.Tensor) -> None:
        """Empty the ways of rows, and set their clocks and counters to 0, before new streams take the rows.

        Args:
            rows: [n] integer, on the cache's device, each at least 0.
        """
        rows = rows.long()
        self.held.index_fill_(0, rows, NOBODY)
        for tensor in (self.used, self.clock, self.counters):
            tensor.index_fill_(0, rows, 0)


@dataclass(frozen=True, slots=True)
class FreshBlocks:
    """Blocks that are on their way to the host, and may not be there yet. All tensors lie on the cache's device.

    Attributes:
        ids: [n] int32, their numbers on the host; of those that may be wanted, no number twice.
        keys: [n, block, kv_heads, head_dim] in the region's dtype, contiguous.
        values: [n, block, kv_heads, value_dim], likewise.
    """

    ids: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up says of each wanted block.

    Attributes:
        places: [batch, count] int32 way in which the block lies, or will lie after `fetch`; -1 where none was wanted.
        missing: [batch, count] int32 id of the block where it has to be fetched; -1 where it has not.
    """

    places: torch.Tensor
    missing: torch.Tensor

    @classmethod
    def empty(cls, batch: int, count: int, device: torch.device | str) -> Found:
        """Room for `count` blocks of each request; the contents are undefined."""
        places, missing = (torch.empty(batch, count, dtype=torch.int32, device=device) for _ in range(2))
        return cls(places, missing)


def check_look_up(wanted: torch.Tensor, rows: torch.Tensor, cache: BlockCache, out: Found | None) -> None:
    """Raise ValueError where shapes, dtypes or devices do not fit; values on the device are not looked at."""
    _check_state(cache)
    ways, device = cache.held.shape[1], cache.held.device
    if wanted.dim() != 2 or wanted.dtype != torch.int32 or wanted.stride(1) != 1:
        raise ValueError(
            f"wanted is {wanted.dtype} {tuple(wanted.shape)} with strides {wanted.stride()}: expected int32 "
            "[batch, count], with neighbours side by side"
        )
    batch, count = wanted.shape
    if count > ways:
        raise ValueError(f"{count} blocks wanted of {ways} ways: expected at most {ways}; make the cache larger")
    _check_rows(rows, batch, device)
    if wanted.device != device:
        raise ValueError(f"wanted is on {wanted.device}: expected {device}, where the cache is")
    if out is not None:
        _check_found(out, batch, device)
        if out.places.shape[1] != count:
            raise ValueError(f"out has room for {out.places.shape[1]} blocks a request: expected {count}")


def check_fetch(
    host: HostRegion, found: Found, rows: torch.Tensor, cache: BlockCache, fresh: FreshBlocks | None = None
) -> None:
    """Raise ValueError where shapes, dtypes or devices do not fit; values on the device are not looked at."""
    _check_state(cache)
    _check_region(host)
    device = cache.held.device
    for name, cached, there in (("keys", cache.keys, host.keys), ("values", cache.values, host.values)):
        shape = (*cache.held.shape, *there.shape[1:])
        if cached.shape != shape or not cached.is_contiguous():
            raise ValueError(
                f"cache.{name} {tuple(cached.shape)} (contiguous: {cached.is_contiguous()}): expected contiguous "
                f"{shape} for host.{name} {tuple(there.shape)}"
            )
        if cached.dtype != there.dtype or cached.device != device or there.device != device:
            raise ValueError(
                f"cache.{name} is {cached.dtype} on {cached.device}, host.{name} is {there.dtype} on {there.device}: "
                f"expected one dtype, and {device}; a GPU takes CUDA tensors that alias pinned memory"
            )
    if found.places.dim() != 2:
        raise ValueError(f"found.places {tuple(found.places.shape)}: expected [batch, count]")
    batch = found.places.shape[0]
    _check_found(found, batch, device)
    _check_rows(rows, batch, device)
    if fresh is not None:
        _check_fresh(fresh, host, device)


def _check_fresh(fresh: FreshBlocks, host: HostRegion, device: torch.device) -> None:
    ids = fresh.ids
    if ids.dim() != 1 or ids.dtype != torch.int32 or not ids.is_contiguous() or ids.device != device:
        raise ValueError(f"fresh.ids is {ids.dtype} {tuple(ids.shape)} on {ids.device}: expected int32 [n] on {device}")
    for name, tensor, there in (("keys", fresh.keys, host.keys), ("values", fresh.values, host.values)):
        shape = (ids.shape[0], *there.shape[1:])
        if tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"fresh.{name} {tuple(tensor.shape)}: expected contiguous {shape}, as host.{name}")
        if tensor.dtype != there.dtype or tensor.device != device:
            raise ValueError(f"fresh.{name} is {tensor.dtype} on {tensor.device}: expected {there.dtype} on {device}")


def check_store(
    keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, host: HostRegion
) -> None:
    """Raise ValueError where shapes, dtypes or devices do not fit; values on the device are not looked at."""
    _check_region(host)
    device = host.keys.device
    for name, cached, there in (("keys", keys, host.keys), ("values", values, host.values)):
        token = tuple(there.shape[2:])
        if cached.dim() != 3 or cached.shape[1:] != token or not _whole(cached):
            raise ValueError(
                f"{name} {tuple(cached.shape)} with strides {cached.stride()}: expected [num_slots, "
                f"{token[0]}, {token[1]}] with contiguous tokens, for host.{name} {tuple(there.shape)}"
            )
        if cached.dtype != there.dtype or cached.device != device:
            raise ValueError(
                f"{name} are {cached.dtype} on {cached.device}, host.{name} are {there.dtype} on {device}: expected "
                "one dtype and one device; a GPU takes CUDA tensors that alias pinned memory"
            )
    block = host.keys.shape[1]
    if slots.dim() != 2 or slots.shape[1] != block or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots is {slots.dtype} {tuple(slots.shape)}: expected int32 or int64 [batch, {block}]")
    if slots.stride(1) != 1:
        raise ValueError(f"slots has strides {slots.stride()}: expected the slots of a block side by side")
    if ids.shape != slots.shape[:1] or ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"ids is {ids.dtype} {tuple(ids.shape)}: expected contiguous int32 {tuple(slots.shape[:1])}")
    if slots.device != device or ids.device != device:
        raise ValueError(f"slots are on {slots.device} and ids on {ids.device}: expected {device}, where the region is")


def _whole(tensor: torch.Tensor) -> bool:
    """Whether each element of the first dimension is contiguous; the distance between them is free."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _check_state(cache: BlockCache) -> None:
    shape, device = cache.held.shape, cache.held.device
    if len(shape) != 2 or shape[1] < 1:
        raise ValueError(f"cache.held {tuple(shape)}: expected [rows, ways], with at least one way")
    for name, tensor, of, dtype in (
        ("held", cache.held, shape, torch.int32),
        ("used", cache.used, shape, torch.int32),
        ("clock", cache.clock, shape[:1], torch.int32),
        ("counters", cache.counters, (shape[0], 2), torch.int64),
    ):
        if tensor.shape != of or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"cache.{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: expected contiguous {dtype} "
                f"{tuple(of)} on {device}; make it with BlockCache.empty"
            )


def _check_region(host: HostRegion) -> None:
    keys, values = host.keys, host.values
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:2] != values.shape[:2]:
        raise ValueError(
            f"host.keys {tuple(keys.shape)}, host.values {tuple(values.shape)}: expected [host_blocks, block, "
            "kv_heads, dim], as many blocks of as many tokens"
        )
    if keys.dtype != values.dtype or keys.device != values.device:
        raise ValueError(
            f"host.keys is {keys.dtype} on {keys.device}, host.values {values.dtype} on {values.device}: expected one "
            "dtype and one device"
        )
    for name, tensor in (("keys", keys), ("values", values)):
        if not _whole(tensor):
            raise ValueError(f"host.{name} has strides {tensor.stride()}: expected blocks that are contiguous each")


def _check_rows(rows: torch.Tensor, batch: int, device: torch.device) -> None:
    if rows.shape != (batch,) or rows.dtype not in (torch.int32, torch.int64) or not rows.is_contiguous():
        raise ValueError(f"rows is {rows.dtype} {tuple(rows.shape)}: expected contiguous int32 or int64 {(batch,)}")
    if rows.device != device:
        raise ValueError(f"rows is on {rows.device}: expected {device}, where the cache is")


def _check_found(found: Found, batch: int, device: torch.device) -> None:
    shape = (batch, *found.places.shape[1:])
    for name, tensor in (("places", found.places), ("missing", found.missing)):
        if tensor.dim() != 2 or tensor.shape != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected contiguous int32 {shape}; make it with "
                "Found.empty"
            )
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}: expected {device}, where the cache is")
