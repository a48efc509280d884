"""The adapter of the SGLang that is installed, chosen once: `v0_5_17` and `v0_5_23` have the same names."""

from __future__ import annotations

from sglang_ext import lines

if lines.current() is lines.OLDER:
    from sglang_ext.compat.v0_5_17 import (
        LEAVES_OUT_ENDING,
        RadixTree,
        TreelessCache,
        capture_scope,
        capture_variant,
        charge_slots,
        computed,
        default_attention,
        extend_end,
        has_row,
        is_resolved,
        model_config,
        protected,
        refresh_fill_ids,
        replay_scope,
        request_slot,
        resolved,
        set_extend,
        set_reserved,
        set_written,
    )
else:
    from sglang_ext.compat.v0_5_23 import (
        LEAVES_OUT_ENDING,
        RadixTree,
        TreelessCache,
        capture_scope,
        capture_variant,
        charge_slots,
        computed,
        default_attention,
        extend_end,
        has_row,
        is_resolved,
        model_config,
        protected,
        refresh_fill_ids,
        replay_scope,
        request_slot,
        resolved,
        set_extend,
        set_reserved,
        set_written,
    )

__all__ = [
    "LEAVES_OUT_ENDING",
    "RadixTree",
    "TreelessCache",
    "capture_scope",
    "capture_variant",
    "charge_slots",
    "computed",
    "default_attention",
    "extend_end",
    "has_row",
    "is_resolved",
    "model_config",
    "protected",
    "refresh_fill_ids",
    "replay_scope",
    "request_slot",
    "resolved",
    "set_extend",
    "set_reserved",
    "set_written",
]
