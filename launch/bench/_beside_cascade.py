"""One engine with streams, for ``sglang-ext bench beside``: it does in turns what `launch.bench._cascade_engine` times.

`launch.bench.beside` runs a copy of this file with either checkout's package, so that it imports only what both have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from sglang_ext.launch.bench._cascade_engine import PARTS, decoding, drawn, timed
from sglang_ext.launch.bench._turns import serve


class Streams:
    """An engine that continues one conversation.

    Args:
        engine: with the system `cascade`.
        part: tokens that `extend` adds.
    """

    def __init__(self, engine: Any, part: int) -> None:
        self.engine, self.part, self.turns = engine, part, 0

    def extend(self) -> dict[str, Any]:
        """Seconds of reading `part` more tokens into the conversation."""
        custom: dict[str, Any] = {**PARTS, **({"continue": True} if self.turns else {})}
        # A later turn begins with the token of the answer before it.
        tokens = drawn(self.part - (self.turns > 0), self.turns)
        self.turns += 1
        return {"seconds": timed(self.engine, tokens, **custom)}

    def decode(self, steps: int) -> dict[str, Any]:
        """Seconds of one decoding step behind the conversation, whose window is full."""
        goes_on: dict[str, Any] = {**PARTS, "continue": True}
        return {"seconds": decoding(self.engine, steps, 1, [60], **goes_on)[0]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--options", type=json.loads, required=True, help="arguments of the engine")
    parser.add_argument("--part", type=int, required=True)
    parser.add_argument("--replies", type=int, required=True, help="file descriptor")
    args = parser.parse_args(argv)
    from sglang_ext import Engine

    engine = Engine(**args.options)
    serve(Streams(engine, args.part), args.replies)
    engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
