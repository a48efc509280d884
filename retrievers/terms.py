"""How text becomes BM25 terms."""

from __future__ import annotations

import re

# Scripts written without spaces between words (kana, Han) give one term a character: a whole clause as one
# term would never match anything.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TERM = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def terms(text: str) -> list[str]:
    """Case-folded words of `text`, in order, repetitions kept; punctuation and white space separate words."""
    return _TERM.findall(text.casefold())
