"""Sampling parameters of a request: types, ranges and sizes of each, before anything of SGLang sees them."""

from __future__ import annotations

import functools
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

from sglang_ext.config import unknown_names
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.stop_regex import check_stop_regex
from sglang_ext.types import Json, Options

GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")
INT32 = 1 << 31

MAX_STOPS = 256  # each is looked for after every token
MAX_STOP_CHARACTERS = 4_096
MAX_GRAMMAR_CHARACTERS = 1 << 18
MAX_SCHEMA_DEPTH = 64
MAX_BIAS = 1e9  # in float32, and divided by the least temperature, it is still a number
LEAST_REPETITION_PENALTY = 0.01  # logits are divided by it


@functools.cache
def _sampling_types() -> dict[str, Any]:
    """The type of every sampling parameter that a client may set."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    hints = get_type_hints(SamplingParams)
    # Fields that SGLang fills in itself; `is_normalized` would have it skip its own checks.
    own = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}
    return {name: hints[name] for name in SamplingParams.__struct_fields__ if name not in own}


def check_sampling(params: Options, vocabulary: int) -> None:
    """One `sampling_params`: names, types, and what SGLang's own `verify` leaves to the schedulers.

    Raises:
        ValueError: says which parameter has which value, and what was expected.
    """
    import msgspec

    types = _sampling_types()
    problem = unknown_names(params, types, "sampling_params")
    if problem:
        raise problem
    for name, value in params.items():
        if value is None:
            continue
        if name == "custom_params" and not isinstance(value, dict):
            raise ValueError(f"custom_params={reprlib.repr(value)}: expected an object of options")
        try:
            msgspec.convert(value, types[name])
        except (msgspec.ValidationError, TypeError) as error:
            raise ValueError(f"{name}={reprlib.repr(value)}: {error}") from None
        if name in _SAMPLING_RULES:
            _SAMPLING_RULES[name](value, vocabulary)
    given = [name for name in GRAMMARS if params.get(name)]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given: choose one")


def check_id(id: int, vocabulary: int, what: str) -> None:
    """ValueError for a token id that the vocabulary does not have; `what` names the parameter."""
    if not 0 <= id < vocabulary:
        raise ValueError(f"{what}: token id {id}: the model's vocabulary has ids 0 to {vocabulary - 1}")


def _between(name: str, low: float, high: float) -> Callable[[float, int], None]:
    def look(value: float, _vocabulary: int) -> None:
        if not low <= value <= high:  # NaN is neither
            raise ValueError(f"{name}={value}: expected {low} to {high}")

    return look


def _finite(name: str) -> Callable[[float, int], None]:
    def look(value: float, _vocabulary: int) -> None:
        if not math.isfinite(value):
            raise ValueError(f"{name}={value}: expected a finite number")

    return look


def _check_stop_ids(value: Iterable[int], vocabulary: int) -> None:
    for id in value:
        check_id(id, vocabulary, "stop_token_ids")


def _check_bias(value: Mapping[str, float], vocabulary: int) -> None:
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and key == str(int(key))):
            raise ValueError(f"logit_bias: key {reprlib.repr(key)}: expected a token id, without zeros in front")
        check_id(int(key), vocabulary, "logit_bias")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"logit_bias[{key!r}]={bias}: expected {-MAX_BIAS:g} to {MAX_BIAS:g}")


def _check_stop(value: str | list[str], _vocabulary: int) -> None:
    listed = [value] if isinstance(value, str) else value
    if len(listed) > MAX_STOPS:
        raise PoolError(f"stop has {len(listed)} strings; the server looks for at most {MAX_STOPS}", 413)
    longest = max((len(text) for text in listed), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise PoolError(f"a string of stop has {longest} characters; expected at most {MAX_STOP_CHARACTERS}", 413)


def _check_stop_regex(value: str | list[str], vocabulary: int) -> None:
    _check_stop(value, vocabulary)
    check_stop_regex([value] if isinstance(value, str) else value)


def _grammar(name: str) -> Callable[[str, int], None]:
    def look(value: str, _vocabulary: int) -> None:
        if len(value) > MAX_GRAMMAR_CHARACTERS:
            raise PoolError(f"{name} has {len(value)} characters; expected at most {MAX_GRAMMAR_CHARACTERS}", 413)
        if name in ("json_schema", "structural_tag") and value:
            _check_json(name, value)

    return look


def _check_json(name: str, text: str) -> None:
    try:
        deep = _depth(json.loads(text), MAX_SCHEMA_DEPTH)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if deep > MAX_SCHEMA_DEPTH:
        raise ValueError(f"{name} is nested too deeply: expected at most {MAX_SCHEMA_DEPTH} levels")


def _depth(value: Json, most: int) -> int:
    """Levels of lists and objects; not counted beyond `most` + 1."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None or most < 0:
        return 0
    return 1 + max((_depth(item, most - 1) for item in inner), default=0)


def _unserved(name: str) -> Callable[[Json, int], None]:
    def look(value: Json, _vocabulary: int) -> None:
        if value:
            raise ValueError(f"{name} is not served by this server: leave it out")

    return look


_SAMPLING_RULES: dict[str, Callable[[Json, int], None]] = {
    "beam_width": _between("beam_width", 1, 1),  # rows of a batch that belong to no request of their own
    "ebnf_full_assistant": _unserved("ebnf_full_assistant"),
    "watermark": _unserved("watermark"),
    "temperature": _finite("temperature"),
    "top_k": _between("top_k", -1, INT32 - 1),
    "n": _between("n", 1, INT32 - 1),
    "repetition_penalty": _between("repetition_penalty", LEAST_REPETITION_PENALTY, 2.0),
    "stream_interval": _between("stream_interval", 1, INT32 - 1),
    "stop": _check_stop,
    "stop_regex": _check_stop_regex,
    "stop_token_ids": _check_stop_ids,
    "logit_bias": _check_bias,
    **{name: _grammar(name) for name in GRAMMARS},
}
