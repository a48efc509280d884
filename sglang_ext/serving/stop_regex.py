"""Patterns of `stop_regex`: SGLang searches the end of the answer for them after every token, with Python's `re`.

`re` tries one way of matching after the other and cannot be interrupted: `(a+)+b` takes time exponential in the text's
length, and every other request of the server waits. So a pattern must say how long a match can be, and have few ways to
match; the two numbers bound a search.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

if sys.version_info >= (3, 11):
    import re._constants as codes
    import re._parser as parser
else:
    import sre_constants as codes
    import sre_parse as parser

MAX_CHARACTERS = 1_000  # of a match
MAX_WAYS = 10_000  # to match at one place
MAX_WORK = 50_000  # ways of all patterns of a request, times the characters of the longest match

_SINGLE = (codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY)


def check_stop_regex(patterns: Sequence[str]) -> None:
    """ValueError, with what to change, for a pattern that is none, or for patterns that take too long to search for."""
    bounds = [_checked(pattern) for pattern in patterns]
    # All of them are searched for in as many characters as the longest match has.
    work = sum(ways for _, ways in bounds) * max((characters for characters, _ in bounds), default=0)
    if work > MAX_WORK:
        raise ValueError(
            f"stop_regex: the {len(patterns)} patterns match in so many ways and characters that a search takes up to"
            f" {_shown(work)} steps; expected at most {MAX_WORK} (ways of all together, times the longest match):"
            " they are searched for after every token. Use fewer, or bound their repeats more closely"
        )


def _checked(pattern: str) -> tuple[int, int]:
    """(characters of the longest match, ways of matching at one place) of a pattern that may be searched for."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes, which `re` takes
            parsed = parser.parse(pattern)
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"stop_regex={pattern[:80]!r} is no regular expression: {error}") from None
    characters, ways = _bounds(parsed, pattern)
    if characters > MAX_CHARACTERS or ways > MAX_WAYS:
        raise ValueError(
            f"stop_regex={pattern[:80]!r} may match up to {_shown(characters)} characters in {_shown(ways)} ways;"
            f" expected at most {MAX_CHARACTERS} and {MAX_WAYS}: it is searched for after every token. Bound its"
            r" repeats, as in \d{1,9} instead of \d+"
        )
    return characters, ways


def _shown(number: int) -> str:
    return str(number) if number < 10**9 else "any number of"


def _bounds(parsed: parser.SubPattern, pattern: str) -> tuple[int, int]:
    """(characters of the longest match, ways of matching at one place), both capped."""
    characters, ways = 0, 1
    for code, value in parsed:
        more, times = _item(code, value, pattern)
        characters, ways = min(characters + more, 10**9), min(ways * times, 10**9)
    return characters, ways


def _item(code: int, value: Any, pattern: str) -> tuple[int, int]:
    if code in _SINGLE:
        return 1, 1
    if code == codes.AT:
        return 0, 1
    if code == codes.SUBPATTERN:
        return _bounds(value[-1], pattern)
    if code == codes.BRANCH:
        found = [_bounds(branch, pattern) for branch in value[1]]
        return max(each[0] for each in found), sum(each[1] for each in found)
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return 0, _bounds(value[1], pattern)[1]
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        low, high, inner = value
        characters, ways = _bounds(inner, pattern)
        if high == codes.MAXREPEAT or high > MAX_CHARACTERS:
            return 10**9, 10**9
        return min(characters * high, 10**9), _repeated(ways, low, high)
    raise ValueError(f"stop_regex={pattern[:80]!r}: {str(code).lower()} is not served; write it without")


def _repeated(ways: int, low: int, high: int) -> int:
    """Ways of matching between `low` and `high` times what matches in `ways` ways."""
    total, power = 0, 1
    for times in range(high + 1):
        total += power if times >= low else 0
        power *= ways
        if total > 10**9 or power > 10**9:
            return 10**9
    return total
