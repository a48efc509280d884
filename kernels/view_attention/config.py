"""How the kernel of view attention is cut: tile sizes and workers, and which of them win where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How the attention kernel is cut; a plan and the kernel that runs it must agree on it.

    Attributes:
        block_m: (query row, head of the group) pairs of one item: a power of two, at least 16; 64 a group of warps that
            multiplies where `groups` is not 0.
        block_n: tokens of one step of the inner loop: a power of two, at least 16.
        num_warps: warps of one program.
        num_stages: depth of the software pipeline.
        tile_stages: depth of the pipeline over tokens whose slots follow one another, copied as whole tiles by the
            device (TMA) where it can; 0: gather them like all others.
        num_programs: programs of the persistent grid; each serves one key-value head, or `heads_each` one after the
            other.
        min_split: fewest tokens that are worth an item of their own.
        item_cost: what an item costs beside its tokens (load and rotate queries, store), in steps of `block_n` tokens.
        merge_block: partial outputs that one step of the merge reads.
        groups: groups of warps that multiply in the kernel for Hopper (`hopper_impl`), 1 to 3; 0: `triton_impl`.
        heads_each: key-value heads of one program, above 1 only with `groups`: 8 heads fill 132 multiprocessors in 33
            shares of 2, not in 16 shares of 1.
    """

    block_m: int = 16
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    tile_stages: int = 3
    num_programs: int = 264
    min_split: int = 128
    item_cost: int = 1
    merge_block: int = 16
    groups: int = 0
    heads_each: int = 1

    def __post_init__(self) -> None:
        if self.groups and (self.groups not in (1, 2, 3) or self.block_m != 64 * self.groups):
            raise ValueError(f"{self.groups} groups of 64 for block_m {self.block_m}: expected 1 to 3 that fill it")
        if self.heads_each < 1 or (self.heads_each > 1 and not self.groups):
            raise ValueError(f"{self.heads_each} heads each, {self.groups} groups: expected 1, or groups beside more")
        for name in ("block_n", "merge_block") if self.groups else ("block_m", "block_n", "merge_block"):
            size = getattr(self, name)
            if size & (size - 1) or size < (1 if name == "merge_block" else 16):
                raise ValueError(f"{name} {size}: expected a power of two, block_m and block_n at least 16")
        for name in ("num_warps", "num_stages", "num_programs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: expected at least 1")
        if min(self.min_split, self.item_cost, self.tile_stages) < 0:
            raise ValueError(
                f"min_split {self.min_split}, item_cost {self.item_cost}, tile_stages {self.tile_stages}: expected no "
                "negative numbers"
            )

    def tile_rows(self, group: int) -> int:
        """Query rows of one item, for `group` query heads a key-value head."""
        if not 1 <= group <= self.block_m:
            raise ValueError(
                f"{group} query heads a key-value head: expected 1 to block_m = {self.block_m}; choose a larger block_m"
            )
        return self.block_m // group

    def workers(self, kv_heads: int) -> int:
        """Shares into which the work of one key-value head is cut.

        Raises:
            ValueError: a program cannot serve `heads_each` of so many heads.
        """
        if kv_heads % self.heads_each:
            raise ValueError(f"{self.heads_each} of {kv_heads} key-value heads each: expected a divisor")
        return max(1, self.num_programs * self.heads_each // kv_heads)


HOPPER_COST = {1: 0.43, 2: 0.69, 3: 1.0}
"""Time of a tile by its groups of 64 rows, where the tensor cores bound it: from the sweep on an H200 by which the
sizes were chosen, head size 128, relative to three groups."""


def choose(
    rows_per_run: float,
    group: int,
    head_dim: int,
    value_dim: int | None = None,
    itemsize: int = 2,
    num_sms: int = 132,
    kv_heads: int = 8,
    hopper: bool = False,
) -> Config:
    """The configuration for a kind of batch: the one place where sizes are tuned, and the rule by which kernels win.

    Few rows a run are bound by memory: small tiles of the Triton kernel, three programs an SM, so that some load while
    others compute. Many rows are bound by the tensor cores: where there is one, Hopper's kernel won the sweep from one
    group of 64 rows on, with as many groups as make the tiles cheapest. Elsewhere tiles of 64 rows fill a warp group's
    wgmma, 128 rows two. What it comes to: `launch/bench/results/dbsa_kernels.json`.

    Args:
        rows_per_run: mean number of query rows of the batch that see one run.
        group: query heads a key-value head.
        head_dim: size of a key; value_dim: of a value, the same when left out.
        itemsize: bytes of an element of the caches.
        num_sms: multiprocessors of the device.
        kv_heads: key-value heads of the device.
        hopper: whether `hopper_impl` serves this attention.
    """
    wanted = rows_per_run * group
    token = (_power(head_dim) + _power(value_dim or head_dim)) * itemsize
    if hopper and wanted > 24:
        rows = min(1.1 * wanted, 1e9)  # runs differ: some have more than the mean
        groups = min(HOPPER_COST, key=lambda n: -(-rows // (64 * n)) * HOPPER_COST[n])
        programs = num_sms * (2 if groups == 1 else 1)  # two of the small ones fit a multiprocessor
        return Config(
            block_m=64 * groups,
            block_n=8192 // head_dim,  # never the head size: see `hopper_impl.SQUARE`
            num_warps=4,
            tile_stages={1: 3, 2: 6, 3: 5}[groups],
            num_programs=programs,
            groups=groups,
            # Several tiles a run are dealt, and fewer programs on one head's keys leave less of them in the L2 cache.
            heads_each=1 if rows > 128 * groups else _heads_each(programs, kv_heads),
        )
    block_m = (
        16 if wanted <= 24 or itemsize > 2 else 64 if wanted <= 96 else 128
    )  # float32 has no tensor core: 64 spill
    while block_m < group:
        block_m *= 2
    small = block_m <= 16
    return Config(
        block_m=block_m,
        block_n=64 if token <= 512 else 32 if token <= 1024 else 16,
        num_warps=4 if block_m <= 64 else 8,
        num_stages=4 if small else 3,
        tile_stages=2 if small else 3 if block_m <= 64 else 4,
        num_programs=num_sms * (3 if small else 2 if block_m <= 64 else 1),
    )


def _heads_each(programs: int, kv_heads: int) -> int:
    """Key-value heads of one program, so that most programs have work: the fewest that leave the fewest idle."""
    divisors = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    return max(divisors, key=lambda n: (programs * n // kv_heads * (kv_heads // n), -n))


def _power(size: int) -> int:
    return 1 << max(4, (size - 1).bit_length())
