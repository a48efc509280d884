"""Settings of the methods, and the options of the policies that serve them (`--policy`).

They stand apart from the methods, so that a command line can be checked before torch is imported, which takes seconds:
this module, and what it imports, does without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from sglang_ext.kernels.limits import MAX_CASCADES
from sglang_ext.policies.clustering import CHOICES, Clustering, Middle

if TYPE_CHECKING:
    from sglang_ext.kernels.cascade_update import Rings


HEAD_REDUCTIONS = ("mean", "max")
HEADS = ("independent", "homogeneous")
TAILS = ("drop", "centroid")
GROUPS = ("union", "mean")
ESTIMATES = ("int4", "exact")
MOST_QUERIES = 1 << 30
"""Between two that count in the scores, at most: kernels count tokens in 32 bits."""


@dataclass(frozen=True)
class DbsaOptions:
    """What a server does with blocks that leave its KV cache.

    Attributes:
        host_gb: host memory for blocks that are evicted, in GiB, of all ranks together: a block comes back from there
            by a copy. Left out, it is encoded again.

    Raises:
        ValueError: a value out of its range.
    """

    host_gb: float | None = None

    def __post_init__(self) -> None:
        if self.host_gb is not None and not 0 < self.host_gb < math.inf:
            raise ValueError(f"host_gb={self.host_gb}: expected more than 0 GiB")


@dataclass(frozen=True)
class Cascade:
    """Settings of a cascading cache.

    Attributes:
        window: tokens kept behind the sinks, a multiple of `cascades`.
        cascades: number of sub-caches (the paper: 4; 8 for passkeys); 1 is StreamingLLM.
        sinks: first tokens, never evicted and not counted in the window (the paper: 64).
        stride: tokens attended to and added together (section 3.1; the paper: 4,096 for passkeys, 1,024 for PG19, 512
            for LongBench). Strides begin at multiples of it, counted from the sequence's first token.
        beta: decay of the scores a query, at least 0 and below 1.
        score_every: one of so many queries counts in the scores (the paper: 1): that of the tokens n - 1, 2n - 1,
            ... of the sequence, with the decay of n queries. Fewer products for an average over fewer samples.
        head_reduction: how the attention of the query heads that share a score becomes one number, `mean` or `max`.
            It is reduced query by query, before the decayed sum, so that a score does not depend on how the queries
            were cut into strides.
        heads: `independent`, each key-value head keeps its own tokens (Appendix B: better), or `homogeneous`, one
            decision for all.
        selection: `false` drops what a sub-cache does not accept, whatever the scores (Table 3's ablation).

    Raises:
        ValueError: a value out of its range.
    """

    window: int
    cascades: int = 4
    sinks: int = 64
    stride: int = 4096
    beta: float = 0.9999
    score_every: int = 1
    head_reduction: str = field(default="mean", metadata={CHOICES: HEAD_REDUCTIONS})
    heads: str = field(default="independent", metadata={CHOICES: HEADS})
    selection: bool = True

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("cascades", 1), ("sinks", 0), ("stride", 1), ("score_every", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}")
        if self.score_every > MOST_QUERIES:
            raise ValueError(f"score_every={self.score_every}: expected at most {MOST_QUERIES}")
        if self.window % self.cascades:
            below = self.window // self.cascades * self.cascades
            raise ValueError(
                f"window={self.window}, cascades={self.cascades}: expected a multiple, sub-caches are of one size; "
                f"take window={below + self.cascades}" + (f" or {below}" if below else "")
            )
        if isinstance(self.beta, bool) or not isinstance(self.beta, (int, float)) or not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta!r}: expected a number of at least 0 and below 1; the paper takes 0.9999")
        if self.head_reduction not in HEAD_REDUCTIONS:
            raise ValueError(f"head_reduction={self.head_reduction!r}: expected one of {', '.join(HEAD_REDUCTIONS)}")
        if self.heads not in HEADS:
            raise ValueError(f"heads={self.heads!r}: expected one of {', '.join(HEADS)}")
        if not isinstance(self.selection, bool):
            raise ValueError(f"selection={self.selection!r}: expected True or False")

    @property
    def size(self) -> int:
        """Tokens a sub-cache."""
        return self.window // self.cascades

    @property
    def rings(self) -> Rings:
        """The sizes, as the kernels take them."""
        from sglang_ext.kernels.cascade_update import Rings  # imports torch

        return Rings(self.sinks, self.size, self.cascades, self.stride)

    @property
    def slots(self) -> int:
        """KV slots a request ever needs: sinks + window + stride."""
        return self.sinks + self.window + self.stride

    @property
    def token_span(self) -> int:
        """Tokens between the oldest kept and the newest, about: (W/c) (2^c - 1), eq. 4."""
        return self.size * (2**self.cascades - 1)

    @property
    def sparsity(self) -> float:
        """Share of the span that is not kept: 1 - W / span (section 3.2)."""
        return 1 - self.window / self.token_span

    @property
    def decay(self) -> float:
        """Of the scores, from a query that counts to the next."""
        return self.beta**self.score_every

    @property
    def keeps_scores(self) -> bool:
        """Whether scores decide anything: they choose what one sub-cache passes on to the next."""
        return self.cascades > 1 and self.selection

    @property
    def decides_together(self) -> bool:
        """Whether what a head keeps depends on other heads' scores."""
        return self.heads == "homogeneous" and self.keeps_scores

    def stride_at(self, token: int) -> int:
        """The first token of the stride in which a token of the sequence lies."""
        return token // self.stride * self.stride

    def counted(self, begin: int, end: int) -> range:
        """Those of the tokens [begin, end) of a sequence whose queries count in the scores."""
        return range(begin + (-begin - 1) % self.score_every, end, self.score_every)

    def lanes(self, kv_heads: int) -> int:
        """How many different token sets a layer keeps."""
        return kv_heads if self.heads == "independent" else 1

    def accepts(self, sub_cache: int, seen: int) -> bool:
        """Whether a sub-cache (0 = newest) accepts in the step that adds token number `seen` (counted from 1).

        Section 3.2 and Algorithm 2: `(seen - 1 - sinks) mod 2^i == 0`, and always while the window is not full.
        """
        step = seen - 1 - self.sinks
        return step < self.window or step % 2**sub_cache == 0

    def strides(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Cut the tokens [begin, end) of a sequence where strides end, at absolute multiples of `stride`."""
        cuts = range((begin // self.stride + 1) * self.stride, end, self.stride)
        bounds = [begin, *cuts, end]
        return [(a, b) for a, b in pairwise(bounds) if a < b]


@dataclass(frozen=True)
class CascadeOptions(Cascade):
    """`--policy` of `--attention-backend cascade`, and a request's: a cascade with sizes to begin with.

    Raises:
        ValueError: a value out of its range; more sub-caches than kernels take, also where there are none, so that what
            a server answers does not depend on its device.
    """

    window: int = 4096
    stride: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cascades > MAX_CASCADES:
            raise ValueError(
                f"cascades={self.cascades}: expected at most {MAX_CASCADES}, what kernels can hold; take fewer,"
                " larger sub-caches"
            )


@dataclass(frozen=True)
class StreamingLlmOptions(CascadeOptions):
    """`--policy` of `--attention-backend streaming_llm`: one sub-cache."""

    cascades: int = 1


@dataclass(frozen=True)
class DoubleP(Clustering):
    """What is kept and what is exact, beside how keys are clustered.

    Attributes:
        p1: estimated mass that stage 1 keeps, 0 < p1 <= 1 (Llama-3.1-8B 0.95, Qwen3-8B 0.99).
        p2: estimated mass computed token by token, 0 <= p2 <= p1 (Llama-3.1-8B 0.7, Qwen3-8B 0.8).
        tail: clusters outside stage 1 are left out (`drop`) or approximated too (`centroid`: the other reading of
            equation 8).
        group: heads that read one key-value head share one set: the `union` of their sets, or the set of their `mean`
            probability.
    """

    p1: float = 0.95
    p2: float = 0.7
    tail: str = field(default="drop", metadata={CHOICES: TAILS})
    group: str = field(default="union", metadata={CHOICES: GROUPS})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.p1 <= 1 and 0 <= self.p2 <= self.p1):
            raise ValueError(f"p1={self.p1}, p2={self.p2}: expected 0 < p1 <= 1 and 0 <= p2 <= p1")
        for name, value, allowed in (("tail", self.tail, TAILS), ("group", self.group, GROUPS)):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(allowed)}")

    @property
    def stages(self) -> tuple[float, float]:
        """(p1, p2) for the kernels: approximating the whole tail is a first stage that keeps everything."""
        return (1.0 if self.tail == "centroid" else self.p1), self.p2


@dataclass(frozen=True)
class Quest:
    """How pages are cut and how many are read.

    Attributes:
        page: tokens of a page.
        budget: share of the tokens that is read.
    """

    page: int = 16
    budget: float = 0.25

    def __post_init__(self) -> None:
        if self.page < 1 or not 0 < self.budget <= 1:
            raise ValueError(f"page={self.page}, budget={self.budget}: expected at least 1 and 0 < budget <= 1")

    def pages(self, tokens: int) -> int:
        """How many pages of so many tokens are read: at least one, rounded up."""
        return min(-(-tokens // self.page), max(1, math.ceil(self.budget * tokens / self.page - 1e-9)))


@dataclass(frozen=True)
class QuestOptions(Middle):
    """How pages are cut and how many are read; pages begin behind the sinks.

    Attributes:
        page: tokens of a page.
        budget: share of the middle tokens that is read.
    """

    page: int = Quest.page
    budget: float = Quest.budget

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pages  # noqa: B018  its own checks

    @property
    def pages(self) -> Quest:
        return Quest(self.page, self.budget)


@dataclass(frozen=True)
class RetroInfer:
    """How many clusters are exact and approximated.

    Attributes:
        exact: share of the clusters computed token by token (its authors: 1.8%).
        approx: share of the clusters computed by their centroid (23.2%).
    """

    exact: float = 0.018
    approx: float = 0.232

    def __post_init__(self) -> None:
        if not (self.exact >= 0 and self.approx >= 0 and self.exact + self.approx <= 1):  # NaN is neither
            raise ValueError(f"exact={self.exact}, approx={self.approx}: expected shares that sum to at most 1")

    def budgets(self, clusters: int) -> tuple[int, int]:
        """(clusters kept, clusters of them exact) out of so many non-empty ones; rounded up."""
        # Less 1e-9: a product that should be whole must not be rounded up for its last bit.
        exact = math.ceil(self.exact * clusters - 1e-9)
        return max(exact, math.ceil((self.exact + self.approx) * clusters - 1e-9)), exact


@dataclass(frozen=True)
class RetroInferOptions(Clustering):
    """How many clusters are exact and approximated, beside how keys are clustered.

    Attributes:
        exact: share of the clusters computed token by token.
        approx: share of the clusters computed by their centroid.
    """

    exact: float = RetroInfer.exact
    approx: float = RetroInfer.approx

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budgets  # noqa: B018  its own checks

    @property
    def budgets(self) -> RetroInfer:
        return RetroInfer(self.exact, self.approx)


@dataclass(frozen=True)
class Twilight:
    """Candidates and what is kept of them.

    Attributes:
        p: share of the candidates' estimated mass.
        candidates: how the candidates are chosen; the recommended budget is 25%.
        estimate: `int4` quantised keys, or `exact` logits.
        group: one set a group of heads: the `union` of its heads' sets, or the set of their `mean` probability.
    """

    p: float = 0.95
    candidates: Quest = field(default_factory=Quest)
    estimate: str = "int4"
    group: str = "union"

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"p={self.p}: expected 0 < p <= 1")
        if self.estimate not in ESTIMATES or self.group not in GROUPS:
            raise ValueError(
                f"estimate={self.estimate!r}, group={self.group!r}: expected one of {', '.join(ESTIMATES)}, "
                f"and one of {', '.join(GROUPS)}"
            )


@dataclass(frozen=True)
class TwilightOptions(QuestOptions):
    """What is kept of the candidates, which are Quest's.

    Attributes:
        p: share of the candidates' estimated mass.
        estimate: `int4` quantised keys, or `exact` logits.
        group: one set a group of heads: the `union` of its heads' sets, or the set of their `mean` probability.
    """

    p: float = Twilight.p
    estimate: str = field(default=Twilight.estimate, metadata={CHOICES: ESTIMATES})
    group: str = field(default=Twilight.group, metadata={CHOICES: GROUPS})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokens  # noqa: B018  its own checks

    @property
    def tokens(self) -> Twilight:
        return Twilight(self.p, self.pages, self.estimate, self.group)
