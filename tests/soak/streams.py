"""Conversations and long prompts on a server of streams: each turn is answered as on the idle server, or not at all."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from tests.soak.caller import Caller
from tests.soak.mistakes import REFUSED
from tests.soak.questions import params
from tests.soak.table import clear

SCRIPTS, TURNS = 20, 4
PROMPTS = 16
ENDED = frozenset({200, 499, 503})
GONE = 400  # a conversation gave way to others
POLICY = {"sinks": 4, "window": 64, "stride": 32, "beta": 0.95}
SLOTS = 4 + 64 + 32


def turn_ids(script: int, turn: int) -> list[int]:
    """What is said in that turn."""
    dice = random.Random(f"{script}-{turn}")
    return [dice.randint(10, 300) for _ in range(dice.randint(3, 90))]


def long_ids(index: int) -> list[int]:
    """A prompt of several windows."""
    dice = random.Random(f"long-{index}")
    return [dice.randint(10, 300) for _ in range(dice.randint(80, 700))]


def tokens_of(turn: int) -> int:
    return 3 + 2 * turn


@dataclass
class Turn:
    """What is known of a turn: its answer."""

    output_ids: list[int]


class Streams:
    """Clients of a server of streams."""

    def __init__(self, caller: Caller) -> None:
        self.caller, self.journal = caller, caller.journal
        self.scripts: dict[int, list[list[int]]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.keyed = False

    def _body(self, ids: list[int], tokens: int, **custom: Any) -> dict[str, Any]:
        return {"input_ids": ids, "sampling_params": params(tokens, **custom)}

    async def _turn(
        self, kind: str, name: str, script: int, turn: int, key: str | None, expect: Any, **more: Any
    ) -> Any | None:
        custom: dict[str, Any] = {"conversation": name}
        if turn:
            custom["continue"] = True
        if key is not None:
            custom["conversation_key"] = key
        body = self._body(turn_ids(script, turn), tokens_of(turn), **custom) | more
        return await self.caller.call(kind, "POST", "/generate", expect, json=body)

    # ---- the table ----

    async def learn(self) -> None:
        """Hold every conversation once, alone; keep the turns whose answers were clear."""
        tops = {"return_logprob": True, "top_logprobs_num": 2}
        for script in range(SCRIPTS):
            known: list[list[int]] = []
            key = None
            for turn in range(TURNS):
                reply = await self._turn("learn a turn", f"learn-{script}", script, turn, key, {200}, **tops)
                if reply is None:
                    break
                answer = reply.json()
                key = key or key_of(answer)
                if not clear(answer["meta_info"]):
                    break
                known.append(answer["output_ids"])
            if known:
                self.scripts[script] = known
            self.keyed = self.keyed or key is not None
        for index in range(PROMPTS):
            body = self._body(long_ids(index), 6) | tops
            reply = await self.caller.call("learn a long prompt", "POST", "/generate", {200}, json=body)
            if reply is not None and clear(reply.json()["meta_info"]):
                self.prompts[index] = reply.json()["output_ids"]

    # ---- the storm ----

    async def converse(self, dice: random.Random) -> None:
        """A conversation, turn by turn, under a name of its own."""
        if not self.scripts:
            return
        script = dice.choice(sorted(self.scripts))
        name = f"talk-{dice.getrandbits(64):x}"
        key: str | None = None
        for turn, wanted in enumerate(self.scripts[script]):
            reply = await self._turn("turn", name, script, turn, key, ENDED | ({GONE} if turn else set()))
            if reply is None or reply.status != 200:
                return
            answer = reply.json()
            if answer["meta_info"]["finish_reason"]["type"] == "abort":
                return
            key = key or key_of(answer)
            if answer["output_ids"] == wanted:
                self.journal.passed("turn of a conversation" if turn else "first turn")
            else:
                said = f"conversation {script}, turn {turn}: said {answer['output_ids']}, on the idle server {wanted}"
                self.journal.fail(said)
                return
            if key is not None and dice.random() < 0.3 and await self._intrude(dice, name, script, turn):
                # It had given way to others by then, as any may: who began it does not go on in what is another's now.
                await self._turn("turn of one that gave way", name, script, turn + 1, key, {GONE})
                return
            await asyncio.sleep(dice.random() * 0.2)

    async def _intrude(self, dice: random.Random, name: str, script: int, turn: int) -> bool:
        """Another client knows the name, and not the key: neither continues nor replaces the conversation.

        Returns:
            Whether the name was nobody's any more, so that the other client began a conversation of that name.
        """
        key, begun = dice.choice([None, "guessed"]), dice.choice([0, turn + 1])
        expect = REFUSED | {401, 403} | (set() if begun else {200})
        reply = await self._turn("intruder", name, script, begun, key, expect)
        return reply is not None and reply.status == 200

    async def ask(self, dice: random.Random) -> None:
        """A long prompt whose answer is known."""
        if not self.prompts:
            return
        index = dice.choice(sorted(self.prompts))
        body = self._body(long_ids(index), 6)
        if dice.random() < 0.3:
            found = await self.caller.events("long prompt, streamed", "/generate", body, ENDED)
            answer = found[0][-1] if found and found[0] else None
        else:
            reply = await self.caller.call("long prompt", "POST", "/generate", ENDED, json=body)
            answer = reply.json() if reply is not None and reply.status == 200 else None
        if answer is None or "error" in answer or answer["meta_info"]["finish_reason"]["type"] == "abort":
            return
        if answer["output_ids"] == self.prompts[index]:
            self.journal.passed("long prompt")
        else:
            wanted = self.prompts[index]
            self.journal.fail(f"long prompt {index}: said {answer['output_ids']}, on the idle server {wanted}")

    async def leave(self, dice: random.Random) -> None:
        """A long answer, left or aborted, in a conversation or not."""
        named = {"conversation": f"left-{dice.getrandbits(64):x}"} if dice.random() < 0.5 else {}
        body = self._body(long_ids(dice.randrange(100)), 200, **named)
        way = dice.random()
        if way < 0.4:
            await self.caller.events("left in mid-stream", "/generate", body, ENDED, most=dice.randint(1, 6))
        elif way < 0.7:
            await self.caller.leave("left", "POST", "/generate", dice.random() * 0.5, json=body)
        else:
            rid = f"abort-{dice.getrandbits(64):x}"
            asking = asyncio.ensure_future(
                self.caller.call("aborted", "POST", "/generate", ENDED, json={**body, "rid": rid})
            )
            await asyncio.sleep(dice.random() * 0.3)
            await self.caller.call("abort_request", "POST", "/abort_request", {200}, key="admin", json={"rid": rid})
            await asking

    async def forget(self, dice: random.Random) -> None:
        """A continuation of what nobody began, and other requests that must be refused."""
        one = {"sampling_params": {"max_new_tokens": 2}}
        bad: list[tuple[str, str, Any]] = [
            ("POST", "/generate", self._body([5], 2, conversation="nobody", **{"continue": True})),
            ("POST", "/generate", self._body([5], 2, **{"continue": True})),
            ("POST", "/generate", {"text": "x", "input_ids": [], **one}),
            ("POST", "/generate", {"input_ids": [-1], **one}),
            ("POST", "/generate", {"input_ids": [10**6], **one}),
            ("POST", "/generate", self._body([5], 2, window=10**6)),
            ("POST", "/generate", self._body([5], 2, windows=8)),
            ("POST", "/generate", self._body([5], 2, pool="rock")),
        ]
        method, path, body = dice.choice(bad)
        await self.caller.call("bad input", method, path, REFUSED, json=body)


def key_of(answer: Any) -> str | None:
    """The key that a first turn returns."""
    return (answer["meta_info"].get("sglang_ext") or {}).get("conversation_key")
