"""What an operator sets for a whole server, beside SGLang's own arguments: limits, and who may see what."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

from sglang_ext.config import json_object, options_in, typed
from sglang_ext.types import Options

SETTINGS_ENV = "SGLANG_EXT_SETTINGS"
"""Environment variable of the server: a JSON object with fields of `ServerSettings`."""

POOL_DIR_ENV = "SGLANG_EXT_POOL_DIR"
"""Environment variable of the server: the folder in which pools are kept (`serving.store`)."""


MAX_SCAN_SECONDS = 3_600
MAX_DRAIN_SECONDS = 3_600


@dataclass(frozen=True)
class ServerSettings:
    """Limits of one server and what its clients may see. Each field is a flag of `sglang-ext serve`.

    Attributes:
        tenants: JSON file that says whose key is whose (docs/tenants.md): each tenant has pools, conversations and
            stored answers of its own. It is read again on SIGHUP. Needs --admin-api-key or --api-key for the operator.
        open_conversations: any client may continue or replace a conversation whose name it knows; else it needs the
            `conversation_key` that the first turn returned.
        pool_metrics: /metrics names pools, deleted ones too until the server ends; else it counts all together.
        strict_pool_dir: a damaged file in the pool directory stops the start; else it is set aside and reported.
        pool_scan_seconds: the pool directory is shared by several servers, each of which looks in it for changes of the
            others at this interval, in seconds; left out, it is this server's own.
        encode_at_once: pools that another server has put to a shared pool directory are encoded as soon as they are
            seen; else when a request first needs them.
        max_version_seconds: longest time, in seconds, that a request waits for the version of a pool that it names
            (`tickets@7`) and that this server has not seen in a shared pool directory; it is refused with 409 then.
        drain_seconds: how long, in seconds, a server still takes new requests after SIGTERM, so that a router has time
            to see by /ready or /health that the server is about to end. After that, it refuses new requests with 503,
            and ends when it has answered the others.
        max_pool_mb: largest body of a request that changes a pool, in MiB (2^20 bytes); a larger one is refused
            with 413.
        max_request_mb: the same for every other request.
        max_body_seconds: time in seconds within which the body of a request has to be there; a slower one is refused
            with 408.
        max_demonstrations: most demonstrations of one pool; more are refused with 413.
        max_pools: most pools of the server; one more is refused with 413.
        max_waiting_encodings: most changes of pools that wait for the one that is being encoded; one more is refused
            with 429.
        encoding_tokens: most tokens of a pool that one pass encodes while other requests decode, which wait for that
            pass before their next token; while none does, a pass has as many as --chunked-prefill-size allows. Where
            that is -1, passes have 8,192 tokens.
        max_label_tokens: most tokens of labels that `label_probs` scores, or `choose` searches, for one request: those
            of a pool's labels, times the prompts of the request that ask for them; one that needs more is refused with
            413.
        max_headers: most headers of chats' own (a system prompt, a developer message, tools) that one pool is encoded
            behind at one time. A new one replaces the one that was not used for the longest time, and is refused with
            429 while requests run on all of them. 0: a chat that has one is refused.
        max_header_tokens: longest such header, in tokens; a longer one is refused with 413.
        max_prompts: most answers of one request (its prompts, times `n`); more are refused with 413.
        max_logprobs: most log-probabilities of tokens beside the prompt's and the answer's own (`top_logprobs_num`,
            `token_ids_logprob`) that a prompt may ask for, at all its tokens together; more are refused with 413.
        default_max_new_tokens: longest answer, in tokens, of a request that sets no limit of its own.
        max_responses: most answers that /v1/responses keeps to be read or continued; the oldest give way.
    """

    tenants: str | None = None
    open_conversations: bool = False
    pool_metrics: bool = False
    strict_pool_dir: bool = False
    pool_scan_seconds: float | None = None
    encode_at_once: bool = False
    max_version_seconds: int = 10
    drain_seconds: float = 0.0
    max_pool_mb: int = 64
    max_request_mb: int = 8
    max_body_seconds: int = 120
    max_demonstrations: int = 200_000
    max_pools: int = 1_000
    max_waiting_encodings: int = 16
    encoding_tokens: int = 512
    max_label_tokens: int = 32_768
    max_headers: int = 4
    max_header_tokens: int = 4_096
    max_prompts: int = 1_024
    max_logprobs: int = 2_000_000
    default_max_new_tokens: int = 4_096
    max_responses: int = 1_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "max_headers" else 1
            if field.type == "int" and value < least:
                raise ValueError(f"{field.name}={value}: expected a whole number of at least {least}")
        if self.pool_scan_seconds is not None and not 0 < self.pool_scan_seconds <= MAX_SCAN_SECONDS:
            raise ValueError(
                f"pool_scan_seconds={self.pool_scan_seconds}: expected a number of seconds above 0, of at most"
                f" {MAX_SCAN_SECONDS}; leave it out where the pool directory is this server's own"
            )
        if not 0 <= self.drain_seconds <= MAX_DRAIN_SECONDS:
            raise ValueError(
                f"drain_seconds={self.drain_seconds}: expected a number of seconds from 0 to {MAX_DRAIN_SECONDS}"
            )


def server_settings() -> ServerSettings:
    """The settings of this server process (`SETTINGS_ENV`), as `config.options_in` reads them."""
    return options_in(SETTINGS_ENV, ServerSettings)


def settings_with(values: Options) -> str:
    """What `SETTINGS_ENV` is to hold: `values` in place of what it holds already.

    Raises:
        ValueError: either names a setting that there is not, or has a value that it does not take.
    """
    before = json_object(os.environ.get(SETTINGS_ENV) or "{}", SETTINGS_ENV)
    merged = {**typed(ServerSettings, before, SETTINGS_ENV), **typed(ServerSettings, values, "settings")}
    ServerSettings(**merged)
    return json.dumps(merged)
