"""Servers that have no pools, and why."""

from __future__ import annotations

from sglang_ext import compat
from sglang_ext.names import TokenizerManager
from sglang_ext.serving.checks import page_size_of
from sglang_ext.systems.registry import systems


def no_pools(manager: TokenizerManager) -> str:
    """Why a server with one of our attention backends has no pools, in words for users; empty where it has some."""
    chosen = manager.server_args.attention_backend
    if systems()[chosen].streams:
        return (
            f"every request of this server is a stream, and there are no pools (--attention-backend {chosen}): serve"
            " them with another backend"
        )
    if (size := page_size_of(manager.server_args)) > 1:
        return f"this server has no pools, whose blocks end at any token (--page-size {size}): set --page-size 1"
    windows, layers = compat.listed_windows(manager.model_config)
    if windows:
        return (
            f"{windows} of {layers} layers of this server's model have sliding windows, which do not move with blocks,"
            f" and there are no pools (--attention-backend {chosen}): serve them with a model of which every layer"
            " attends to the whole context"
        )
    states, layers = compat.listed_states(manager.model_config)
    if states:
        return (
            f"{states} of {layers} layers of this server's model keep a state for a whole context, which cannot be put"
            f" together from blocks, and there are no pools (--attention-backend {chosen}): serve them with a model of"
            " which every layer attends to the whole context"
        )
    return ""
