"""What a generation request may say: `serving.requests` on SGLang's own dataclass, without a server."""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_ext.attention.policy import Policy
from sglang_ext.config import TOLD
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.namespaces import join_salt
from sglang_ext.serving.requests import SERVED, Facts, check, check_ids, check_tokens
from sglang_ext.serving.sampling import _SAMPLING_RULES
from sglang_ext.serving.stop_regex import check_stop_regex
from sglang_ext.serving.tokenizer import around_validate_one_request


class _Policy(Policy):
    request_options = frozenset({"p1"})


FACTS = Facts(
    vocabulary=100,
    context=64,
    policy=_Policy(),
    media=False,
    max_prompts=8,
    max_logprobs=1_000,
    default_max_new_tokens=16,
)


def request(**fields: Any) -> GenerateReqInput:
    fields = {"text": "a"} | fields
    if fields.get("input_ids") is not None and fields["text"] == "a":
        del fields["text"]
    return GenerateReqInput(**fields)


def sampling(**params: Any) -> GenerateReqInput:
    return request(sampling_params=params)


GOOD: list[dict[str, Any]] = [
    {},
    {"text": ["a", "b"], "rid": ["1", "2"], "logprob_start_len": [0, 3], "return_logprob": True},
    {"input_ids": [0, 99], "sampling_params": {"n": 8}},
    {"input_ids": [[1], [2, 3]], "token_ids_logprob": [[1], [2]], "return_logprob": [True, False]},
    {"sampling_params": {"max_new_tokens": None, "stop": ["a"], "stop_token_ids": [1], "logit_bias": {"1": -1e9}}},
    {"sampling_params": {"temperature": 0, "top_k": -1, "sampling_seed": -5, "min_p": None, "regex": "a+"}},
    {"sampling_params": {"custom_params": {"p1": 0.5}}},
    {"sampling_params": {"custom_params": {"pool": "p", "constrain": "labels", "p1": 1}}},
    {"sampling_params": {"custom_params": {"anything": [1]}}, "custom_logit_processor": "theirs"},
    {"sampling_params": {"stop_regex": [r"\d{1,9}", "yes|no"]}},
    {"priority": "5", "image_data": [], "bootstrap_room": None},
]


@pytest.mark.parametrize(
    "field", [each for each in fields(GenerateReqInput) if each.name not in SERVED], ids=lambda each: each.name
)
def test_what_is_not_served_has_its_default_or_is_refused(field: Any) -> None:
    """Chats of SGLang 0.5.18 say False of a field whose default is None: nothing else may come of it."""
    asked = request(**{field.name: False})
    if field.default in (None, False):
        check(asked, FACTS)
        assert getattr(asked, field.name) is field.default
    else:
        with pytest.raises(ValueError, match=f"{field.name} is not served"):
            check(asked, FACTS)


@pytest.mark.parametrize("fields", GOOD)
def test_what_can_be_served_passes_as_it_is(fields: dict[str, Any]) -> None:
    asked = request(**fields)
    check(asked, FACTS)
    assert not hasattr(asked, "is_single"), "SGLang normalises it afterwards, once"
    asked.normalize_batch_and_arguments()


def test_values_take_the_type_of_their_field() -> None:
    asked = request(priority="5")
    check(asked, FACTS)
    assert asked.priority == 5


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": []}, "empty"),
    ({"text": "x", "input_ids": []}, "input_ids is empty"),
    ({"input_ids": [[1], []]}, "input_ids is empty"),
    ({"input_ids": [-1]}, r"input_ids \[-1\]: the model's vocabulary has ids 0 to 99"),
    ({"input_ids": [[1], [100]]}, r"\[100\]"),
    ({"input_ids": [10**30]}, "int64"),
    ({"input_ids": [[1, [2]]]}, "input_ids"),
    ({"input_ids": [1, "2"]}, r"input_ids=\[1, '2'\]: expected whole numbers"),
    ({"input_ids": [1, 2.0]}, "whole numbers"),
    ({"input_ids": [1, None]}, "whole numbers"),
    ({"input_ids": [1, -(10**30)]}, "int64"),
    ({"input_ids": [1.5]}, "input_ids="),
    ({"input_ids": [[1], 2]}, "input_ids"),
    ({"input_ids": "12"}, "input_ids"),
    ({"input_ids": {"1": 2}}, "input_ids"),
    ({"input_ids": [[1], range(3)]}, "input_ids"),
    ({"input_ids": [[1], None]}, "input_ids"),
    ({"text": ""}, "prompt is empty"),
    ({"text": ["a", ""]}, "prompt is empty"),
    ({"text": 5}, "text=5"),
    ({"text": "\ud800"}, "lone surrogate"),
    ({"rid": "\ud800"}, "lone surrogate"),
    ({"rid": "sglang-ext-1"}, "server's own"),
    ({"rid": ["a", "b"]}, "for one prompt"),
    ({"top_logprobs_num": [1]}, "top_logprobs_num.*for one prompt"),
    ({"text": ["a", "b"], "logprob_start_len": [0, [1]]}, "logprob_start_len"),
    ({"text": ["a", "b"], "rid": ["a", "a"]}, "Duplicate"),
    ({"text": ["a", "b"], "sampling_params": []}, "one for each"),
    ({"text": ["a", "b"], "top_logprobs_num": [1]}, "one for each"),
    ({"logprob_start_len": -5}, "logprob_start_len=-5"),
    ({"top_logprobs_num": -1}, "top_logprobs_num=-1"),
    ({"top_logprobs_num": 101}, "expected 0 to 100"),
    ({"token_ids_logprob": [100]}, "token_ids_logprob"),
    ({"token_ids_logprob": "x"}, "token_ids_logprob"),
    ({"priority": 10**30}, "64 bits"),
    ({"session_params": {"id": "s"}}, "session_params is not served"),
    ({"input_embeds": [[1.0]]}, "input_embeds is not served"),
    ({"http_worker_ipc": "ipc:///tmp/x"}, "http_worker_ipc is not served"),
    ({"bootstrap_room": 5}, "bootstrap_room is not served"),
    ({"image_data": "x"}, "reads text only"),
    ({"lora_path": 5}, "lora_path"),
    ({"sampling_params": "x"}, "sampling_params"),
]
BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_new_token": 5}, "did you mean max_new_tokens"),
    ({"is_normalized": True}, "unknown option is_normalized"),
    ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
    ({"max_new_tokens": "5"}, "max_new_tokens='5'"),
    ({"max_new_tokens": 10**30}, "64 bits"),
    ({"min_new_tokens": []}, "min_new_tokens"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"top_k": 2**31}, "top_k"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"stream_interval": 0}, "stream_interval=0"),
    ({"n": 0}, "n=0"),
    ({"n": True}, "n=True"),
    ({"stop": 5}, "stop=5"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "key 'x'"),
    ({"logit_bias": {"²": 1}}, "key"),
    ({"logit_bias": {"100": 1}}, "logit_bias"),
    ({"logit_bias": {"1": float("nan")}}, "nan"),
    ({"logit_bias": {"1": float("inf")}}, "inf"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"json_schema": "{"}, "not JSON"),
    ({"json_schema": "[" * 70 + "]" * 70}, "nested too deeply"),
    ({"regex": "a", "ebnf": "b"}, "choose one"),
    ({"stop_regex": "("}, "no regular expression"),
    ({"stop_regex": "(a+)+b"}, "Bound its repeats"),
    ({"custom_params": [1]}, "expected an object"),
    ({"custom_params": {"a": {"b": {"c": 1}}}}, "custom_params"),
    ({"custom_params": {"pools": "p"}}, "did you mean pool"),
    ({"custom_params": {"constrain": "labels"}}, "constrain without a pool"),
    ({"custom_params": {"p2": 0.5}}, "unknown option p2"),
    ({"custom_params": {"pool": "p", "anything": 1}}, "unknown option anything"),
    ({"custom_params": {"sglang_ext": "{}"}}, "server's own"),
    ({"custom_params": {"_chat_header": "x"}}, "unknown option _chat_header"),
]


@pytest.mark.parametrize(("fields", "message"), [*BAD, *(({"sampling_params": p}, m) for p, m in BAD_SAMPLING)])
def test_what_cannot_be_served_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(request(**fields), FACTS)


LIMITS: list[dict[str, Any]] = [
    {"sampling_params": {"n": 9}},
    {"text": ["a"] * 9},
    {"input_ids": [[1]] * 3, "sampling_params": {"n": 3}},
    {"input_ids": [[1]] * 3, "sampling_params": [{"n": 3}] * 3},
    {"sampling_params": {"n": 2**31 - 1}},
    {"sampling_params": {"stop": ["a"] * 100_000}},
    {"sampling_params": {"stop": "a" * 100_000}},
    {"sampling_params": {"regex": "a" * 1_000_000}},
    {"sampling_params": {f"a{number}": 1 for number in range(20_000)}},
    {"sampling_params": {"custom_params": {f"a{number}": 1 for number in range(20_000)}}},
    {"sampling_params": {"custom_params": {"pool": "p", "block_ids": [0] * 20_000}}},
    {"sampling_params": {"custom_params": {"pool": {"a": [[]] * 20_000}}}},
]


@pytest.mark.parametrize("fields", LIMITS)
def test_too_much_is_413(fields: dict[str, Any]) -> None:
    with pytest.raises(PoolError) as refused:
        check(request(**fields), FACTS)
    assert refused.value.status_code == 413


def test_an_error_names_some_of_many_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names, looked, near = {f"pool{number:04}": 1 for number in range(5000)}, list[str](), difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda name, *more: looked.append(name) or near(name, *more))
    with pytest.raises(ValueError, match=r"unknown option pool0000, .*pool0007 and 4992 more; known are") as refused:
        check(request(sampling_params={"custom_params": names}), FACTS)
    assert len(str(refused.value)) < 1000 and len(looked) == TOLD, "looking for near names takes long"


def prompt(**fields: Any) -> GenerateReqInput:
    found = request(rid=uuid.uuid4().hex, **fields)
    found.normalize_batch_and_arguments()
    return found


@pytest.mark.parametrize("ids", [[], None, [100], [5, -1]])
def test_ids_that_a_tokenizer_gave_are_looked_at_too(ids: Any) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        check_ids(ids, FACTS.vocabulary)


@pytest.mark.parametrize(
    ("sent", "leases"),
    [({}, ()), ({"input_ids": [1]}, ("a",)), ({"input_ids": [1]}, ())],
    ids=["text", "question", "image"],
)
def test_ids_that_a_request_did_not_have_are_looked_at(sent: dict[str, Any], leases: Sequence[str]) -> None:
    """Those of a text, those that a question over a pool became, and those into which SGLang writes an image.

    What the request sent was looked at before.
    """
    manager = SimpleNamespace(ext_facts=FACTS, ext_leases=dict.fromkeys(leases))
    asked = prompt(sampling_params={"max_new_tokens": 1}, **sent)
    asked.rid, seen = "a", []
    with pytest.raises(ValueError, match=r"input_ids \[100\]"):
        around_validate_one_request(lambda *args: seen.append(args), manager, asked, [1, 100])
    manager.ext_leases = {}
    asked.input_ids = [1, 100]
    around_validate_one_request(lambda *args: seen.append(args), manager, asked, asked.input_ids)
    assert seen == [(manager, asked, [1, 100])]


@pytest.mark.parametrize(("total", "limit"), [(10, 16), (60, 4), (64, 0)])
def test_a_request_without_a_limit_gets_the_servers(total: int, limit: int) -> None:
    asked = prompt(sampling_params={"max_new_tokens": None})
    check_tokens(asked, total, FACTS)
    assert asked.sampling_params["max_new_tokens"] == limit


def test_a_limit_of_its_own_and_sglangs_default_stay() -> None:
    for params in ({"max_new_tokens": 40}, {}):
        asked = prompt(sampling_params=dict(params))
        check_tokens(asked, 1, FACTS)
        assert asked.sampling_params == params


def test_log_probabilities_are_counted() -> None:
    fields = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 10}}
    check_tokens(prompt(top_logprobs_num=20, **fields), 40, FACTS)  # 50 positions
    for more in ({"top_logprobs_num": 21}, {"top_logprobs_num": 20, "token_ids_logprob": [1]}):
        with pytest.raises(PoolError) as refused:
            check_tokens(prompt(**more, **fields), 40, FACTS)
        assert refused.value.status_code == 413
    with pytest.raises(ValueError, match="the prompt has 3 tokens"):
        check_tokens(prompt(return_logprob=True, logprob_start_len=4), 3, FACTS)


@pytest.mark.parametrize("pattern", ["", "abc", r"\d{1,9}", "(yes|no){2}", "[.!?] {0,3}$", "(?=a{0,9})b", "a{1000}"])
def test_bounded_patterns_are_served(pattern: str) -> None:
    check_stop_regex([pattern])


@pytest.mark.parametrize(
    "pattern",
    ["(", "a+", "a*b", "(a{1,99}){1,99}", "(a|a){20}", "(a?){30}a{30}", "a{1001}", "(a)\\1", "(" * 5_000 + ")" * 5_000]
    + ["(a{0,9}){0,9}" * 9],
)
def test_patterns_that_a_search_may_take_too_long_for_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="stop_regex"):
        check_stop_regex([pattern])


@pytest.mark.parametrize(
    ("salt", "keys", "joined"),
    [(None, "k", "k"), ("s", None, "s"), ("s", "k", "sk"), ("s", ["a", None], ["sa", "s"])],
)
def test_a_salt_is_the_beginning_of_the_key(salt: Any, keys: Any, joined: Any) -> None:
    request = SimpleNamespace(cache_salt=salt, extra_key=keys)
    join_salt(request)
    assert request.extra_key == joined and request.cache_salt is None
    with pytest.raises(ValueError, match="cache_salt=7: expected a string"):
        join_salt(SimpleNamespace(cache_salt=7, extra_key=None))


@pytest.mark.parametrize("name", ["beam_width", "watermark", "ebnf_full_assistant"])
def test_what_newer_lines_sample_with_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        _SAMPLING_RULES[name](2, 100)
    _SAMPLING_RULES[name](1 if name == "beam_width" else False, 100)
