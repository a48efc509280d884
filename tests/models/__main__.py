"""`python -m tests.models`, which `make models-table` runs: writes the tables of docs/models.md.

With names of systems behind it, it only says what came of these, and writes nothing.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.e2e.warm import forked_children  # after the settings above

if __name__ == "__main__":
    forked_children()
    from tests.models.table import main

    sys.exit(main(sys.argv[1:]))
