"""Our attention backends by name, and what `--policy` may say to each; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sglang_ext.config import json_object, typed
from sglang_ext.policies import options


@dataclass(frozen=True)
class Backend:
    """One attention backend.

    Attributes:
        policy: `module:class` of its policy in `sglang_ext.attention`, which is imported when it is asked for.
        options: dataclass of its options, the policy's own `options`; None for a policy that has none.
    """

    policy: str
    options: type | None = None


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "dbsa": Backend("dbsa:DbsaPolicy"),
        "double_p": Backend("double_p:DoublePPolicy", options.DoubleP),
        "dbsa+double_p": Backend("double_p:DbsaDoublePPolicy", options.DoubleP),
        "quest": Backend("quest:QuestPolicy", options.QuestOptions),
        "retroinfer": Backend("retroinfer:RetroInferPolicy", options.RetroInferOptions),
        "twilight": Backend("twilight:TwilightPolicy", options.TwilightOptions),
        "cascade": Backend("cascade:CascadePolicy", options.CascadeOptions),
        "streaming_llm": Backend("cascade:StreamingLlmPolicy", options.StreamingLlmOptions),
    }
)


def without_options(text: str, name: str, what: str) -> str:
    """What is wrong with the options `text`, which came by `what`, of the backend `name`, whose policy has none."""
    return f"{what} {text}: {name} has no options; leave it out"


def check_policy(text: str, backend: Backend | None, name: str, what: str) -> None:
    """Check options of a policy before it is imported.

    Args:
        text: what the operator wrote.
        backend: which backend is to have them; None for one that is not ours: it is only seen whether it is JSON.
        name, what: how messages call the backend and the options.

    Raises:
        ValueError: it is no JSON object, or the policy does not take what is in it.
    """
    values = json_object(text, what)
    if backend is None:
        return
    if backend.options is None:
        raise ValueError(without_options(text, name, what))
    known = typed(backend.options, values, f"{what} with {name}")
    try:
        backend.options(**known)
    except ValueError as error:
        raise ValueError(f"{what} {text}: {error}") from error
