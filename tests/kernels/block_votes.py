"""What the tests of scores and of elections among memory blocks have in common."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.kernels.block_votes import reference, triton_impl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NONE = float("-inf")
BOTH = pytest.mark.parametrize("module", [reference, triton_impl], ids=["reference", "triton"])
