"""Quest with token top-p (Twilight) over the rows of ``sglang-ext bench double_p``, in Double-P's kernels.

Pages are scored as clusters are, by centroids of twice the components; the first pages by the best score of a group are
candidates. Their tokens are estimated from 4-bit keys and then treated as clusters of one token each: the same
selection, the same attention. What is added is small: `kernels.candidates`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang_ext.kernels.candidates import QuantisedKeys, token_scores
from sglang_ext.kernels.candidates import triton_impl as candidates
from sglang_ext.kernels.cluster_attention import ClusterPool, ClusterReads, ClusterRows, DenseTokens
from sglang_ext.kernels.cluster_attention import triton_impl as attention
from sglang_ext.kernels.cluster_attention.types import ClusterWorkspace
from sglang_ext.kernels.top_p import SearchedClusters, Selection, SetRule, dispatch
from sglang_ext.kernels.top_p import select as select_by_sorting
from sglang_ext.kernels.top_p.types import TopPWorkspace
from sglang_ext.launch.bench._double_p_rows import WIDTH, CachedRows, ClusteredLayer, true_logits
from sglang_ext.launch.bench._double_p_step import EDGE, TOLERANCE, difference, relative_error, tunings
from sglang_ext.policies import quest

ORDER = 64.0
"""Pages are ordered by their scores over this: exponentials of scores far below the best must not become 0."""

EXPANDING = 64
"""Programs that write a row's slots out: lists of single tokens are sixteen times as long as lists of clusters."""


BEST_PAGES = SetRule(by_count=True)
"""Candidates are so many pages, by the best score of a group: its heads are one here."""

TOKEN_EDGE = 0.03
"""As `EDGE`: of up to 65,000 single tokens the rounded masses, each of a unit of 2^-30, sum up to more."""


@dataclass(frozen=True)
class PagedLayer:
    """Caches of one layer, bounds of its pages and its 4-bit keys.

    Attributes:
        keys, values: as in `ClusteredLayer`.
        pool: pages as clusters; bounds stand where centroids do, and there are no mean values.
        quantised: 4-bit keys.
    """

    keys: torch.Tensor
    values: torch.Tensor
    pool: ClusterPool
    quantised: QuantisedKeys


@dataclass(frozen=True)
class Pages:
    """How the middle tokens of every row are cut; what is left behind the last whole page is read like the window.

    Attributes:
        page: tokens of a page.
        count: pages of a row.
        begin, end: their tokens.
    """

    page: int
    count: int
    begin: int
    end: int

    @classmethod
    def of(cls, rows: CachedRows, page: int) -> Pages:
        count = (rows.end - rows.begin) // page
        if count < 1:
            raise ValueError(f"rows of {rows.length} tokens: expected a page of {page} between sinks and window")
        return cls(page, count, rows.begin, rows.begin + count * page)

    @property
    def tiles(self) -> int:
        """Tiles of a row's pages."""
        return -(-self.count // WIDTH)


def paged(rows: CachedRows, batch: int, copies: Sequence[ClusteredLayer], pages: Pages) -> list[PagedLayer]:
    """The same layers with their pages; bounds and 4-bit keys are copied where the layers were."""
    shape, device = rows.shape, rows.device
    tokens, filled = pages.end - pages.begin, pages.tiles * WIDTH
    pool = ClusterPool(
        centroids=torch.zeros(
            batch * pages.tiles, shape.kv_heads, WIDTH, 2 * shape.head_dim, dtype=shape.dtype, device=device
        ),
        values=torch.zeros(1, shape.kv_heads, WIDTH, shape.value_dim, dtype=shape.dtype, device=device),
        sizes=torch.zeros(batch * pages.tiles, shape.kv_heads, WIDTH, dtype=torch.int32, device=device),
        starts=torch.zeros(batch * pages.tiles, shape.kv_heads, WIDTH, dtype=torch.int32, device=device),
        members=torch.empty(shape.kv_heads, batch * tokens, dtype=torch.int32, device=device),
    )
    number = torch.arange(filled, dtype=torch.int32, device=device)
    for row in range(batch):
        first = row * rows.length + pages.begin
        bounds = quest.page_bounds(rows.keys[first : first + tokens].transpose(0, 1), pages.page)
        both = torch.zeros(shape.kv_heads, filled, 2 * shape.head_dim, dtype=shape.dtype, device=device)
        both[:, : pages.count] = quest.as_centroids(*bounds)
        places = slice(row * pages.tiles, (row + 1) * pages.tiles)
        pool.centroids[places] = both.unflatten(1, (-1, WIDTH)).transpose(0, 1)
        pool.sizes[places] = torch.where(number < pages.count, pages.page, 0).int().view(-1, 1, WIDTH)
        pool.starts[places] = (row * tokens + number * pages.page).view(-1, 1, WIDTH)
        pool.members[:, row * tokens : (row + 1) * tokens] = torch.arange(first, first + tokens, device=device).int()
    quantised = QuantisedKeys.of(rows.keys[: batch * rows.length])
    return [
        PagedLayer(
            layer.keys,
            layer.values,
            replace(pool, centroids=pool.centroids.clone(), members=pool.members.clone()),
            QuantisedKeys(quantised.codes.clone(), quantised.ranges.clone()),
        )
        for layer in copies
    ]


class QuestTopP:
    """One layer of a decoding step: `budget` pages of each row and head, then top-p over their tokens.

    Args:
        rows, batch: the rows.
        copies: from `paged`.
        pages: as given to `paged`.
        budget: pages that are candidates.
        p: of the candidates' estimated mass; 1 reads all candidates.
    """

    def __init__(
        self, rows: CachedRows, batch: int, copies: Sequence[PagedLayer], pages: Pages, budget: int, p: float
    ) -> None:
        if not 0 < budget <= pages.count:
            raise ValueError(f"{budget} pages of {pages.count}: expected at least one and at most all")
        self.planted, self.batch, self.copies, self.pages = rows, batch, copies, pages
        self.budget, self.p, self.rule = budget, p, SetRule(rows.config.group)
        shape, device = rows.shape, rows.device
        how, self.search = tunings(device)
        self.tuning = replace(how, expanding=EXPANDING if device.type == "cuda" else how.expanding)

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device).expand(batch, -1).contiguous()

        every = torch.arange(batch * pages.tiles, dtype=torch.int32, device=device).view(batch, pages.tiles)
        self.clusters = ClusterRows(every, ints(pages.tiles).flatten())
        cells = pages.tiles * WIDTH
        self.page_budget = ints(0, budget).float()
        # Tokens of the candidates, as many as tiles hold; and so many that every budget runs the same compiled kernels.
        least = self.search.chunk if device.type == "cuda" else 1
        self.room = -(-max(budget * pages.page, least) // WIDTH) * WIDTH
        self.tokens = ClusterRows(ints(*[0] * (self.room // WIDTH)), ints(self.room // WIDTH).flatten())
        self.token_p = ints(0, 0).float() + p
        base = torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(-1) * rows.length
        own = torch.cat([torch.arange(pages.begin), torch.arange(pages.end, rows.length)]).int().to(device)
        self.dense = DenseTokens((base + own).contiguous(), ints(len(own)).flatten())

        heads = (batch, shape.kv_heads)
        self.query = rows.queries()[:batch].contiguous()
        self._bounds = torch.empty(batch, shape.heads, 2 * shape.head_dim, dtype=shape.dtype, device=device)
        self._page_logits = torch.empty(*heads, shape.group, cells, dtype=torch.float32, device=device)
        self._best = torch.empty(*heads, 1, cells, dtype=torch.float32, device=device)
        self._page_clusters = SearchedClusters(
            torch.empty(*heads, cells, dtype=torch.int32, device=device),
            torch.empty(*heads, cells, dtype=torch.int32, device=device),
            ints(cells).flatten(),
        )
        self._candidates = Selection.empty(*heads, cells, device)
        self._page_search = TopPWorkspace.empty(*heads, 1, cells, device)
        self._token_scores = (
            torch.empty(*heads, shape.group, self.room, dtype=torch.float32, device=device),
            torch.empty(*heads, self.room, dtype=torch.int32, device=device),
            torch.empty(*heads, self.room, dtype=torch.int32, device=device),
            torch.empty(batch, dtype=torch.int32, device=device),
        )
        self._token_clusters = SearchedClusters(*self._token_scores[1:])
        self._chosen = Selection.empty(*heads, self.room, device)
        self._token_search = TopPWorkspace.empty(*heads, shape.group, self.room, device)
        self._workspace = ClusterWorkspace.empty(
            *heads, shape.group, shape.value_dim, self.room, self.room, device, self.tuning
        )
        self._out = (
            torch.empty(batch, shape.heads, shape.value_dim, dtype=shape.dtype, device=device),
            torch.empty(batch, shape.heads, dtype=torch.float32, device=device),
        )

    def run(self, turn: int = 0) -> torch.Tensor:
        """[batch, heads, value_dim], the same memory at every call."""
        layer, scale = self.copies[turn], self.planted.scale
        bounds = candidates.bounds_query(self.query, self._bounds).unsqueeze(1)
        attention.centroid_scores(
            bounds, layer.pool, self.clusters, scale / ORDER,
            out=(self._page_logits, self._page_clusters.sizes, self._page_clusters.starts), tuning=self.tuning,
        )  # fmt: skip
        torch.amax(self._page_logits, 2, keepdim=True, out=self._best)
        dispatch.select(
            self._best, self._page_clusters, self.page_budget, rule=BEST_PAGES, out=self._candidates,
            workspace=self._page_search, tuning=self.search,
        )  # fmt: skip
        logits, *_ = candidates.token_scores(
            self.query, layer.quantised, layer.pool.members, self._candidates, self.pages.page, self.room, scale,
            out=self._token_scores,
        )  # fmt: skip
        dispatch.select(
            logits, self._token_clusters, self.token_p, rule=self.rule, out=self._chosen, workspace=self._token_search,
            tuning=self.search,
        )  # fmt: skip
        attention.cluster_attention(
            self.query.unsqueeze(1), layer.keys, layer.values, layer.pool,
            ClusterReads(self.tokens, self.dense, self._chosen, logits), scale, out=self._out,
            workspace=self._workspace, tuning=self.tuning,
        )  # fmt: skip
        return self._out[0]

    def kept(self, row: int) -> torch.Tensor:
        """[kv_heads, length] bool: the tokens of a row that the last run read, all exactly."""
        rows, pages, chosen = self.planted, self.pages, self._chosen.of(slice(row, row + 1))
        kept = torch.zeros(rows.shape.kv_heads, rows.length, dtype=torch.bool, device=rows.device)
        kept[:, : pages.begin] = kept[:, pages.end :] = True
        first = row * (pages.end - pages.begin)
        for head in range(rows.shape.kv_heads):
            listed = int(chosen.counts[0, head, 0])
            member = chosen.prefix[0, head, :listed].long() + chosen.shift[0, head, :listed].long()
            kept[head, pages.begin + member - first] = True
        return kept

    def check(self) -> dict[str, float]:
        """Errors of the last row against the references, of the largest value or of the pages and tokens.

        Raises:
            ValueError: one of them is larger than `TOLERANCE`, `EDGE` or `TOKEN_EDGE`; nothing is timed then.
        """
        out, rows, pages, last = self.run(), self.planted, self.pages, self.batch - 1
        layer, shape = self.copies[0], self.planted.shape
        query = self.query[last].double()
        first = last * rows.length
        keys = layer.keys[first : first + rows.length].transpose(0, 1).double()
        values = layer.values[first : first + rows.length].transpose(0, 1).double()
        grouped = query.view(shape.kv_heads, -1, shape.head_dim)
        scores = quest.page_scores(grouped, *quest.page_bounds(keys[:, pages.begin : pages.end], pages.page))
        best = self._best[last, :, 0, : pages.count] - math.log(pages.page)  # all pages are of one size
        errors = {"page scores": relative_error(best, scores.amax(1) * rows.scale / ORDER)}
        cells = self._page_clusters.cells[last:].cpu()
        in_pages = SearchedClusters(self._page_clusters.sizes[last:], self._page_clusters.starts[last:], cells)
        page_budget = self.page_budget[last:].double()
        sorted_pages = select_by_sorting(self._best[last:].double(), in_pages, page_budget, rule=BEST_PAGES)
        candidate = self._candidates.of(slice(last, last + 1))
        errors["pages"] = difference(candidate, sorted_pages, int(cells))
        queried, members = self.query[last:].double(), layer.pool.members
        wanted = token_scores(queried, layer.quantised, members, candidate, pages.page, self.room, rows.scale)
        logits, sizes, starts, counts = (x[last:] for x in self._token_scores)
        n = int(counts)
        errors["token scores"] = relative_error(logits[..., :n], wanted[0][..., :n])
        wrong = n != int(wanted[3]) or bool((starts[..., :n] != wanted[2][..., :n]).any())
        errors["places"] = float(wrong)
        p = self.token_p[last:].double()
        in_tokens = SearchedClusters(sizes, starts, counts)
        sorted_tokens = select_by_sorting(logits.double(), in_tokens, p, rule=self.rule)
        errors["tokens"] = difference(self._chosen.of(slice(last, last + 1)), sorted_tokens, self.room)
        x = torch.einsum("hgd,hnd->hgn", grouped, keys) * rows.scale
        nothing = x[..., :0], values[:, :0]
        whole = quest.attend(x, values, self.kept(last), *nothing)
        errors["output"] = relative_error(out[last].view_as(whole), whole)
        limits = {"pages": EDGE, "tokens": TOKEN_EDGE, "places": 0.0}
        for name, error in errors.items():
            if not error <= (most := limits.get(name, TOLERANCE)):
                raise ValueError(
                    f"Quest+top-p: the kernels' {name} are wrong by {error:.2g} (at most {most}): not timed"
                )
        return errors

    def shares(self, sampled: int = 4) -> dict[str, float]:
        """As `ClusterBenchStep.shares`; nothing is approximated, `candidates` is the budget's share of the pages."""
        self.run()
        rows, pages = self.planted, self.pages
        mass, exact = [], []
        for row in sorted({round(n) for n in np.linspace(0, self.batch - 1, min(sampled, self.batch))}):
            kept = self.kept(row)
            weights = torch.softmax(true_logits(rows, self.query, row), -1)
            mass.append((weights * kept.unsqueeze(1)).sum(-1).flatten())
            exact.append(kept[:, pages.begin : pages.end].double().mean())
        recovered, share = torch.cat(mass), float(torch.stack(exact).mean())
        return {
            "exact": share,
            "approx": 0.0,
            "kept_tokens": share,
            "candidates": self.budget / pages.count,
            "recovered": float(recovered.mean()),
            "recovered_p5": float(recovered.quantile(0.05)),
            "recovered_least": float(recovered.min()),
            "read_p5": float(recovered.quantile(0.05)),
        }
