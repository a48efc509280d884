"""Counters and times of pools, on SGLang's own /metrics.

SGLang runs Prometheus in multiprocess mode: a metric may only be created after SGLang has set the folder that the
processes share, so each process creates its own when it first has something to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

M = TypeVar("M", "Counter", "Gauge", "Histogram")

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


class _Metrics(NamedTuple):
    requests: Counter
    stitched: Counter
    reencoded: Counter
    retrieval: Histogram
    encoding: Counter
    pools: Gauge
    tokens: Gauge
    blocks: Gauge


class TokenizerMetrics:
    """What the tokenizer process counts; does nothing unless the server runs with --enable-metrics.

    /metrics wants no key, so pools are named there only where the operator says so (`by_pool`). Else there is one
    figure for all of them together.
    """

    def __init__(self, enabled: bool, model: str, by_pool: bool = False) -> None:
        self.enabled = enabled
        self.model = model
        self.by_pool = by_pool
        self._sizes: dict[str, tuple[int, int]] = {}  # pool -> its tokens and blocks

    @cached_property
    def _metrics(self) -> _Metrics:
        from prometheus_client import Counter, Gauge, Histogram

        labels = ["model_name", "pool"] if self.by_pool else ["model_name"]
        return _Metrics(
            requests=Counter("sglang_ext:pool_requests", "Requests answered over a pool.", labels),
            stitched=Counter("sglang_ext:stitched_tokens", "Prompt tokens taken from demonstration blocks.", labels),
            reencoded=Counter("sglang_ext:reencoded_blocks", "Evicted blocks that were encoded again.", labels),
            retrieval=Histogram(
                "sglang_ext:retrieval_seconds", "Time to select a request's blocks.", labels, buckets=_SECONDS
            ),
            encoding=Counter("sglang_ext:encoding_seconds", "Time spent creating and changing pools.", labels),
            pools=Gauge(
                "sglang_ext:num_pools", "Pools that are served.", ["model_name"], multiprocess_mode="mostrecent"
            ),
            tokens=Gauge(
                "sglang_ext:pool_tokens", "Tokens in the blocks of pools.", labels, multiprocess_mode="mostrecent"
            ),
            blocks=Gauge("sglang_ext:pool_blocks", "Blocks of pools.", labels, multiprocess_mode="mostrecent"),
        )

    def _of(self, metric: M, pool: str) -> M:
        labels = {"model_name": self.model, "pool": pool} if self.by_pool else {"model_name": self.model}
        return metric.labels(**labels)

    def answered(self, pool: str, stitched: int, seconds: float) -> None:
        """A request was composed over `pool`."""
        if self.enabled:
            self._of(self._metrics.requests, pool).inc()
            self._of(self._metrics.stitched, pool).inc(stitched)
            self._of(self._metrics.retrieval, pool).observe(seconds)

    def reencoded(self, pool: str, blocks: int) -> None:
        """Blocks of `pool` were missing and are encoded again."""
        if self.enabled:
            self._of(self._metrics.reencoded, pool).inc(blocks)

    def changed(self, pool: str, tokens: int, blocks: int, seconds: float) -> None:
        """A pool is ready, after `seconds`; zero tokens and blocks when it was deleted."""
        if not self.enabled:
            return
        self._sizes[pool] = (tokens, blocks)
        if not self.by_pool:
            tokens, blocks = (sum(size[place] for size in self._sizes.values()) for place in (0, 1))
        if not self._sizes[pool][1]:
            del self._sizes[pool]
        self._metrics.pools.labels(model_name=self.model).set(len(self._sizes))
        self._of(self._metrics.tokens, pool).set(tokens)
        self._of(self._metrics.blocks, pool).set(blocks)
        self._of(self._metrics.encoding, pool).inc(seconds)


class SchedulerMetrics:
    """What a scheduler process shows: the counters of the server's mode as gauges."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._gauges: dict[str, Gauge] = {}

    def show(self, values: Mapping[str, float]) -> None:
        """Set every gauge to its current value."""
        from prometheus_client import Gauge

        for name, value in values.items():
            if name not in self._gauges:
                gauge = Gauge(
                    f"sglang_ext:{name}",
                    f"{name.replace('_', ' ').capitalize()}, of the scheduler's block cache.",
                    ["model_name"],
                    multiprocess_mode="mostrecent",
                )
                self._gauges[name] = gauge.labels(model_name=self.model)
            self._gauges[name].set(value)
