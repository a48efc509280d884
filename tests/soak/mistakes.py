"""Bad input of every kind, large bodies, and requests with the wrong key or none: all are refused, none is answered."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.soak.caller import Caller, ServerEnded
from tests.soak.questions import STEADY

REFUSED = frozenset({400, 404, 409, 413, 415, 422, 429})
LOCKED = frozenset({401, 403})
NAME = "never"  # a pool that no request must bring into being
ONE = [{"input": "a", "output": "b"}]
LARGE = 3 * 2**20  # larger than the limits that the soak's server has


@dataclass(frozen=True)
class Mistake:
    """A request that must be refused."""

    name: str
    method: str
    path: str
    body: Any = None
    key: str = "user"
    raw: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        sent = {"json": self.body} if self.raw is None and self.body is not None else {"data": self.raw}
        return {**sent, "headers": dict(self.headers), "params": dict(self.query)}


def generate(name: str, body: dict[str, Any] | None = None, **sampling: Any) -> Mistake:
    params = {"max_new_tokens": 4, **sampling}
    return Mistake(f"generate: {name}", "POST", "/generate", {"text": "a", "sampling_params": params, **(body or {})})


def over_pool(name: str, **custom: Any) -> Mistake:
    return generate(f"custom_params: {name}", custom_params={"pool": STEADY, **custom})


def completion(name: str, **body: Any) -> Mistake:
    return Mistake(f"completion: {name}", "POST", "/v1/completions", {"model": "default", "prompt": "a", **body})


def chat(name: str, **body: Any) -> Mistake:
    common = {"model": "default", "messages": [{"role": "user", "content": "a"}]}
    return Mistake(f"chat: {name}", "POST", "/v1/chat/completions", {**common, **body})


def put(name: str, body: Any = None, demonstrations: Any = ONE, **options: Any) -> Mistake:
    whole = {"demonstrations": demonstrations, **options} if body is None else body
    return Mistake(f"put: {name}", "PUT", f"/v1/pools/{NAME}", whole, "admin")


def put_raw(name: str, raw: bytes, kind: str = "application/json") -> Mistake:
    return Mistake(f"put: {name}", "PUT", f"/v1/pools/{NAME}", None, "admin", raw, {"Content-Type": kind})


MISTAKES: tuple[Mistake, ...] = (
    # prompts
    generate("text and empty input_ids", {"text": "x", "input_ids": []}),
    Mistake("generate: no prompt", "POST", "/generate", {"sampling_params": {}}),
    Mistake("generate: a negative id", "POST", "/generate", {"input_ids": [-1]}),
    Mistake("generate: an id beyond the vocabulary", "POST", "/generate", {"input_ids": [10**9]}),
    Mistake("generate: ids of several kinds", "POST", "/generate", {"input_ids": [1, "a"]}),
    Mistake("generate: empty ids", "POST", "/generate", {"input_ids": []}),
    generate("text is a number", {"text": 5}),
    generate("logprob_start_len -5", {"return_logprob": True, "logprob_start_len": -5}),
    generate("a prompt beyond the context", {"text": "why " * 6000}),
    Mistake("generate: no JSON", "POST", "/generate", raw=b"{", headers={"Content-Type": "application/json"}),
    Mistake("generate: empty body", "POST", "/generate", raw=b"", headers={"Content-Type": "application/json"}),
    # sampling parameters
    generate("temperature in words", temperature="hot"),
    generate("temperature -1", temperature=-1),
    generate("top_p 0", top_p=0),
    generate("top_p 2", top_p=2),
    generate("top_k -5", top_k=-5),
    generate("min_p 2", min_p=2),
    generate("max_new_tokens -1", max_new_tokens=-1),
    generate("max_new_tokens in words", max_new_tokens="many"),
    generate("min_new_tokens beyond max_new_tokens", min_new_tokens=10),
    generate("frequency_penalty 9", frequency_penalty=9),
    generate("repetition_penalty -1", repetition_penalty=-1),
    generate("n 100000", n=100_000),
    generate("n -1", n=-1),
    generate("two grammars", regex="a", json_schema="{}"),
    generate("an unknown parameter", temperatur=0),
    # options of pools
    generate("custom_params is text", custom_params="x"),
    generate("custom_params is a list", custom_params=[1]),
    generate("pools instead of pool", custom_params={"pools": STEADY}),
    generate("constrain without a pool", custom_params={"constrain": "labels"}),
    generate("an unknown pool", custom_params={"pool": "nope"}),
    generate("a pool that is a number", custom_params={"pool": 5}),
    over_pool("ratio 0", ratio=0),
    over_pool("ratio 2", ratio=2),
    over_pool("blocks 0", blocks=0),
    over_pool("block_ids beyond", block_ids=[999]),
    over_pool("block_ids twice", block_ids=[0, 0]),
    over_pool("order", order="sideways"),
    over_pool("retriever", retriever="crystal"),
    over_pool("granularity", granularity="letter"),
    over_pool("constrain", constrain="everything"),
    over_pool("label_probs in words", label_probs="yes"),
    over_pool("query is a number", query=5),
    over_pool("an option of another backend", p1=0.5),
    over_pool("a lone surrogate", query="\ud800"),
    # OpenAI's routes
    completion("no prompt", prompt=None),
    completion("max_tokens -5", max_tokens=-5),
    completion("temperature in words", temperature="hot"),
    completion("custom_params is text", custom_params="x"),
    completion("an unknown pool", custom_params={"pool": "nope"}),
    completion("pools instead of pool", custom_params={"pools": STEADY}),
    completion("a negative id", prompt=[-1]),
    chat("no messages", messages=[]),
    chat("messages is text", messages="a"),
    chat("a role that there is not", messages=[{"role": "king", "content": 5}]),
    chat("max_tokens -5", max_tokens=-5),
    chat("an unknown pool", custom_params={"pool": "nope"}),
    chat(
        "a late system prompt",
        messages=[{"role": "user", "content": "a"}, {"role": "system", "content": "be loud"}],
        custom_params={"pool": STEADY},
    ),
    # pools
    Mistake("put: a name with spaces", "PUT", "/v1/pools/a%20b", {"demonstrations": ONE}, "admin"),
    Mistake("put: a name with dots", "PUT", "/v1/pools/...", {"demonstrations": ONE}, "admin"),
    Mistake("put: a long name", "PUT", f"/v1/pools/{'n' * 300}", {"demonstrations": ONE}, "admin"),
    put("a list", body=[1]),
    put("no demonstrations", demonstrations=[]),
    put("demonstrations is text", demonstrations="abc"),
    put("a demonstration is text", demonstrations=["abc"]),
    put("no output", demonstrations=[{"input": "a"}]),
    put("output is a number", demonstrations=[{"input": "a", "output": 5}]),
    put("one id twice", demonstrations=[{"id": "x", **ONE[0]}, {"id": "x", **ONE[0]}]),
    put("a lone surrogate in an id", demonstrations=[{"id": "\ud800", **ONE[0]}]),
    put("a lone surrogate in an input", demonstrations=[{"input": "\udfff", "output": "b"}]),
    put("a lone surrogate in system", system="\ud800"),
    put("a template without an input", template="{output}"),
    put("block_size 0", block_size=0),
    put("block_size in words", block_size="ten"),
    put("pattern", pattern="zigzag"),
    put("grouping", grouping="by hand"),
    put("positions", positions="nowhere"),
    put("an unknown option", blocksize=3),
    put("wait in words", wait="no"),
    put("too many demonstrations", demonstrations=[{"input": f"{k}", "output": "b"} for k in range(1200)]),
    Mistake(
        "put: options beside a JSON body",
        "PUT",
        f"/v1/pools/{NAME}",
        {"demonstrations": ONE},
        "admin",
        query={"block_size": "3"},
    ),
    put_raw("no JSON", b"{"),
    put_raw("not UTF-8", b'{"demonstrations": "\xff"}'),
    put_raw("nested too deeply", b"[" * 100_000),
    put_raw("a broken line", b'{"input": "a", "output": "b"}\n{"input": ', "application/jsonl"),
    Mistake("append: no such pool", "POST", "/v1/pools/nope/demonstrations", {"demonstrations": ONE}, "admin"),
    Mistake(
        "append: options", "POST", f"/v1/pools/{STEADY}/demonstrations", {"demonstrations": ONE, "seed": 1}, "admin"
    ),
    Mistake("delete: no such demonstration", "DELETE", f"/v1/pools/{STEADY}/demonstrations/d999", None, "admin"),
    Mistake("delete: no such pool", "DELETE", "/v1/pools/nope", None, "admin"),
    Mistake("cancel: no such pool", "POST", "/v1/pools/nope/cancel", None, "admin"),
    Mistake("show: a flag in words", "GET", f"/v1/pools/{STEADY}", None, "admin", query={"tokens": "perhaps"}),
)

# (method, path, body) that need the admin key
ADMINS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/v1/pools", None),
    ("GET", f"/v1/pools/{STEADY}", None),
    ("PUT", f"/v1/pools/{NAME}", {"demonstrations": ONE}),
    ("POST", f"/v1/pools/{STEADY}/demonstrations", {"demonstrations": ONE}),
    ("DELETE", f"/v1/pools/{STEADY}", None),
    ("DELETE", f"/v1/pools/{STEADY}/demonstrations/d0", None),
    ("POST", f"/v1/pools/{STEADY}/cancel", None),
    ("POST", "/v1/pools/plan", {"demonstrations": ONE}),
    ("POST", "/flush_cache", None),
    ("POST", "/abort_request", {"rid": "", "abort_all": True}),
)
USERS: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}),
    ("POST", "/v1/completions", {"model": "default", "prompt": "a"}),
    ("POST", "/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": "a"}]}),
    ("GET", "/server_info", None),
    ("GET", "/v1/models", None),
)


class Mistakes:
    """Clients that do what they must not.

    Args:
        leave_out: beginnings of the names of mistakes that are not made.
        secret: a text that only holders of the admin key may read: one of the steady pool's labels.
    """

    def __init__(self, caller: Caller, leave_out: tuple[str, ...], secret: str) -> None:
        self.caller, self.secret = caller, secret
        self.journal = caller.journal
        self.mistakes = [each for each in MISTAKES if not each.name.startswith(leave_out or ("\0",))]
        self.leave_out = leave_out

    async def make(self, dice: random.Random, which: Mistake | None = None) -> None:
        """One request that must be refused with a message."""
        mistake = which or dice.choice(self.mistakes)
        try:
            reply = await self.caller.call(
                "bad input", mistake.method, mistake.path, REFUSED, mistake.key, **mistake.arguments()
            )
        except ServerEnded:
            self.journal.fail(f"bad input: {mistake.name}: the server ended meanwhile")
            raise
        if reply is None:
            self.journal.fail(f"bad input: {mistake.name} was not refused", mistake.name)
        elif len(reply.text) < 20:
            self.journal.fail(f"bad input: {mistake.name}: {reply.status} with no reason: {reply.text!r}")

    async def large(self, dice: random.Random) -> None:
        """A body beyond the limit is refused by its length, or while it comes in."""
        if "large" in self.leave_out:
            return
        method, path, key = dice.choice(
            [("PUT", f"/v1/pools/{NAME}", "admin"), ("POST", "/generate", "user"), ("POST", "/v1/completions", "user")]
        )
        text = json.dumps({"text": "a" * LARGE, "prompt": "a", "demonstrations": [{"input": "a" * LARGE}]}).encode()

        async def chunks() -> AsyncIterator[bytes]:
            for begin in range(0, len(text), 2**16):
                yield text[begin : begin + 2**16]

        data: Any = text if dice.random() < 0.5 else chunks()
        kind = {"Content-Type": "application/json"}
        await self.caller.call("large body", method, path, {413}, key, data=data, headers=kind)

    async def try_keys(self, dice: random.Random) -> None:
        """The wrong key, or none, for what needs one; the user's key for what needs the admin's."""
        if dice.random() < 0.5:
            method, path, body = dice.choice(ADMINS)
            key = dice.choice(["user", "wrong", "none"])
        else:
            method, path, body = dice.choice(USERS)
            key = dice.choice(["wrong", "none"])
        await self.caller.call(f"key: {key}", method, path, LOCKED, key, json=body)

    async def pry(self, dice: random.Random) -> None:
        """What the user's key shows says nothing of what is in pools."""
        if "pry" in self.leave_out:
            return
        reply = await self.caller.call("pry", *dice.choice([("GET", "/server_info"), ("GET", "/metrics")]), {200})
        if reply is not None and self.secret in reply.text:
            self.journal.fail(f"pry: a client with the user key was told {self.secret!r}")
