"""Questions: over pools and plain, on each route, whole and streamed, left and aborted; the answers are checked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from tests.soak.caller import Caller, Reply
from tests.soak.table import AnswerTable, PoolTable, Said, clear

GENERATE = "/generate"
SETTLED = frozenset({200})
# Of a pool that others change: it may be gone, be made for the first time, or find no room.
CHURNED = frozenset({200, 404, 409, 413, 499, 503})
PLAIN = frozenset({200, 499, 503})
STEADY = "rock"  # a pool that nobody changes
PROMPTS = 24
LONG = 200  # tokens of an answer that is left or aborted
LABEL_TOKENS = 32


def prompt(index: int) -> str:
    """The plain question of that number."""
    return f"why is card {index * 37 % 400} frozen, and who can help with case {index}?"


def token_ids(index: int) -> list[int]:
    """The question of that number as tokens of the tests' tokenizer, specials left out."""
    dice = random.Random(index)
    return [dice.randint(10, 300) for _ in range(5 + index * 7 % 60)]


def params(tokens: int, **custom: Any) -> dict[str, Any]:
    """Greedy sampling parameters."""
    found: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return found | ({"custom_params": custom} if custom else {})


class Questions:
    """What clients ask of the pools' server, and what they must be told."""

    def __init__(self, caller: Caller, pools: PoolTable, answers: AnswerTable, names: tuple[str, ...]) -> None:
        self.caller, self.pools, self.answers, self.names = caller, pools, answers, names
        self.journal = caller.journal
        self.weak = 0  # answers from a version whose number nobody was told; its labels are known

    # ---- the table of answers that stay ----

    async def learn(self) -> None:
        """Ask every plain question once, and questions over the pool that stays; call it while nothing else runs."""
        for index in range(PROMPTS):
            for kind, body in (
                ("text", {"text": prompt(index)}),
                ("ids", {"input_ids": token_ids(index)}),
                ("steady", {"text": prompt(index)}),
            ):
                custom = self._steady(index) if kind == "steady" else {}
                body |= {"sampling_params": params(4 + index % 9, **custom)}
                body |= {"return_logprob": True, "top_logprobs_num": 2}
                reply = await self.caller.call(f"learn {kind}", "POST", GENERATE, SETTLED, json=body)
                if reply is None:
                    continue
                answer = reply.json()
                if clear(answer["meta_info"]):
                    self.answers.put(kind, index, answer["text"])
                    if kind == "text":
                        self.answers.put("batch", index, answer["text"])
                        self.answers.put("completion", index, answer["text"])
            await self._learn_chat(index)
            await self._learn_label(index)

    async def _learn_chat(self, index: int) -> None:
        body = self._chat_body(index) | {"logprobs": True, "top_logprobs": 2}
        reply = await self.caller.call("learn chat", "POST", "/v1/chat/completions", SETTLED, json=body)
        if reply is None:
            return
        choice = reply.json()["choices"][0]
        tops = [[top["logprob"] for top in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
        if all(len(top) < 2 or abs(top[0] - top[1]) > AnswerTable.MARGIN for top in tops):
            self.answers.put("chat", index, choice["message"]["content"])

    async def _learn_label(self, index: int) -> None:
        """The probabilities of the steady pool's labels."""
        custom = self._steady(index) | {"constrain": "labels", "label_probs": True}
        body = {"text": prompt(index), "sampling_params": params(LABEL_TOKENS, **custom)}
        reply = await self.caller.call("learn labels", "POST", GENERATE, SETTLED, json=body)
        if reply is not None:
            self.answers.put("label_probs", index, reply.json()["meta_info"]["sglang_ext"]["label_probs"])

    def _steady(self, index: int) -> dict[str, Any]:
        return {"pool": STEADY, "ratio": (0.3, 0.6, 1.0)[index % 3]}

    def _chat_body(self, index: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt(index)}]
        common = {"model": "default", "temperature": 0, "max_tokens": 4 + index % 9, "ignore_eos": True}
        return {"messages": messages, **common}

    def _same(self, kind: str, index: int, found: Any) -> None:
        wanted = self.answers.get(kind, index)
        if found == wanted:
            self.journal.passed(kind)
        else:
            self.journal.fail(f"{kind} {index}: said {found!r}, on the idle server {wanted!r}")

    # ---- plain and steady questions ----

    async def plain(self, dice: random.Random) -> None:
        """A question whose answer is in the table, on one of the routes."""
        kind = dice.choice(["text", "ids", "steady", "steady", "batch", "completion", "chat", "stream", "label_probs"])
        known = self.answers.indices("text" if kind == "stream" else kind)
        if not known:
            return
        index = dice.choice(known)
        await getattr(self, f"_ask_{kind}")(index, dice)

    async def _ask_text(self, index: int, _dice: random.Random) -> None:
        body = {"text": prompt(index), "sampling_params": params(4 + index % 9)}
        if (reply := await self.caller.call("plain text", "POST", GENERATE, PLAIN, json=body)) and reply.status == 200:
            self._same("text", index, reply.json()["text"])

    async def _ask_ids(self, index: int, _dice: random.Random) -> None:
        body = {"input_ids": token_ids(index), "sampling_params": params(4 + index % 9)}
        if (reply := await self.caller.call("plain ids", "POST", GENERATE, PLAIN, json=body)) and reply.status == 200:
            self._same("ids", index, reply.json()["text"])

    async def _ask_steady(self, index: int, dice: random.Random) -> None:
        body = {"text": prompt(index), "sampling_params": params(4 + index % 9, **self._steady(index))}
        if dice.random() < 0.3:
            found = await self.caller.events("steady stream", GENERATE, body, PLAIN)
            if found and (text := self._streamed("steady stream", found[0])) is not None:
                self._same("steady", index, text)
            return
        reply = await self.caller.call("steady", "POST", GENERATE, PLAIN, json=body)
        if reply is not None and reply.status == 200:
            self._same("steady", index, reply.json()["text"])

    async def _ask_batch(self, index: int, dice: random.Random) -> None:
        known = self.answers.indices("batch")
        several = [index, *dice.sample(known, min(3, len(known)))]
        body = {
            "text": [prompt(each) for each in several],
            "sampling_params": [params(4 + each % 9) for each in several],
        }
        reply = await self.caller.call("plain batch", "POST", GENERATE, PLAIN, json=body)
        if reply is not None and reply.status == 200:
            for each, answer in zip(several, reply.json(), strict=True):
                self._same("batch", each, answer["text"])

    async def _ask_completion(self, index: int, _dice: random.Random) -> None:
        body = {"model": "default", "prompt": prompt(index), "temperature": 0, "max_tokens": 4 + index % 9}
        body |= {"ignore_eos": True}
        reply = await self.caller.call("completion", "POST", "/v1/completions", PLAIN, json=body)
        if reply is not None and reply.status == 200:
            self._same("completion", index, reply.json()["choices"][0]["text"])

    async def _ask_chat(self, index: int, _dice: random.Random) -> None:
        body = self._chat_body(index)
        reply = await self.caller.call("chat", "POST", "/v1/chat/completions", PLAIN, json=body)
        if reply is not None and reply.status == 200:
            self._same("chat", index, reply.json()["choices"][0]["message"]["content"])

    async def _ask_stream(self, index: int, _dice: random.Random) -> None:
        body = {"text": prompt(index), "sampling_params": params(4 + index % 9)}
        found = await self.caller.events("plain stream", GENERATE, body, PLAIN)
        if found and (text := self._streamed("plain stream", found[0])) is not None:
            self._same("text", index, text)

    async def _ask_label_probs(self, index: int, _dice: random.Random) -> None:
        custom = self._steady(index) | {"constrain": "labels", "label_probs": True}
        body = {"text": prompt(index), "sampling_params": params(LABEL_TOKENS, **custom)}
        reply = await self.caller.call("steady label_probs", "POST", GENERATE, PLAIN, json=body)
        if reply is None or reply.status != 200:
            return
        wanted = self.answers.get("label_probs", index)
        found = reply.json()["meta_info"]["sglang_ext"]["label_probs"]
        if found.keys() == wanted.keys() and all(abs(found[label] - wanted[label]) < 1e-3 for label in wanted):
            self.journal.passed("label_probs")
        else:
            self.journal.fail(f"label_probs {index}: {found}, on the idle server {wanted}")

    def _streamed(self, kind: str, events: list[Any]) -> str | None:
        """The whole text of a stream; None when it was aborted, which is no answer."""
        if not events:
            self.journal.fail(f"{kind}: a stream without events")
            return None
        if "error" in events[-1]:
            return None
        if (events[-1]["meta_info"].get("finish_reason") or {}).get("type") == "abort":
            return None
        return str(events[-1]["text"])

    # ---- constrained answers over pools that change ----

    async def over_pool(self, dice: random.Random) -> None:
        """A question over a pool that others change: it must say a label of the version that it names."""
        name = dice.choice([*self.names, STEADY])
        ways: list[Callable[[random.Random, str], Awaitable[None]]] = [self._label, self._label, self._labels_batch]
        ways += [self._label_stream, self._label_completion, self._label_chat, self._label_probs, self._free]
        await dice.choice(ways)(dice, name)

    def _custom(self, dice: random.Random, name: str) -> dict[str, Any]:
        custom: dict[str, Any] = {"pool": name, "ratio": dice.choice([0.3, 0.6, 1.0]), "constrain": "labels"}
        if dice.random() < 0.2:
            custom["granularity"] = "example"
        if dice.random() < 0.2:
            custom["retriever"] = "random"
        if dice.random() < 0.2:
            custom["order"] = dice.choice(["low_to_high", "high_to_low", "reversed"])
        return custom

    async def _label(self, dice: random.Random, name: str) -> None:
        sampling = params(LABEL_TOKENS, **self._custom(dice, name))
        sampling["temperature"] = dice.choice([0, 0, 2.0])
        body = {"text": prompt(dice.randrange(1000)), "sampling_params": sampling}
        reply = await self.caller.call("label", "POST", GENERATE, CHURNED, json=body)
        if reply is not None and reply.status == 200:
            self._check("label", name, reply.json(), reply)

    async def _labels_batch(self, dice: random.Random, name: str) -> None:
        asked = [prompt(dice.randrange(1000)) for _ in range(dice.randint(2, 4))]
        body = {"text": asked, "sampling_params": params(LABEL_TOKENS, **self._custom(dice, name))}
        reply = await self.caller.call("label batch", "POST", GENERATE, CHURNED, json=body)
        if reply is not None and reply.status == 200:
            for answer in reply.json():
                self._check("label", name, answer, reply)

    async def _label_stream(self, dice: random.Random, name: str) -> None:
        body = {
            "text": prompt(dice.randrange(1000)),
            "sampling_params": params(LABEL_TOKENS, **self._custom(dice, name)),
        }
        found = await self.caller.events("label stream", GENERATE, body, CHURNED)
        if found and found[0] and "error" not in found[0][-1]:
            self._check("label", name, found[0][-1], found[1])

    async def _label_completion(self, dice: random.Random, name: str) -> None:
        body = {"model": "default", "prompt": prompt(dice.randrange(1000)), "max_tokens": LABEL_TOKENS}
        body |= {"custom_params": self._custom(dice, name)}
        reply = await self.caller.call("label completion", "POST", "/v1/completions", CHURNED, json=body)
        if reply is not None and reply.status == 200:
            self._check_openai(name, reply, lambda choice: choice["text"])

    async def _label_chat(self, dice: random.Random, name: str) -> None:
        messages = [{"role": "user", "content": prompt(dice.randrange(1000))}]
        custom = self._custom(dice, name)
        custom.pop("granularity", None)
        body = {"model": "default", "messages": messages, "max_tokens": LABEL_TOKENS, "custom_params": custom}
        body |= {"return_meta_info": True}
        reply = await self.caller.call("label chat", "POST", "/v1/chat/completions", CHURNED, json=body)
        if reply is not None and reply.status == 200:
            self._check_openai(name, reply, lambda choice: choice["message"]["content"] or "")

    async def _label_probs(self, dice: random.Random, name: str) -> None:
        custom = self._custom(dice, name) | {"label_probs": True}
        body = {"text": prompt(dice.randrange(1000)), "sampling_params": params(LABEL_TOKENS, **custom)}
        reply = await self.caller.call("label_probs", "POST", GENERATE, CHURNED, json=body)
        if reply is None or reply.status != 200:
            return
        answer = reply.json()
        self._check("label", name, answer, reply)
        meta = answer["meta_info"].get("sglang_ext", {})
        probs = meta.get("label_probs")
        if not probs:
            if answer["meta_info"]["finish_reason"]["type"] != "abort":
                self.journal.fail(f"label_probs: an answer without them: {reply.text[:300]}")
            return
        if abs(sum(probs.values()) - 1) > 1e-3:
            self.journal.fail(f"label_probs: they sum to {sum(probs.values())}: {probs}")
        said = Said("labels of label_probs", name, meta["version"], frozenset(probs), True, reply.began, reply.ended)
        self.pools.look_up(said)

    async def _free(self, dice: random.Random, name: str) -> None:
        """An answer in the model's own words: only that it ends is checked."""
        custom = self._custom(dice, name)
        del custom["constrain"]
        body = {"text": prompt(dice.randrange(1000)), "sampling_params": params(dice.randint(1, 24), **custom)}
        await self.caller.call("free", "POST", GENERATE, CHURNED, json=body)

    def _check(self, kind: str, name: str, answer: Any, reply: Reply) -> None:
        """A constrained answer of /generate."""
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            if "AbortReq" not in str(meta["finish_reason"]) and not meta["finish_reason"].get("message"):
                self.journal.fail(f"{kind}: aborted without a reason: {str(answer)[:300]}")
            return
        ours = meta["sglang_ext"]
        if ours["pool"] != name:
            self.journal.fail(f"{kind}: asked pool {name!r}, answered from {ours['pool']!r}")
        label = frozenset({answer["text"].strip()})
        self.pools.look_up(Said(kind, name, ours["version"], label, False, reply.began, reply.ended))

    def _check_openai(self, name: str, reply: Reply, text_of: Callable[[Any], str]) -> None:
        """A constrained answer of an OpenAI route; its version is looked at where it names one."""
        answer = reply.json()
        for choice in answer["choices"]:
            if choice["finish_reason"] == "abort":
                continue
            ours = choice.get("sglang_ext") or (choice.get("meta_info") or {}).get("sglang_ext")
            ours = ours or answer.get("sglang_ext") or {}
            if isinstance(ours, list):
                ours = ours[choice["index"]]
            said = frozenset({text_of(choice).strip()})
            kind = "label of OpenAI's routes"
            self.pools.look_up(Said(kind, name, ours.get("version"), said, False, reply.began, reply.ended))

    # ---- answers that nobody waits for ----

    async def leave(self, dice: random.Random) -> None:
        """A long answer whose client hangs up, streaming or waiting."""
        body = self._long(dice)
        if dice.random() < 0.5:
            await self.caller.events("left in mid-stream", GENERATE, body, CHURNED, most=dice.randint(1, 6))
        else:
            await self.caller.leave("left", "POST", GENERATE, dice.random() * 0.5, json=body)

    async def abort(self, dice: random.Random) -> None:
        """A long answer that is aborted by its id."""
        rid = f"abort-{dice.getrandbits(64):x}"
        asking = asyncio.ensure_future(
            self.caller.call("aborted", "POST", GENERATE, CHURNED, json={**self._long(dice), "rid": rid})
        )
        await asyncio.sleep(dice.random() * 0.3)
        await self.caller.call("abort_request", "POST", "/abort_request", {200}, key="admin", json={"rid": rid})
        await asking

    def _long(self, dice: random.Random) -> dict[str, Any]:
        custom = {} if dice.random() < 0.4 else {"pool": dice.choice(self.names), "ratio": 0.6}
        return {"text": prompt(dice.randrange(1000)), "sampling_params": params(LONG, **custom)}

    # ---- what the tables say ----

    def settle(self) -> None:
        """Take the verdicts of answers over pools into the journal; call it again and again."""
        verdicts, self.pools.verdicts = self.pools.verdicts, type(self.pools.verdicts)()
        for kind, count in verdicts.passed.items():
            self.journal.checked[kind] += count
        self.weak += verdicts.weak
        for wrong in verdicts.wrong:
            self.journal.fail(wrong)
