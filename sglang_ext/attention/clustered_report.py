"""What the kernels chose, measured against dense attention: `attention_report` where clusters lie in a pool.

The same figures as those of plain PyTorch (`attention.sparse`), of the sets that the kernels themselves wrote down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.attention.clustered import Placed, columns_of
from sglang_ext.attention.policy import Caches, RequestRows
from sglang_ext.attention.sparse import grouped, measure
from sglang_ext.cache.cluster_pool import ClusterMemory, Place
from sglang_ext.kernels.top_p import Selection
from sglang_ext.types import JsonObject


@dataclass(frozen=True)
class Read:
    """A run of clusters as a decoding row reads it.

    Attributes:
        place: where the run is.
        cells: tiles that say the sizes, one for each tile of the run.
        placed: where the row has it.
    """

    place: Place
    cells: tuple[int, ...]
    placed: Placed


@dataclass(frozen=True)
class MeasuredRow:
    """One row of a decoding step that wants to be measured.

    Attributes:
        at: its number in the batch.
        note: where its figures go.
        rows: the step; `slot_pos` holds the positions of slots of measured rows only.
        read: its clusters, in the order in which the kernels list them.
    """

    at: int
    note: JsonObject
    rows: RequestRows
    read: Sequence[Read]

    def measure(self, caches: Caches, query: torch.Tensor, selection: Selection, memory: ClusterMemory) -> None:
        """Add one layer's figures to the note; waits for the device.

        Args:
            caches: of the layer.
            query: [batch, heads, head_dim] of the whole batch, each rotated at its own position.
            selection: what the kernels chose in this layer, of the whole batch.
            memory: the clusters.
        """
        heads = grouped(query[self.at : self.at + 1], caches)
        labels = torch.full((heads.shape[0], self.rows.end), -1, device=heads.device)
        clusters, whole = 0, torch.zeros(heads.shape[0], dtype=torch.int64, device=heads.device)
        for each in self.read:
            own, sizes = memory.labels(caches.layer, each.place, each.cells)
            begin, end, zero = each.placed.begin, each.placed.end, each.placed.column
            own = own[:, begin - zero : end - zero]
            labels[:, begin:end] = torch.where(own < 0, own, own + clusters)
            clusters += sizes.shape[1]
            whole += (sizes > 0).sum(1)
        labels = torch.where(labels < 0, clusters, labels)
        counts = selection.counts[self.at].long()
        exact = _listed(selection.exact[self.at], counts[:, 0], clusters)
        approximated = _listed(selection.approx[self.at], counts[:, 2], clusters)
        read = columns_of(labels, exact, others=True)
        kept = read | columns_of(labels, approximated, others=False)
        measure(self.note, self.rows, caches, heads, read, kept, counts[:, 2] / whole.clamp(min=1))


def _listed(numbers: torch.Tensor, counts: torch.Tensor, clusters: int) -> torch.Tensor:
    """[kv_heads, clusters] bool: whether a cluster is among the first `counts` of each head's list."""
    valid = torch.arange(numbers.shape[1], device=numbers.device) < counts.unsqueeze(1)
    found = torch.zeros(numbers.shape[0], clusters + 1, dtype=torch.bool, device=numbers.device)
    # What lies behind the counts is stale, and may be any number.
    return found.scatter_(1, torch.where(valid, numbers, clusters).long(), True)[:, :clusters]
