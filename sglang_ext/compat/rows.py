"""The new rows of a batch, as SGLang counts them in each kind of pass."""

from __future__ import annotations

import copy
from typing import Any

import torch

from sglang_ext.compat.line import resolved


def new_rows(forward_batch: Any) -> list[tuple[int, int]]:
    """(columns before a pass, columns that it adds) of each request of a batch."""
    if forward_batch.extend_seq_lens_cpu is not None:
        return list(zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True))
    lengths = forward_batch.seq_lens_cpu.tolist()
    if forward_batch.forward_mode.is_target_verify():  # SGLang counts the rows that it verifies once they hold
        return [(length, forward_batch.spec_info.draft_token_num) for length in lengths]
    return [(length - 1, 1) for length in lengths]


def step_tokens(server_args: Any) -> int:
    """Tokens that a decoding step gives a request at most."""
    given = resolved(server_args)
    return 1 if given.speculative_algorithm is None else int(given.speculative_num_draft_tokens)


def as_prompt(forward_batch: Any) -> Any:
    """The same batch, a verification, as prompts of which so many tokens are new."""
    if not forward_batch.forward_mode.is_target_verify():
        return forward_batch
    found, before = copy.copy(forward_batch), forward_batch.seq_lens
    found.extend_prefix_lens = before
    found.extend_seq_lens = torch.full_like(before, forward_batch.spec_info.draft_token_num)
    found.seq_lens = before + found.extend_seq_lens
    return found
