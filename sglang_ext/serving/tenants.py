"""Tenants of one server: whose key is whose, what each may hold, and which routes their keys open.

Pure: no server. `serving.tenancy` has what a server keeps for each of them. The file of `--tenants` is a JSON object,

    {"acme": {"keys": ["SHA-256 of a key, in hexadecimal", ...], "max_pools": 20}, "bolt": {"keys": [...]}}

so that it holds no key, and whoever reads it can use none: keys are random, and long.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.config import check_name, typed
from sglang_ext.types import Json

HEADER = "x-sglang-ext-tenant"
"""Of a request: the tenant in whose place the operator asks."""

FOLDER = "tenants"
"""In `--pool-dir`: has a folder for each tenant. No file of a pool has this name."""

ROUTES = frozenset(
    {
        "/api/chat",
        "/api/generate",
        "/api/show",
        "/api/tags",
        "/detokenize",
        "/generate",
        "/get_model_info",
        "/health",
        "/health_generate",
        "/model_info",
        "/ping",
        "/pools",
        "/ready",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/detokenize",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{model:path}",
        "/v1/pools",
        "/v1/pools/plan",
        "/v1/pools/{name}",
        "/v1/pools/{name}/cancel",
        "/v1/pools/{name}/demonstrations",
        "/v1/pools/{name}/demonstrations/{id:path}",
        "/v1/pools/{name}/select",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/tokenize",
    }
)
"""Paths of the routes that a tenant's key opens. All that is done there is done in the tenant's own namespace, or tells
of nobody's requests; what a later SGLang adds is closed until it is looked at and written here."""

NOBODYS = frozenset({"/health", "/health_generate"})
"""Those of them that ask for an answer of the server's own: a tenant's quota must not make the server look ill."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAKE = 'printf %s "$KEY" | sha256sum'
_LIKE = '{"acme": {"keys": ["..."], "max_pools": 20}}'
_SECRET = secrets.token_bytes(16)  # of this process: nobody can spell another's namespace


@dataclass(frozen=True)
class TenantQuotas:
    """What a tenant may take, beside the limits of the server (`settings.ServerSettings`), which hold for each tenant.

    Attributes:
        max_pools: most pools; one more is refused with 403.
        max_tokens: most tokens of all pools together, as `GET /v1/pools` counts them; a change that needs more is
            refused with 403. If chats ask over a pool, too, the KV cache has it once more for each header before it,
            which is not counted.
        max_requests: most answers under way at a time (the prompts of requests, times `n`); one more is refused with
            429, and a request that alone asks for more, with 403.
    """

    max_pools: int | None = None
    max_tokens: int | None = None
    max_requests: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ValueError(
                    f"{field.name}={value}: expected a whole number of at least 1; leave it out for no limit"
                )


@dataclass(frozen=True)
class Tenant:
    """One tenant.

    Attributes:
        name: as pools are named; it is a folder's name, and a label of metrics.
        keys: SHA-256 of each of its keys, in lower-case hexadecimal.
        quotas: what it may take.
    """

    name: str
    keys: frozenset[str]
    quotas: TenantQuotas = TenantQuotas()


class Tenants:
    """The tenants of a server, by name and by key.

    Raises:
        ValueError: two tenants have one key.
    """

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self.by_name: dict[str, Tenant] = {}
        self._by_digest: dict[str, Tenant] = {}
        for tenant in tenants:
            self.by_name[tenant.name] = tenant
            for digest in tenant.keys:
                other = self._by_digest.setdefault(digest, tenant)
                if other is not tenant:
                    raise ValueError(
                        f"tenants {other.name!r} and {tenant.name!r} have one key: give each keys of its own"
                    )

    def of_key(self, shown: str | None) -> Tenant | None:
        """Whose key was shown; None for everybody else."""
        # What is looked up is a digest: the time that it takes tells nothing of a key.
        return None if shown is None else self._by_digest.get(digest_of(shown))

    @classmethod
    def read(cls, path: str | os.PathLike[str], servers: Iterable[str | None] = ()) -> Tenants:
        """The tenants in a file.

        Args:
            path: of the file.
            servers: keys of the server's own, which no tenant may have.

        Raises:
            ValueError: the file cannot be read, or is something else; says what to change, and spells no key.
        """
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
            data = json.loads(text, object_pairs_hook=_once)
            found = cls(_tenant(name, entry) for name, entry in _object(data, "it").items())
        except OSError as error:
            raise ValueError(f"--tenants {path}: it cannot be read ({error.strerror or error})") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"--tenants {path}: it is not JSON ({error}); expected an object, like {_LIKE}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--tenants {path}: {error}") from error
        owner = next((tenant for key in servers if key and (tenant := found.of_key(key))), None)
        if owner is not None:
            raise ValueError(
                f"--tenants {path}: tenant {owner.name!r} has --api-key or --admin-api-key of the server, which are the"
                " operator's: give it a key of its own"
            )
        return found


def digest_of(key: str) -> str:
    """What the file has of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def namespace(tenant: str) -> str:
    """What the names of all that the schedulers keep of a tenant begin with; other clients cannot spell it."""
    return hashlib.blake2b(tenant.encode(), digest_size=16, key=_SECRET).hexdigest() + ":"


def not_for_tenants(method: str, path: str) -> str:
    """What a tenant is told that asked for another route."""
    return (
        f"{method} {path} is not for tenants' keys: expected one of {', '.join(sorted(ROUTES))}; ask whoever operates"
        " the server for anything else"
    )


def _once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """An object, or ValueError where a name stands twice: JSON's own reader would forget the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice in one object: expected each name once")
    return found


def _object(value: Json, what: str) -> Mapping[str, Json]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a {type(value).__name__}; expected an object, like {_LIKE}")
    return value


def _tenant(name: str, entry: Json) -> Tenant:
    """One entry of the file; ValueError says what is wrong with it."""
    try:
        check_name(name)
    except ValueError as error:
        raise ValueError(f"tenant {name!r}: {str(error).partition(': ')[2]}") from None
    what = f"tenant {name!r}"
    values = dict(_object(entry, what))
    keys = values.pop("keys", None)
    if not isinstance(keys, list) or not keys:
        raise ValueError(f"{what}: expected keys, a list of at least one SHA-256 of a key ({_MAKE})")
    for number, key in enumerate(keys):
        if not isinstance(key, str) or not _DIGEST.fullmatch(key.lower()):
            raise ValueError(  # without what stands there: it may be a key
                f"{what}: keys[{number}] is no SHA-256 of a key; expected 64 hexadecimal digits ({_MAKE})"
            )
    try:
        quotas = TenantQuotas(**typed(TenantQuotas, values, what))
    except ValueError as error:
        words = str(error)
        raise ValueError(words if words.startswith(what) else f"{what}: {words}") from None
    return Tenant(name, frozenset(key.lower() for key in keys), quotas)
