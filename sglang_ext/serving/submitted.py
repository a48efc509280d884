"""What a client submits for a pool: demonstrations and options, read from a JSON or JSON-lines body."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import orjson

from sglang_ext.config import PoolOptions, unknown_names
from sglang_ext.serving.layout import parse_jsonl
from sglang_ext.types import Json, Options

JSONL = ("application/jsonl", "application/x-ndjson", "application/x-jsonlines")


@dataclass(frozen=True)
class Submitted:
    """Demonstrations (JSON-like objects, not checked yet) and options of a pool.

    Attributes:
        wait: whether who submitted them waits until they are encoded.
    """

    demonstrations: Iterable[Json]
    options: Options
    wait: bool = True


Source = Callable[[], Submitted]
"""Reads what was submitted. That takes up to seconds, so it is called away from the event loop."""


def read_body(raw: bytes, content_type: str, query: Mapping[str, str]) -> Submitted:
    """What a request's body says.

    Args:
        raw: a JSON object with `demonstrations`, options and `wait`; or JSON lines, a demonstration each.
        content_type: of the request; one of `JSONL` for JSON lines.
        query: the request's query parameters: of JSON lines the options and `wait`, of a JSON object nothing.

    Raises:
        ValueError: it is neither, or an option stands in the wrong place or is of a wrong type.
    """
    if content_type.split(";")[0].strip().lower() in JSONL:
        problem = unknown_names(query, {field.name for field in fields(PoolOptions)} | {"wait"}, "query parameters")
        if problem:
            raise problem
        options = {name: query_option(name, text) for name, text in query.items() if name != "wait"}
        return Submitted(parse_jsonl(_text(raw)), options, query_flag(query, "wait", True))
    refuse_query(query, "a JSON body has its options beside the demonstrations; JSON lines have theirs in the query")
    data = read_json(raw, f"; for JSON lines set Content-Type: {JSONL[0]}")
    if not isinstance(data, dict) or not isinstance(data.get("demonstrations"), list):
        raise ValueError('the body must be an object with a list "demonstrations", and options beside it')
    demonstrations, wait = data.pop("demonstrations"), data.pop("wait", True)
    if not isinstance(wait, bool):
        raise ValueError(f"wait={wait!r}: expected true or false")
    return Submitted(demonstrations, data, wait)


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8 ({error.reason} at byte {error.start})") from error


def read_json(raw: bytes, hint: str = "") -> Json:
    """What a JSON body says; ValueError, which ends with `hint`, where it is none."""
    try:
        return orjson.loads(raw.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error.msg} at line {error.lineno}{hint}") from None


def refuse_query(query: Mapping[str, str], why: str, known: tuple[str, ...] = ()) -> None:
    """ValueError for query parameters that are not among `known`."""
    strange = sorted(set(query) - set(known))
    if strange:
        raise ValueError(f"query parameters {', '.join(strange)}: expected {', '.join(known) or 'none'}: {why}")


def query_flag(query: Mapping[str, str], name: str, default: bool) -> bool:
    """A true or false of a query string."""
    value = query.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise ValueError(f"query parameter {name}={value!r}: expected true or false")
    return value.lower() in ("true", "1")


def query_option(name: str, text: str) -> Json:
    """An option of a pool from a query string, in the type it has in PoolOptions."""
    kinds = {field.name: str(field.type) for field in fields(PoolOptions)}
    kind = kinds.get(name, "str")
    if kind.startswith("str"):
        return text
    try:
        return json.loads(text.lower() if kind == "bool" else text)
    except json.JSONDecodeError as error:
        raise ValueError(f"query parameter {name}={text!r}: expected {kind}") from error
