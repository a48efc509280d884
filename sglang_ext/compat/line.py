"""The adapter of the SGLang that is installed, chosen once: `v0_5_16` and `v0_5_23` have the same names."""

from __future__ import annotations

from sglang_ext import lines

if lines.current() is lines.OLDER:
    from sglang_ext.compat.v0_5_16 import *  # noqa: F403
else:
    from sglang_ext.compat.v0_5_23 import *  # noqa: F403
