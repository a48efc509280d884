"""What parts requests in the schedulers' caches: `extra_key` and `cache_salt`, and the namespace of a tenant."""

from __future__ import annotations

import reprlib

from sglang_ext.cache.conversation import NAMESPACE
from sglang_ext.names import RequestInput
from sglang_ext.types import Json


def join_salt(request: RequestInput) -> None:
    """Have `cache_salt` be the beginning of `extra_key`, as SGLang has it before 0.5.18: both part what is cached."""
    salt = getattr(request, "cache_salt", None)
    if salt is None or salt is False:  # SGLang's chat route sets False where a client left the field out
        return
    if not isinstance(salt, str):
        raise ValueError(f"cache_salt={reprlib.repr(salt)}: expected a string")
    _begin_with(request, salt)
    request.cache_salt = None


def put_into(request: RequestInput, space: str) -> None:
    """Have all that the schedulers keep of a checked request, its conversations among it, lie in a namespace.

    Args:
        space: `tenants.namespace`. A request that SGLang made of one that is there already stays as it is.
    """
    keys = request.extra_key if isinstance(request.extra_key, list) else [request.extra_key]
    if not all((key or "").startswith(space) for key in keys):
        _begin_with(request, space)
    request.sampling_params = _named(request.sampling_params, space)


def _begin_with(request: RequestInput, salt: str) -> None:
    keys = request.extra_key
    request.extra_key = [salt + (key or "") for key in keys] if isinstance(keys, list) else salt + (keys or "")


def _named(params: Json, space: str) -> Json:
    """Sampling parameters of one prompt, or of a list of them, whose conversations are in a namespace."""
    if isinstance(params, list):
        return [_named(each, space) for each in params]
    custom = (params or {}).get("custom_params")
    if not isinstance(custom, dict) or "conversation" not in custom:
        return params
    return {**params, "custom_params": {**custom, NAMESPACE: space}}
