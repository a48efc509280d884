"""The pool routes of a running server (`sglang_ext.serving.http`), for the command line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote, urlsplit

import requests

from sglang_ext.serving.tenants import HEADER
from sglang_ext.types import Json, JsonObject, Options

POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0  # between looks at a pool whose change has not begun yet
TIMEOUT = (10.0, 600.0)  # seconds to connect, and to answer


class ServerError(Exception):
    """The server could not be reached, or refused; says so in the server's own words."""


class PoolClient:
    """Pools over HTTP.

    Args:
        url: of the server, like http://127.0.0.1:30000.
        api_key: SGLang's --api-key or --admin-api-key, when the server has one, or a tenant's key.
        tenant: in whose place the operator of a server with tenants asks; None for nobody's.

    Every method raises ServerError when the server cannot be reached or answers with an error.
    """

    def __init__(self, url: str, api_key: str | None = None, tenant: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url!r}: expected something like http://127.0.0.1:30000")
        self.url = url.rstrip("/")
        self.session = requests.Session()
        # Neither a proxy nor ~/.netrc (which would replace the api key) has business with a server on this machine.
        self.session.trust_env = parts.hostname not in ("127.0.0.1", "localhost", "::1")
        if api_key:
            self.session.headers["Authorization"] = f"Bearer {api_key}"
        if tenant:
            self.session.headers[HEADER] = tenant

    def call(self, method: str, path: str, body: JsonObject | None = None, **query: bool) -> Json:
        """One request; JSON in, JSON out."""
        params = {name: str(value).lower() for name, value in query.items()}
        try:
            response = self.session.request(method, self.url + path, json=body, params=params, timeout=TIMEOUT)
        except requests.ConnectionError as error:
            raise ServerError(f"no server answers at {self.url}: start one with sglang-ext serve MODEL") from error
        except requests.RequestException as error:
            raise ServerError(f"{method} {self.url}{path}: {error}") from error
        if not response.ok:
            raise ServerError(_message(response, path))
        return response.json()

    def pools(self) -> list[JsonObject]:
        """A line for each pool."""
        answer: list[JsonObject] = self.call("GET", "/v1/pools")["pools"]
        return answer

    def pool(self, name: str, tokens: bool = False) -> JsonObject:
        """One pool with its blocks."""
        answer: JsonObject = self.call("GET", _path(name), tokens=tokens)
        return answer

    def put(
        self, name: str, demonstrations: Sequence[JsonObject], options: Options, watch: Callable[[JsonObject], None]
    ) -> JsonObject:
        """Create or replace a pool; `watch` sees its description again and again until it is ready."""
        body = {"demonstrations": demonstrations, "wait": False, **options}
        with self._looking_on(name, watch):
            begun = self.call("PUT", _path(name), body)
        return self._finished(name, begun, watch)

    def append(
        self, name: str, demonstrations: Sequence[JsonObject], watch: Callable[[JsonObject], None]
    ) -> JsonObject:
        """Add demonstrations to a pool; waits like `put`."""
        body = {"demonstrations": demonstrations, "wait": False}
        with self._looking_on(name, watch):
            begun = self.call("POST", _path(name, "demonstrations"), body)
        return self._finished(name, begun, watch)

    def delete(self, name: str) -> JsonObject:
        """Delete a pool."""
        answer: JsonObject = self.call("DELETE", _path(name))
        return answer

    def delete_demonstration(self, name: str, id: str, purge: bool, watch: Callable[[JsonObject], None]) -> JsonObject:
        """Take a demonstration out of retrieval, or with `purge` out of every block; waits like `put`."""
        with self._looking_on(name, watch):
            begun = self.call("DELETE", _path(name, "demonstrations", id), purge=purge, wait=False)
        return self._finished(name, begun, watch)

    def cancel(self, name: str) -> JsonObject:
        """Stop the encoding under way."""
        answer: JsonObject = self.call("POST", _path(name, "cancel"))
        return answer

    def plan(self, demonstrations: Sequence[JsonObject], options: Options) -> JsonObject:
        """What a pool would take on that server, and how many such pools fit."""
        answer: JsonObject = self.call("POST", "/v1/pools/plan", {"demonstrations": demonstrations, **options})
        return answer

    @contextmanager
    def _looking_on(self, name: str, watch: Callable[[JsonObject], None]) -> Iterator[None]:
        """Let `watch` see the pool while a request waits for its turn, or for its text to be read and tokenized."""
        over = threading.Event()
        other = PoolClient(self.url)  # a session serves one thread
        other.session.headers, other.session.trust_env = self.session.headers, self.session.trust_env

        def look() -> None:
            while not over.wait(LOOK_SECONDS):
                try:
                    listed = [pool for pool in other.pools() if pool["name"] == name]
                except ServerError:  # the change itself will say so
                    continue
                if listed and not over.is_set():
                    watch(listed[0])

        threading.Thread(target=look, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _finished(self, name: str, info: JsonObject, watch: Callable[[JsonObject], None]) -> JsonObject:
        """Wait until the change that `info` describes is over.

        Raises:
            ServerError: it failed or was cancelled; the pool is then what it was before.
        """
        before, encoding = info["version"], info["status"] == "encoding"
        while info["status"] == "encoding":
            watch(info)
            time.sleep(POLL_SECONDS)
            listed = {pool["name"]: pool for pool in self.pools()}
            if name not in listed:
                raise ServerError(f"pool {name!r} is gone: its encoding failed or was cancelled (see the server's log)")
            info = listed[name]
        watch(info)
        if info["error"]:
            raise ServerError(info["error"])
        if encoding and info["version"] == before:
            raise ServerError(f"the change of pool {name!r} was cancelled; it is as it was before")
        return info


def _path(*parts: str) -> str:
    return "/v1/pools/" + "/".join(quote(part, safe="") for part in parts)


def _message(response: requests.Response, path: str) -> str:
    """What an error answer says, in whichever envelope it came."""
    try:
        data = response.json()
    except ValueError:
        data = response.text.strip()[:500]
    if isinstance(data, dict):
        data = data.get("error", data.get("detail", data.get("message", data)))
    if isinstance(data, dict):
        data = data.get("message", data)
    if response.status_code == 404 and data == "Not Found":
        return f"{response.url} does not exist: is this a server with pools (sglang-ext serve MODEL)?"
    if response.status_code == 401:
        return f"the server refused the api key ({data}): give the right one with --api-key or SGLANG_EXT_API_KEY"
    return f"HTTP {response.status_code}: {data}" if data else f"HTTP {response.status_code} for {path}"
