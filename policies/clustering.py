"""What of a long row may be left out while decoding, and how its keys are clustered (Double-P, section 4.1)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_ext.kernels.limits import ASSIGNMENTS, CENTROIDS

if TYPE_CHECKING:
    from sglang_ext.kernels.kmeans import ClusterPlan

CHOICES = "choices"
"""In a field's metadata: the values it takes, which the command line and the tables in `docs/` show."""


@dataclass(frozen=True)
class Middle:
    """The middle tokens of a row: all but the sinks and the window, which every method reads.

    Attributes:
        sink: first tokens, always exact.
        window: last tokens, always exact; new tokens join it.
        min_tokens: rows with fewer tokens are attended to densely. It has not been measured from how many tokens on
            sparse attention is faster.
    """

    sink: int = field(default=4, kw_only=True)
    window: int = field(default=64, kw_only=True)
    min_tokens: int = field(default=8192, kw_only=True)

    def __post_init__(self) -> None:
        if min(self.sink, self.window, self.min_tokens) < 0:
            raise ValueError(
                f"sink={self.sink}, window={self.window}, min_tokens={self.min_tokens}: expected at least 0"
            )


@dataclass(frozen=True)
class Clustering(Middle):
    """How the keys of the middle tokens are clustered.

    Attributes:
        cluster: about how many tokens make a cluster.
        segment: the most tokens clustered at once; segments end at multiples of it, so that a prefix is cut alike
            whoever continues it.
        iterations: rounds of k-means.
        append: so many new tokens are clustered at once.
        assignment: `inner` product on mean-centred keys, or `l2`.
        centroids: type in which they are kept and scored: the queries' (`same`), or `float8` (e4m3), half the bytes.
    """

    cluster: int = field(default=16, kw_only=True)
    segment: int = field(default=8192, kw_only=True)
    iterations: int = field(default=10, kw_only=True)
    append: int = field(default=1024, kw_only=True)
    assignment: str = field(default="inner", kw_only=True, metadata={CHOICES: ASSIGNMENTS})
    centroids: str = field(default="same", kw_only=True, metadata={CHOICES: CENTROIDS})

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.cluster, self.segment, self.iterations, self.append) < 1:
            raise ValueError(
                f"cluster={self.cluster}, segment={self.segment}, iterations={self.iterations}, "
                f"append={self.append}: expected at least 1"
            )
        options = (("assignment", self.assignment, ASSIGNMENTS), ("centroids", self.centroids, CENTROIDS))
        for name, value, allowed in options:
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(allowed)}")

    def segments(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Cut tokens [begin, end) into segments that end at multiples of `segment` (columns of the row).

        Raises:
            ValueError: a range that is empty or begins before 0.
        """
        if not 0 <= begin < end:
            raise ValueError(f"tokens [{begin}, {end}): expected 0 <= begin < end")
        cuts = [begin, *range((begin // self.segment + 1) * self.segment, end, self.segment), end]
        return list(itertools.pairwise(cuts))

    def clustered(self, length: int) -> tuple[int, int]:
        """The middle tokens [begin, end) of a prompt of `length` tokens; begin = end where there are none."""
        begin = min(self.sink, length)
        return begin, max(begin, length - self.window)

    def due(self, begin: int, end: int, decoding: bool) -> list[tuple[int, int]]:
        """Which segments of the middle tokens [begin, end), none of them clustered yet, are clustered now.

        A segment waits until `append` tokens have come since its first one; one that does not end at a multiple of
        `segment` also waits for decoding to begin, because the next chunk of a prompt may complete it. So what is
        clustered in the end does not depend on how a prompt was cut into chunks.

        Args:
            begin, end: columns; end <= begin is no token.
            decoding: the prompt is complete.
        """
        if end <= begin:
            return []
        return [
            (low, high)
            for low, high in self.segments(begin, end)
            if end - low >= self.append and (decoding or high % self.segment == 0)
        ]

    def left_exact(self, tokens: int, lost: int) -> int:
        """At most about how many of a run's first `tokens` tokens are exact for who has them without the `lost` last.

        Every token that is lost may be of another cluster, whose others are exact then.
        """
        return min(tokens, lost * self.cluster)

    def anew(self, tokens: int, lost: int) -> bool:
        """Whether they are clustered anew, rather than exact: from `append` on, which a row may have exact anyway."""
        return self.left_exact(tokens, lost) >= self.append

    def plan(self, begin: int, end: int, width: int = 64) -> ClusterPlan:
        """How tokens [begin, end) are clustered, for `kernels.kmeans`; `width` clusters a tile."""
        from sglang_ext.kernels.kmeans import ClusterPlan  # imports torch

        return ClusterPlan(tuple(b - a for a, b in self.segments(begin, end)), self.cluster, width)
