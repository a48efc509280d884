"""Options that a policy takes from a request are looked at where the request comes in, so that a mistake is a 400."""

from __future__ import annotations

from typing import Any

from sglang_ext.attention.policy import policy_of
from sglang_ext.serving import checks


def after_init(_result: Any, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER TokenizerManager.__init__: the policy of the server, when it is one of ours."""
    manager.ext_policy = policy_of(manager.server_args) if checks.is_active(manager.server_args) else None


def before_tokenize_one_request(manager: Any, obj: Any) -> None:
    """BEFORE TokenizerManager._tokenize_one_request: refuse what the policy does not take.

    Raises:
        ValueError: says which option has which value, and what was expected.
    """
    custom = (getattr(obj, "sampling_params", None) or {}).get("custom_params")
    if manager.ext_policy is not None and isinstance(custom, dict):
        manager.ext_policy.check(custom)
