"""Settings that must stand before torch and transformers are imported, by the tests and by the servers they start."""

from __future__ import annotations

import os

# Servers of several processes share few cores: a torch thread that waits for a core holds up its whole parallel region.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests use models made here: a name that is not a folder is a mistake, not something to download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # after the settings above

from tests.e2e.warm import forked_children

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # our Triton kernels run, slowly, on the CPU
    forked_children()  # engines in the tests' own processes, too, start in seconds
