"""What `--policy` may say to a system, checked before torch is imported."""

from __future__ import annotations

from sglang_ext.config import json_object, typed
from sglang_ext.systems.registry import System


def without_options(text: str, name: str, what: str) -> str:
    """What is wrong with the options `text`, which came by `what`, of the system `name`, which has none."""
    return f"{what} {text}: {name} has no options; leave it out"


def check_policy(text: str, system: System | None, name: str, what: str) -> None:
    """Check options of a policy before it is imported.

    Args:
        text: what the operator wrote.
        system: which one is to have them; None for one that is not ours: it is only seen whether it is JSON.
        name, what: how messages call the system and the options.

    Raises:
        ValueError: it is no JSON object, or the policy does not take what is in it.
    """
    values = json_object(text, what)
    if system is None:
        return
    if system.options is None:
        raise ValueError(without_options(text, name, what))
    known = typed(system.options, values, f"{what} with {name}")
    try:
        system.options(**known)
    except ValueError as error:
        raise ValueError(f"{what} {text}: {error}") from error
