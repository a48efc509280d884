"""The systems that `--attention-backend` names: what each of them is, declared in one place.

Ours import neither torch nor SGLang, so that a command line can be checked before these are imported. Other
packages add systems by entry points of the group `sglang_ext.systems`: each names an attention backend, and a `System`.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING

from sglang_ext.names import ServerArgs

if TYPE_CHECKING:
    from sglang_ext.attention.policy import Policy

ENTRY_POINTS = "sglang_ext.systems"

VIEWS = "sglang_ext.attention.readers.views:ViewReader"
STREAMS = "sglang_ext.attention.readers.streams:StreamReader"
"""Readers in plain PyTorch: of policies with `views`, and of stream policies."""

_OURS = (
    "dbsa",
    "double_p",
    "dbsa_double_p",
    "quest",
    "retroinfer",
    "twilight",
    "cascade",
    "streaming_llm",
    "ltri",
    "infllm",
)


@dataclass(frozen=True)
class System:
    """One system: a policy, its options, and what reads what its rows see.

    Attributes:
        summary: what it does, a sentence for users.
        policy: `module:class` of its policy (`attention.policy.Policy`), which is imported when it is asked for.
        options: frozen dataclass of what `--policy` may say; None for a system that has no options.
        streams: whether every request is a stream in a fixed set of KV slots (`attention.stream_policy.StreamPolicy`).
        apart: whether decoding steps see other views than a prompt's rows do, so that one batch must not mix them.
        reader: `module:class` of the reader in plain PyTorch, which serves it on any device; None for the usual one.
        kernels: `module:class` of the reader in kernels; None for a system that has none.
        automatic: whether that reader serves without being asked for, where its kernels were measured.
        spreads: whether that reader serves several tensor-parallel ranks (`--tp-size`); for plain PyTorch the policy
            says so (`attention.policy.Policy.spread`).
        float8: whether its readers read a KV cache in float8 e4m3 (`--kv-cache-dtype fp8_e4m3`).
        pages: whether requests without a pool are served where KV slots are given out in pages (`--page-size`).
        mixed: whether it serves models of which some layers have sliding windows (`compat.layers`): plain requests, in
            which it reads the other layers. There are no pools then: windows do not move with blocks.
        hybrid: whether it serves models of which most layers keep a state for a whole context (`compat.layers`):
            likewise, and without prefixes in the radix tree, which would need states, too.
        drafts: whether its decoding steps may draft tokens for dense attention to verify (`sglang_ext.drafting`): rows
            of a prompt see all of their row then, and reading a token that is replaced later leaves no trace.
    """

    summary: str
    policy: str
    options: type | None = None
    streams: bool = False
    apart: bool = False
    reader: str | None = None
    kernels: str | None = None
    automatic: bool = True
    spreads: bool = True
    float8: bool = False
    pages: bool = False
    mixed: bool = False
    hybrid: bool = False
    drafts: bool = False

    def reader_of(self, kernels: bool) -> str:
        """`module:class` of the reader in kernels, which the system must have, or in plain PyTorch."""
        if kernels and self.kernels is not None:
            return self.kernels
        return self.reader or (STREAMS if self.streams else VIEWS)

    def make_policy(self, ranks: int = 1) -> Policy:
        """A new policy, with the options that the server was started with.

        Args:
            ranks: of tensor parallelism (`--tp-size`).

        Raises:
            ValueError: an option is wrong, or does not go with so many ranks.
        """
        policy: Policy = pkgutil.resolve_name(self.policy)()
        policy.spread(ranks)
        return policy


@functools.cache
def ours() -> Mapping[str, System]:
    """Name of the attention backend -> the systems of this package."""
    found = {}
    for module in _OURS:
        declared = pkgutil.resolve_name(f"sglang_ext.systems.{module}")
        found[declared.NAME] = declared.SYSTEM
    return MappingProxyType(found)


@functools.cache  # reading the entry points of every installed package takes milliseconds, and prefills ask for them
def systems() -> Mapping[str, System]:
    """Name of the attention backend -> system; those of other packages are among them.

    Raises:
        ValueError: an entry point takes one of our names, or names what is no `System`.
    """
    found = dict(ours())
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name in ours():
            raise ValueError(
                f"entry point {entry.name} of {ENTRY_POINTS}: the name is sglang_ext's own; choose another"
            )
        declared = entry.load()
        if not isinstance(declared, System):
            raise ValueError(
                f"entry point {entry.name} of {ENTRY_POINTS}: got a {type(declared).__name__}, expected a"
                " sglang_ext.systems.registry.System"
            )
        found[entry.name] = declared
    return MappingProxyType(found)


def system_of(server_args: ServerArgs) -> System | None:
    """The system of a server; None where its attention backend is none of ours."""
    return systems().get(server_args.attention_backend)
