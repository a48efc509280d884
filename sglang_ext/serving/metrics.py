"""Counters and times of pools, on SGLang's own /metrics.

SGLang runs Prometheus in multiprocess mode: a metric may only be created after SGLang has set the folder that the
processes share, so each process creates its own when it first has something to say.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sglang_ext import compat
from sglang_ext.names import TokenizerManager

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

    from sglang_ext.settings import ServerSettings

M = TypeVar("M", "Counter", "Gauge", "Histogram")

POOL = "pool"  # the label that names one
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


class _Metrics(NamedTuple):
    requests: Counter
    stitched: Counter
    reencoded: Counter
    missed: Counter
    headers: Counter
    retrieval: Histogram
    encoding: Counter
    pools: Gauge
    tokens: Gauge
    blocks: Gauge


@functools.cache
def _created(labels: tuple[str, ...]) -> _Metrics:
    """The metrics of this process, whose values are told apart by `labels`; Prometheus takes each name once."""
    from prometheus_client import Counter, Gauge, Histogram

    return _Metrics(
        requests=Counter("sglang_ext:pool_requests", "Requests answered over a pool.", labels),
        stitched=Counter("sglang_ext:stitched_tokens", "Prompt tokens taken from demonstration blocks.", labels),
        reencoded=Counter(
            "sglang_ext:reencoded_blocks",
            "Blocks that were encoded because of a request: evicted ones, and those behind a chat's header.",
            labels,
        ),
        missed=Counter(
            "sglang_ext:missed_blocks", "Blocks that a request had selected and that had to be encoded again.", labels
        ),
        headers=Counter("sglang_ext:pool_headers", "Headers of chats' own that a pool was laid out behind.", labels),
        retrieval=Histogram(
            "sglang_ext:retrieval_seconds", "Time to select a request's blocks.", labels, buckets=_SECONDS
        ),
        encoding=Counter("sglang_ext:encoding_seconds", "Time spent creating and changing pools.", labels),
        pools=Gauge(
            "sglang_ext:num_pools",
            "Pools that are served.",
            [label for label in labels if label != POOL],
            multiprocess_mode="mostrecent",
        ),
        tokens=Gauge(
            "sglang_ext:pool_tokens", "Tokens in the blocks of pools.", labels, multiprocess_mode="mostrecent"
        ),
        blocks=Gauge("sglang_ext:pool_blocks", "Blocks of pools.", labels, multiprocess_mode="mostrecent"),
    )


class TokenizerMetrics:
    """What the tokenizer process counts of one tenant's pools; nothing unless the server runs with --enable-metrics.

    /metrics wants no key of most servers, so pools are named there only where the operator says so (`by_pool`). Else
    there is one figure for all of them together.

    Args:
        labels: what every value is labelled with.
        by_pool: whether pools are named beside them.
    """

    def __init__(self, enabled: bool, labels: Mapping[str, str], by_pool: bool = False) -> None:
        self.enabled, self.by_pool = enabled, by_pool
        self._labels = dict(labels)
        self._sizes: dict[str, tuple[int, int]] = {}  # pool -> its tokens and blocks

    @property
    def _metrics(self) -> _Metrics:
        return _created((*self._labels, POOL) if self.by_pool else tuple(self._labels))

    def _of(self, metric: M, pool: str) -> M:
        return metric.labels(**self._labels, pool=pool) if self.by_pool else metric.labels(**self._labels)

    def answered(self, pool: str, stitched: int, seconds: float) -> None:
        """A request was composed over `pool`."""
        if self.enabled:
            self._of(self._metrics.requests, pool).inc()
            self._of(self._metrics.stitched, pool).inc(stitched)
            self._of(self._metrics.retrieval, pool).observe(seconds)

    def reencoded(self, pool: str, blocks: int, missed: int) -> None:
        """Blocks of `pool` are encoded for a request, which had selected `missed` of them."""
        if self.enabled:
            self._of(self._metrics.reencoded, pool).inc(blocks)
            self._of(self._metrics.missed, pool).inc(missed)

    def laid_out(self, pool: str) -> None:
        """`pool` is served behind one more header of chats' own."""
        if self.enabled:
            self._of(self._metrics.headers, pool).inc()

    def changed(self, pool: str, tokens: int, blocks: int, seconds: float) -> None:
        """A pool is ready, after `seconds`; zero tokens and blocks when it was deleted."""
        if not self.enabled:
            return
        self._sizes[pool] = (tokens, blocks)
        if not self.by_pool:
            tokens, blocks = (sum(size[place] for size in self._sizes.values()) for place in (0, 1))
        if not self._sizes[pool][1]:
            del self._sizes[pool]
        self._metrics.pools.labels(**self._labels).set(len(self._sizes))
        self._of(self._metrics.tokens, pool).set(tokens)
        self._of(self._metrics.blocks, pool).set(blocks)
        self._of(self._metrics.encoding, pool).inc(seconds)


class _TenantCounters(NamedTuple):
    requests: Counter
    prompt_tokens: Counter
    generated_tokens: Counter
    refused: Counter
    running: Gauge


@functools.cache
def _tenant_counters(labels: tuple[str, ...]) -> _TenantCounters:
    from prometheus_client import Counter, Gauge

    return _TenantCounters(
        requests=Counter("sglang_ext:tenant_requests", "Answers that were begun.", labels),
        prompt_tokens=Counter("sglang_ext:tenant_prompt_tokens", "Tokens of prompts, blocks among them.", labels),
        generated_tokens=Counter("sglang_ext:tenant_generated_tokens", "Tokens of answers.", labels),
        refused=Counter("sglang_ext:tenant_refused", "Requests that a quota refused.", labels),
        running=Gauge("sglang_ext:tenant_running", "Answers under way.", labels, multiprocess_mode="mostrecent"),
    )


class TenantMetrics:
    """What the tokenizer process counts of one tenant's requests; nothing unless the server runs with --enable-metrics.

    Args:
        labels: what every value is labelled with, the tenant among them.
    """

    def __init__(self, enabled: bool, labels: Mapping[str, str]) -> None:
        self.enabled, self._labels = enabled, dict(labels)

    @property
    def _counters(self) -> _TenantCounters:
        return _tenant_counters(tuple(self._labels))

    def _of(self, metric: M) -> M:
        return metric.labels(**self._labels)

    def running(self, answers: int) -> None:
        """So many answers are under way."""
        if self.enabled:
            self._of(self._counters.running).set(answers)

    def begun(self, answers: int, running: int) -> None:
        """So many more answers were begun, and so many are under way with them."""
        if self.enabled:
            self._of(self._counters.requests).inc(answers)
        self.running(running)

    def refused(self) -> None:
        """A quota refused a request."""
        if self.enabled:
            self._of(self._counters.refused).inc()

    def answered(self, prompt_tokens: int, generated_tokens: int) -> None:
        """An answer is complete."""
        if self.enabled:
            self._of(self._counters.prompt_tokens).inc(prompt_tokens)
            self._of(self._counters.generated_tokens).inc(generated_tokens)


def labels_of(manager: TokenizerManager, settings: ServerSettings, tenant: str) -> dict[str, str]:
    """What a server's values are labelled with: those of a server without tenants name none."""
    model = {"model_name": compat.resolved(manager.server_args).served_model_name}
    return {**model, "tenant": tenant} if settings.tenants else model


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
                    f"{name.replace('_', ' ').capitalize()}, as the scheduler counts them.",
                    ["model_name"],
                    multiprocess_mode="mostrecent",
                )
                self._gauges[name] = gauge.labels(model_name=self.model)
            self._gauges[name].set(value)
