"""KV slots in pages on a machine without a GPU, where SGLang would ask Triton for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, alloc_extend_naive


class TorchPages(PagedTokenToKVPoolAllocator):
    """SGLang's allocator of pages, with what it has in plain PyTorch.

    Attributes:
        free_pages: [pages] integer, those that nobody has.
    """

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """KV slots of columns [prefix_lens, seq_lens) of each request; None where too few pages are free.

        Args:
            prefix_lens, seq_lens: [requests] integer; each also on the host.
            last_loc: [requests] integer, KV slot of the column before.
            extend_num_tokens: all new columns together.
            num_new_pages: that they need, where it is known.

        Returns:
            [extend_num_tokens] int64.
        """
        ends, begins = (-(-lengths // self.page_size) for lengths in (seq_lens, prefix_lens))
        needed = int((ends - begins).sum())
        if needed > len(self.free_pages):
            self.merge_and_sort_free()
        if needed > len(self.free_pages):
            return None
        slots = torch.empty(extend_num_tokens, dtype=torch.int64)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, slots, self.page_size, "cpu")
        self.free_pages = self.free_pages[needed:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """The KV slot of the last column of each request; arguments and result as of `alloc_extend`."""
        before = seq_lens - 1, seq_lens_cpu - 1
        return self.alloc_extend(*before, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))


def around_last_slot(
    original: Callable[..., torch.Tensor], table: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """AROUND get_last_loc: the KV slot of each request's last column, -1 where it has none.

    Args:
        table: [rows, columns] int32, KV slot of each column.
        requests: [requests] integer, rows of the table.
        lengths: [requests] integer.

    Returns:
        [requests], in `lengths`' dtype.
    """
    if table.device.type != "cpu":
        return original(table, requests, lengths)
    last = table[requests, (lengths - 1).clamp(min=0)].to(lengths.dtype)
    return torch.where(lengths > 0, last, -1)
