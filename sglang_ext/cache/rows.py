"""What the scheduler is told about a request: which blocks its row of KV slots begins with.

The tokenizer process decides (selection, order, encoding plan); the scheduler processes only look blocks up by name.
The description travels as one JSON string in `sampling_params.custom_params[WIRE_KEY]`, because SGLang passes nothing
else on to them. The token ids of the blocks do not travel: a request is sent with the tokens that follow the row's
prefix, and every scheduler process puts those of the prefix in front, from the blocks it holds. A message is as short
as the question then, however much of the pool is selected.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from sglang_ext.types import Json, JsonObject

WIRE_KEY = "sglang_ext"
INTERNAL = "sglang-ext-"  # how the ids of the server's own requests begin (encoding, scoring of labels)

POOL_OWNER, REQUEST_OWNER = "pool:", "request:"  # how the names of those who hold blocks begin


class Piece(NamedTuple):
    """Tokens [start, end) of the block named `key`, seen one after the other.

    A row may have a thousand, and each scheduler makes them for each request: a tuple takes a third of the time.
    """

    key: str
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class NewBlock:
    """A block that an encoding request writes.

    Attributes:
        key: the block's name (policies.dbsa.block_identity).
        tokens: how many tokens it has.
        position: position of its first token while it is encoded.
        seen: (number of the block in the row, position of its first token) for every block it attends to besides
            itself, in view order. The row is the prefix pieces followed by the new blocks.
    """

    key: str
    tokens: int
    position: int
    seen: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Row:
    """The leading part of a request's row: pieces of resident blocks, then blocks the request itself encodes.

    Attributes:
        prefix: pieces of resident blocks, in view order.
        new: blocks to encode; empty for a request that answers.
        owner: who holds the new blocks (a pool's version); they stay locked until the owner lets go.
        follows: None where the tokens of the prefix are seen at consecutive positions from 0, and all others follow
            them. Else they are seen where they were written, and this is the position of the first token behind them.
        own: None for a row whose new blocks are kept. Else the new blocks are branches: texts that may follow the
            request's first `own` tokens. Those tokens are found and stored as any request's are; the branches go with
            the request. A branch sees the prefix, those tokens, and the branches that its `seen` names.
    """

    prefix: tuple[Piece, ...]
    new: tuple[NewBlock, ...] = field(default=())
    owner: str = ""
    own: int | None = None
    follows: int | None = None

    @property
    def shift(self) -> int:
        """By how many positions the tokens behind the prefix stand behind their columns."""
        return 0 if self.follows is None else self.follows - self.prefix_tokens

    @property
    def reach(self) -> int:
        """Tokens of the model's context that the prefix takes: its columns, and the positions up to `follows`."""
        return self.prefix_tokens + max(0, self.shift)

    @property
    def as_written(self) -> bool:
        """Whether all tokens see all before them where these were written, as in a request without a pool."""
        return self.follows is not None and not self.new

    @property
    def encodes(self) -> bool:
        """Whether the request is there to write blocks that are kept."""
        return bool(self.new) and self.own is None

    @cached_property
    def prefix_tokens(self) -> int:
        return sum(piece.end - piece.start for piece in self.prefix)

    def namespace(self, extra_key: str | None) -> str:
        """The radix namespace of the request's own tokens: equal selections share it, which is multi-turn reuse."""
        known = self._namespaces.get(extra_key)
        if known is None:
            named: list[Json] = [extra_key, self.prefix]
            if self.follows is not None:
                named.append(self.follows)
            known = "rows:" + hashlib.blake2b(json.dumps(named).encode(), digest_size=16).hexdigest()
            self._namespaces[extra_key] = known
        return known

    @cached_property
    def _namespaces(self) -> dict[str | None, str]:
        return {}  # by extra_key, of which a row's request has one; asked for at every look-up and store

    def dump(self) -> str:
        # Field by field: asdict copies everything recursively, which took longer than all else that a request needs.
        data = {
            "prefix": self.prefix,
            "new": [(block.key, block.tokens, block.position, block.seen) for block in self.new],
            "owner": self.owner,
            "own": self.own,
            "follows": self.follows,
        }
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def load(cls, text: str) -> Row:
        data: JsonObject = json.loads(text)
        return cls(
            prefix=tuple(map(Piece._make, data["prefix"])),
            new=tuple(
                NewBlock(key, tokens, position, tuple((number, at) for number, at in seen))
                for key, tokens, position, seen in data["new"]
            ),
            owner=data["owner"],
            own=data["own"],
            follows=data["follows"],
        )
