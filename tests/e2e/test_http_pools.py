"""Pools over HTTP, and the requests that use them, on one server that has everything switched on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from tests.e2e.server import Server, answer_logprobs, answer_tokens, error_of, input_logprobs, model, until
from tests.oracle import models

KEY = "secret"
DEMOS = models.demonstrations(24)
QUESTION = "how do i activate my card?"
CONTEXT = 1024


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options: dict[str, Any] = {"max_total_tokens": 6000, "chunked_prefill_size": 128, "enable_metrics": True}
    env = {"SGLANG_EXT_SETTINGS": json.dumps({"pool_metrics": True})}
    with Server(model(), api_key=KEY, env=env, **options) as running:
        running.put("p", DEMOS, block_size=6)
        yield running
        assert running.faults() == []


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)


def ext(answer: Any) -> dict[str, Any]:
    return answer["meta_info"]["sglang_ext"]


def wrong(seed: int, n: int = 12) -> list[dict[str, str]]:
    return [{**d, "input": f"{seed} {d['input']}"} for d in models.demonstrations(n, seed)]


# --------------------------------------------------------------------------- routes


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/pools"),
        ("GET", "/v1/pools/p"),
        ("PUT", "/v1/pools/x"),
        ("DELETE", "/v1/pools/p"),
        ("POST", "/v1/pools/plan"),
        ("POST", "/v1/pools/p/cancel"),
        ("POST", "/v1/pools/p/select"),
        ("POST", "/v1/pools/p/demonstrations"),
        ("DELETE", "/v1/pools/p/demonstrations/d0"),
    ],
)
def test_every_route_wants_the_api_key(server: Server, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = requests.request(
            method, server.url + path, headers=headers, json={"demonstrations": DEMOS}, timeout=30
        )
        assert answer.status_code == 401, answer.text


def test_what_is_in_a_pool(server: Server) -> None:
    info = server.pool("p", tokens=True)
    assert info["name"] == "p" and info["status"] == "ready" and info["version"] == 1
    assert info["demonstrations"] == 24 and len(info["blocks"]) == 4
    assert sorted(info["labels"]) == sorted({d["output"] for d in DEMOS})
    assert info["options"]["block_size"] == 6 and info["options"]["pattern"] == "sink+previous+self"
    assert sorted(id for block in info["blocks"] for id in block["demonstrations"]) == sorted(
        f"d{i}" for i in range(24)
    )
    position = 0
    for number, block in enumerate(info["blocks"]):
        assert block["id"] == number and block["resident"] and block["position"] == position
        assert len(block["token_ids"]) == block["tokens"]
        position += block["tokens"]
    assert info["tokens"] == position and info["bytes"] > 0
    assert info["progress"]["blocks_done"] == 4 and info["progress"]["tokens_done"] == position
    assert "token_ids" not in server.pool("p")["blocks"][0]
    listed = server.json("GET", "/v1/pools")["pools"]
    assert [pool["name"] for pool in listed] == ["p"] and listed[0]["tokens"] == position


def test_hits_are_counted(server: Server) -> None:
    before = [block["hits"] for block in server.pool("p")["blocks"]]
    used = ext(server.generate(QUESTION, pool="p", blocks=2))["blocks"]
    after = [block["hits"] for block in server.pool("p")["blocks"]]
    assert [b - a for a, b in zip(before, after, strict=True)] == [int(i in used) for i in range(4)]


def test_plan_says_what_a_put_takes(server: Server) -> None:
    plan = server.json("POST", "/v1/pools/plan", json={"demonstrations": wrong(3, 20), "block_size": 7})
    info = server.put("planned", wrong(3, 20), block_size=7)
    assert plan["tokens"] == info["tokens"] and plan["bytes"] == info["bytes"] and plan["blocks"] == len(info["blocks"])
    assert plan["tokens_per_block"] == [block["tokens"] for block in info["blocks"]]
    assert plan["fits"] == plan["capacity_tokens"] // plan["tokens"] > 0
    server.json("DELETE", "/v1/pools/planned")


def test_json_lines_with_options_in_the_query(server: Server) -> None:
    lines = "\n".join(json.dumps(d) for d in DEMOS) + "\n\n"
    for kind in ("application/jsonl", "application/x-ndjson"):
        info = server.json(
            "PUT",
            "/v1/pools/lines?block_size=6&pinned=false&grouping=length_balanced",
            data=lines.encode(),
            headers={"Content-Type": kind},
        )
        assert info["options"]["block_size"] == 6 and info["options"]["pinned"] is False
        assert [b["key"] for b in info["blocks"]] == [b["key"] for b in server.pool("p")["blocks"]]
    more = json.dumps({"text": "one more", "label": "other"})
    info = server.json(
        "POST", "/v1/pools/lines/demonstrations", data=more, headers={"Content-Type": "application/jsonl"}
    )
    assert info["demonstrations"] == 25
    server.json("DELETE", "/v1/pools/lines")


def test_wait_false_shows_progress(server: Server) -> None:
    body = {"demonstrations": wrong(4, 250), "block_size": 10, "positions": "local", "wait": False}
    for _ in range(8):  # on a crowded machine it may be over before anyone looks
        answer = server.call("PUT", "/v1/pools/slow", json=body)
        assert answer.status_code == 202 and answer.json()["status"] == "encoding"
        seen = []
        while (info := server.pool("slow"))["status"] == "encoding":
            seen.append(info["progress"]["tokens_done"])
            time.sleep(0.005)
        assert info["status"] == "ready" and info["progress"]["tokens_done"] == info["tokens"]
        if midway := any(0 < done < info["tokens"] for done in seen):
            break
        server.json("DELETE", "/v1/pools/slow")
    assert midway and seen == sorted(seen)
    # longer than the context, with local positions
    assert info["tokens"] > CONTEXT
    answer = server.generate(QUESTION, pool="slow", blocks=4)
    assert len(ext(answer)["blocks"]) == 4
    server.json("DELETE", "/v1/pools/slow")
    assert server.call("GET", "/v1/pools/slow").status_code == 404


def test_pools_with_equal_beginnings_share_blocks(server: Server) -> None:
    def resident() -> int:
        return server.state()["sglang_ext"]["blocks_resident"]

    before = resident()
    twin = server.put("twin", DEMOS, block_size=6)
    assert resident() == before and twin["progress"]["blocks_done"] == 4
    server.json("DELETE", "/v1/pools/twin")
    assert resident() == before, "the other pool still holds them"
    assert all(block["resident"] for block in server.pool("p")["blocks"])


def test_appending_encodes_the_new_blocks_only(server: Server) -> None:
    old = server.put("grow", wrong(5), block_size=4)
    hits_before = server.state()["sglang_ext"]["blocks_resident"]
    grown = server.json("POST", "/v1/pools/grow/demonstrations", json={"demonstrations": wrong(6, 5)})
    assert grown["version"] == 2 and grown["demonstrations"] == 17
    assert [b["key"] for b in grown["blocks"]][:3] == [b["key"] for b in old["blocks"]]
    assert len(grown["blocks"]) == 5 and server.state()["sglang_ext"]["blocks_resident"] == hits_before + 2
    # and answers as a pool put at once in the same blocks would: the same names, the same states
    server.json("DELETE", "/v1/pools/grow")


def test_a_deleted_demonstration_is_gone_at_once(server: Server) -> None:
    server.put("less", wrong(7), block_size=4)
    info = server.pool("less", tokens=True)
    block = next(b for b in info["blocks"] if b["id"] == 1)
    id, (low, high) = block["demonstrations"][1], block["spans"][1]
    whole = ext(server.generate(QUESTION, pool="less", block_ids=[0, 1]))["stitched_tokens"]
    after = server.json("DELETE", f"/v1/pools/less/demonstrations/{id}")
    assert after["demonstrations"] == 11 and after["deleted"] == [id]
    assert ext(server.generate(QUESTION, pool="less", block_ids=[0, 1]))["stitched_tokens"] == whole - (high - low)
    # by example: never retrieved again, even by its own words
    number = int(id[1:])
    words = wrong(7)[number]["input"]
    everything = ext(server.generate(words, pool="less", granularity="example", ratio=1.0))["stitched_tokens"]
    assert everything == after["tokens"] - (high - low)
    server.json("DELETE", "/v1/pools/less")


def question_logprobs(server: Server, pool: str) -> list[float]:
    answer = server.generate(QUESTION, 6, pool=pool, block_ids=list(range(len(server.pool(pool)["blocks"]))))
    return input_logprobs(answer) + answer_logprobs(answer)


def test_a_purged_demonstration_cannot_be_felt(server: Server) -> None:
    """Before the purge blocks still carry it; after, all is as in a pool that never had it."""
    first, second = wrong(8, 6), wrong(9, 6)
    items = [{**d, "id": f"a{i}"} for i, d in enumerate(first)]
    server.put("full", items, block_size=6)
    server.json("POST", "/v1/pools/full/demonstrations", json={"demonstrations": second})
    server.put("never", items[:2] + items[3:], block_size=6)
    server.json("POST", "/v1/pools/never/demonstrations", json={"demonstrations": second})
    expected = question_logprobs(server, "never")

    def distance() -> float:
        return max(abs(a - b) for a, b in zip(question_logprobs(server, "full"), expected, strict=True))

    assert distance() > 1e-2
    server.json("DELETE", "/v1/pools/full/demonstrations/a2")
    assert distance() > 1e-3, "deleted, it is out of view, but the states after it were written with it"
    # deleted already: the purge must still take it out
    answer = server.call("DELETE", "/v1/pools/full/demonstrations/a2?purge=true")
    assert answer.status_code == 200, answer.text
    assert distance() == pytest.approx(0.0, abs=1e-5)
    assert [b["key"] for b in server.pool("full")["blocks"]] == [b["key"] for b in server.pool("never")["blocks"]]
    for name in ("full", "never"):
        server.json("DELETE", f"/v1/pools/{name}")


def test_an_unpinned_pool_is_encoded_again_when_it_was_evicted(server: Server) -> None:
    server.put("loose", wrong(10, 20), block_size=5, pinned=False)
    before = server.generate(QUESTION, pool="loose", ratio=0.8)
    # push everything that nobody holds out of the cache
    for seed in range(12):
        server.generate([7 + (seed * 37 + k * 11) % 300 for k in range(900)], 2)
    gone = [block["resident"] for block in server.pool("loose")["blocks"]]
    assert not all(gone), "there was no pressure"
    count = server.state()["sglang_ext"]
    after = server.generate(QUESTION, pool="loose", ratio=0.8)
    now = server.state()["sglang_ext"]
    lost = sum(not gone[block] for block in ext(before)["blocks"])
    assert now["missed_blocks"] - count["missed_blocks"] == lost
    assert now["reencoded_blocks"] - count["reencoded_blocks"] >= max(1, lost)
    assert ext(after)["blocks"] == ext(before)["blocks"]
    assert answer_tokens(after) == answer_tokens(before)
    assert answer_logprobs(after) == pytest.approx(answer_logprobs(before), abs=1e-4)
    # the stitched prefix is a cache hit again, never recomputed as a dense prompt
    assert after["meta_info"]["cached_tokens"] >= ext(after)["stitched_tokens"]
    assert all(block["resident"] for block in server.pool("p")["blocks"]), "pinned blocks stay"
    server.json("DELETE", "/v1/pools/loose")


# --------------------------------------------------------------------------- requests


def test_meta_info_and_cached_tokens(server: Server) -> None:
    begin = time.monotonic()
    answer = server.generate("another question entirely", pool="p", ratio=0.5)
    waited = (time.monotonic() - begin) * 1e3
    info, meta = ext(answer), answer["meta_info"]
    blocks = {block["id"]: block for block in server.pool("p")["blocks"]}
    assert info["pool"] == "p" and info["version"] == 1 and info["blocks"][0] == 0 and len(info["blocks"]) == 2
    assert info["stitched_tokens"] == sum(blocks[b]["tokens"] for b in info["blocks"])
    assert meta["cached_tokens"] == info["stitched_tokens"]
    assert 0 <= info["retrieval_ms"] < waited and 0 < info["tokenization_ms"] < waited
    assert meta["prompt_tokens"] > info["stitched_tokens"]


def test_the_profiler_runs(server: Server, tmp_path: Path) -> None:
    """SGLang asks the platform what there is to profile."""
    wanted = {"output_dir": str(tmp_path), "activities": ["CPU"], "with_stack": False}
    assert server.call("POST", "/start_profile", json=wanted).ok
    server.generate("a question under the profiler", pool="p")
    assert server.call("POST", "/stop_profile").ok
    until(lambda: list(tmp_path.rglob("*.json.gz")))
    server.generate("one more question", pool="p")


def test_batches_and_parallel_samples(server: Server) -> None:
    body = {
        "text": [QUESTION, "where is my refund?", "open an account"],
        "sampling_params": {"max_new_tokens": 6, "temperature": 0, "custom_params": {"pool": "p", "ratio": 0.5}},
    }
    batch = server.json("POST", "/generate", json=body)
    single = [server.json("POST", "/generate", json={**body, "text": text}) for text in body["text"]]
    assert [a["text"] for a in batch] == [a["text"] for a in single]
    assert [ext(a)["blocks"] for a in batch] == [ext(a)["blocks"] for a in single]
    body["sampling_params"]["n"] = 2
    twice = server.json("POST", "/generate", json=body)
    assert [a["text"] for a in twice] == [a["text"] for a in single for _ in range(2)]
    assert [ext(a)["blocks"] for a in twice] == [ext(a)["blocks"] for a in single for _ in range(2)]
    # one pool a prompt, and none for one of them
    params = [dict(body["sampling_params"], n=1) for _ in range(3)]
    params[1] = {"max_new_tokens": 6, "temperature": 0}
    params[2]["custom_params"] = {"pool": "p", "blocks": 1}
    mixed = server.json("POST", "/generate", json={"text": body["text"], "sampling_params": params})
    assert "sglang_ext" not in mixed[1]["meta_info"] and ext(mixed[2])["blocks"] == [0]
    assert server.pool("p")["requests_in_flight"] == 0


def test_batches_of_token_ids(server: Server) -> None:
    own = [[20, 30, 40], [50, 60]]
    params = {"max_new_tokens": 5, "temperature": 0, "custom_params": {"pool": "p", "query": "card"}}
    batch = server.json("POST", "/generate", json={"input_ids": own, "sampling_params": params})
    for ids, answer in zip(own, batch, strict=True):
        single = server.json("POST", "/generate", json={"input_ids": ids, "sampling_params": params})
        assert answer["text"] == single["text"] and ext(answer)["blocks"] == ext(single)["blocks"]


def test_the_whole_prompt_is_what_is_counted_and_shown(server: Server) -> None:
    """The schedulers put the blocks' tokens in front; who asks for the prompt or for too much is told of all of it."""
    known = {block["id"]: block["token_ids"] for block in server.pool("p", tokens=True)["blocks"]}
    own = [20, 30, 40]
    custom = {"pool": "p", "block_ids": [0, 3, 1]}
    expected = [*known[0], *known[3], *known[1], *own]
    params: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, "custom_params": custom}
    body = {"input_ids": own, "sampling_params": params, "return_prompt_token_ids": True}
    single = server.json("POST", "/generate", json=body)
    twice = server.json("POST", "/generate", json={**body, "sampling_params": {**params, "n": 2}})
    batch = server.json("POST", "/generate", json={**body, "input_ids": [own, own]})
    for answer in (single, *twice, *batch, *server.stream(body)):
        assert answer["prompt_token_ids"] == expected
        assert answer["meta_info"]["prompt_tokens"] == len(expected)
    plain = server.json("POST", "/generate", json={**body, "sampling_params": {"max_new_tokens": 1}})
    assert plain["prompt_token_ids"] == own

    def refusal(max_new_tokens: int) -> str:
        asked = {**params, "max_new_tokens": max_new_tokens}
        refused = server.call("POST", "/generate", json={**body, "sampling_params": asked})
        assert refused.status_code == 400, refused.text
        return refused.text

    assert f"{len(expected)} tokens from the input" in refusal(CONTEXT - len(expected) + 1)


def test_streaming(server: Server) -> None:
    whole = server.generate(QUESTION, 200, pool="p")  # the tokenizer merges tokens that come while it is held up
    events = list(server.stream(server.payload(QUESTION, 200, pool="p")))
    assert len(events) > 3 and all(ext(event)["pool"] == "p" for event in events)
    assert answer_tokens(events[-1]) == answer_tokens(whole)


def test_token_ids_are_what_the_text_renders_to(server: Server) -> None:
    from tests.oracle.models import load_tokenizer

    tokenizer = load_tokenizer(model())
    ids = tokenizer(QUESTION + "\nLabel:", add_special_tokens=False)["input_ids"]
    text = server.generate(QUESTION, pool="p", ratio=0.5)
    raw = server.generate(QUESTION + "\nLabel:", pool="p", ratio=0.5, raw=True, query=QUESTION)
    own = server.generate(list(ids), pool="p", ratio=0.5, query=QUESTION)
    chosen = server.generate(list(ids), pool="p", block_ids=ext(text)["blocks"])
    for other in (raw, own, chosen):
        assert ext(other)["blocks"] == ext(text)["blocks"]
        assert answer_tokens(other) == answer_tokens(text)


def test_orders_are_views_of_one_selection(server: Server) -> None:
    seen = {
        order: ext(server.generate(QUESTION, pool="p", blocks=4, order=order))["blocks"]
        for order in ("pool", "low_to_high", "high_to_low", "reversed")
    }
    assert seen["pool"] == [0, 1, 2, 3] and seen["reversed"] == [0, 3, 2, 1]
    assert seen["low_to_high"][1:] == seen["high_to_low"][1:][::-1]
    assert all(order[0] == 0 for order in seen.values())


@pytest.mark.parametrize("retriever", ["bm25", "bm25:stem+stop_words", "random", "all"])
@pytest.mark.parametrize("granularity", ["block", "example"])
def test_retrievers(server: Server, retriever: str, granularity: str) -> None:
    answer = server.generate(QUESTION, pool="p", retriever=retriever, granularity=granularity)
    assert ext(answer)["stitched_tokens"] > 0 and len(answer_tokens(answer)) == 8
    if retriever == "all":
        assert ext(answer)["stitched_tokens"] == server.pool("p")["tokens"]


def test_examples_are_cut_out_of_their_blocks(server: Server) -> None:
    answer = server.generate(DEMOS[20]["input"], pool="p", granularity="example", blocks=2)
    blocks = server.pool("p", tokens=True)["blocks"]
    home = next(b for b in blocks if "d20" in b["demonstrations"])
    assert home["id"] in ext(answer)["blocks"] and 0 < ext(answer)["stitched_tokens"] < server.pool("p")["tokens"]


LABELS = ("card", "card issue", "card issue deep", "c")


def test_constrained_answers_are_always_labels(server: Server) -> None:
    """Labels that begin others among them; a random model, sampled hot, would say anything else."""
    items = [{"input": f"{i} thing", "output": LABELS[i % 4]} for i in range(12)]
    server.put("labels", items, block_size=4)
    seen = set()
    for index in range(30):
        params = {"temperature": 2.0, "max_new_tokens": 32}
        params["custom_params"] = {"pool": "labels", "constrain": "labels", "ratio": 1.0}
        text = server.json("POST", "/generate", json={"text": f"thing {index}", "sampling_params": params})["text"]
        assert text.strip() in LABELS, repr(text)
        seen.add(text.strip())
    assert len(seen) >= 3, f"sampling at temperature 2 only ever gave {seen}"
    server.json("DELETE", "/v1/pools/labels")


def test_label_probabilities(server: Server) -> None:
    """They sum to one, and are the shares of directly scored texts; the constrained greedy answer is a label."""
    answer = server.generate(QUESTION, 32, pool="p", ratio=0.5, constrain="labels", label_probs=True)
    probs = ext(answer)["label_probs"]
    assert set(probs) == {d["output"] for d in DEMOS} and sum(probs.values()) == pytest.approx(1.0)
    tokenizer = models.load_tokenizer(model())
    prompt = tokenizer(QUESTION + "\nLabel:", add_special_tokens=False)["input_ids"]
    scores = {}
    for label in probs:
        ids = tokenizer(f" {label}\n\n", add_special_tokens=False)["input_ids"]
        body = server.payload([*prompt, *ids], 1, pool="p", block_ids=ext(answer)["blocks"])
        values = server.json("POST", "/generate", json=body)["meta_info"]["input_token_logprobs"]
        assert [token for _, token, *_ in values[-len(ids) :]] == ids
        scores[label] = math.exp(sum(value for value, *_ in values[-len(ids) :]))
    total = sum(scores.values())
    for label, prob in probs.items():
        assert prob == pytest.approx(scores[label] / total, rel=1e-3, abs=1e-6)


# --------------------------------------------------------------------------- the OpenAI client


def test_completions_through_the_openai_client(server: Server, client: openai.OpenAI) -> None:
    expected = server.generate(QUESTION, 8, pool="p", ratio=0.5)["text"]
    common = {"model": "m", "prompt": QUESTION, "max_tokens": 8, "temperature": 0}
    extra = {"custom_params": {"pool": "p", "ratio": 0.5}, "ignore_eos": True}
    answer = client.completions.create(**common, extra_body=extra)
    assert answer.choices[0].text == expected
    assert answer.usage.prompt_tokens_details.cached_tokens > 100
    streamed = client.completions.create(**common, extra_body=extra, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == expected
    with pytest.raises(openai.NotFoundError, match=r"nope.*p"):
        client.completions.create(**common, extra_body={"custom_params": {"pool": "nope"}})


def test_chat_and_its_second_turn(server: Server, client: openai.OpenAI) -> None:
    extra = {"custom_params": {"pool": "p", "ratio": 0.5}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    common = {"model": "m", "max_tokens": 10, "temperature": 0, "extra_body": extra}
    first = client.chat.completions.create(messages=messages, **common)
    assert first.usage.prompt_tokens_details.cached_tokens > 100
    again = client.chat.completions.create(messages=messages, **common)
    assert again.choices[0].message.content == first.choices[0].message.content
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "and why is that?"},
    ]
    second = client.chat.completions.create(messages=messages, **common)
    # the second turn hits all of the first prompt (but perhaps its last token)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1
    streamed = client.chat.completions.create(messages=messages, stream=True, **common)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == second.choices[0].message.content


def test_chat_constrained(client: openai.OpenAI) -> None:
    extra = {"custom_params": {"pool": "p", "constrain": "labels", "label_probs": True}, "return_meta_info": True}
    question: list[Any] = [{"role": "user", "content": QUESTION}]
    answers = {
        limit: client.chat.completions.create(model="m", max_tokens=limit, messages=question, extra_body=extra)
        for limit in (32, 1)  # the grammar ends the answer, not the limit
    }
    texts = {answer.choices[0].message.content for answer in answers.values()}
    assert len(texts) == 1 and texts <= {d["output"] for d in DEMOS}
    probs = answers[1].choices[0].model_extra["meta_info"]["sglang_ext"]["label_probs"]
    assert set(probs) == {d["output"] for d in DEMOS} and sum(probs.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_label_is_sampled_only_when_a_temperature_is_named(client: openai.OpenAI, route: str) -> None:
    """OpenAI's default temperature of 1 is not meant for a label; an explicit one is obeyed."""

    def answers(**named: float) -> set[str | None]:
        common: dict[str, Any] = {
            "model": "m",
            "extra_body": {"custom_params": {"pool": "p", "constrain": "labels"}},
            **named,
        }
        if route == "completions":
            return {client.completions.create(prompt=QUESTION, **common).choices[0].text.strip() for _ in range(12)}
        messages = [{"role": "user", "content": QUESTION}]
        return {
            client.chat.completions.create(messages=messages, **common).choices[0].message.content for _ in range(12)
        }

    greedy = answers(temperature=0)
    assert len(greedy) == 1 and answers() == greedy
    assert len(answers(temperature=2)) > 1


def test_only_a_system_message_stands_before_the_first_question(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": QUESTION}]
    with pytest.raises(openai.BadRequestError, match="only system and developer messages"):
        client.chat.completions.create(model="m", messages=messages, extra_body={"custom_params": {"pool": "p"}})


def test_metrics_and_counters(server: Server) -> None:
    def shown() -> dict[str, float]:
        text = server.call("GET", "/metrics").text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("sglang_ext:")]
        return {name: float(value) for name, value in lines}

    def counter(values: dict[str, float], name: str) -> float:
        return sum(value for key, value in values.items() if key.startswith(f"sglang_ext:{name}") and 'pool="p"' in key)

    def gauge(values: dict[str, float], name: str) -> float:
        return next(value for key, value in values.items() if key.startswith(f"sglang_ext:{name}{{"))

    before, state = shown(), server.state()["sglang_ext"]
    answer = server.generate("a question nobody asked before", 4, pool="p", ratio=0.5)
    after, now = shown(), server.state()["sglang_ext"]
    stitched = ext(answer)["stitched_tokens"]
    assert counter(after, "pool_requests_total") == counter(before, "pool_requests_total") + 1
    assert counter(after, "stitched_tokens_total") == counter(before, "stitched_tokens_total") + stitched
    assert counter(after, "retrieval_seconds_count") == counter(before, "retrieval_seconds_count") + 1
    assert counter(after, "pool_tokens") == server.pool("p")["tokens"]
    assert gauge(after, "held_tokens") > 0 and gauge(after, "blocks_resident") > 0
    assert now["saved_tokens"] == state["saved_tokens"] + stitched
    assert now["block_hits"] == state["block_hits"] + len(ext(answer)["blocks"])
    assert now["stitch_seconds"] > state["stitch_seconds"] and now["retrieval_seconds"] > state["retrieval_seconds"]
    assert now["requests"] == state["requests"] + 1


def test_system_prompts(server: Server, client: openai.OpenAI) -> None:
    def ask(pool: str, *messages: tuple[str, str]) -> Any:
        listed: list[Any] = [{"role": role, "content": content} for role, content in messages]
        return client.chat.completions.create(
            model="m", max_tokens=6, temperature=0, messages=listed, extra_body={"custom_params": {"pool": pool}}
        )

    own = ask("p", ("system", "be brief"), ("user", QUESTION))
    server.put("brief", DEMOS, block_size=6, system="be brief")
    given = ask("brief", ("system", "be brief"), ("user", QUESTION))
    implied = ask("brief", ("user", QUESTION))
    assert given.choices[0].message.content == implied.choices[0].message.content
    assert given.usage.prompt_tokens == implied.usage.prompt_tokens == own.usage.prompt_tokens
    assert own.choices[0].message.content == given.choices[0].message.content
    assert not server.pool("brief")["headers"] and len(server.pool("p")["headers"]) == 1
    with pytest.raises(openai.BadRequestError, match="a system message stands behind the first user message"):
        ask("brief", ("user", QUESTION), ("system", "be long"))
    with pytest.raises(openai.BadRequestError, match="user"):
        ask("brief", ("assistant", "hello"))
    server.json("DELETE", "/v1/pools/brief")


def test_chat_refuses_what_pools_do_not_serve(server: Server) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "custom_params": {"pool": "p"}}
    answer = server.call("POST", "/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "image" in error_of(answer), answer.text
