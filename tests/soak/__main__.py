"""`python -m tests.soak`, which `make soak` runs."""

from __future__ import annotations

import sys

from tests.soak.run import main

if __name__ == "__main__":
    sys.exit(main())
