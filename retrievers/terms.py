"""How text becomes BM25 terms: its words, and what an analyzer makes of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang_ext.retrievers.english import STOP_WORDS, stem

# Scripts written without spaces between words (kana, Han) give one term a character: a whole clause as one
# term would never match anything.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TERM = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def terms(text: str) -> list[str]:
    """Case-folded words of `text`, in order, repetitions kept; punctuation and white space separate words."""
    return _TERM.findall(text.casefold())


ANALYSES = ("stem", "stop_words")
"""What an analyzer may do with words."""
_DROPPED = frozenset(part for word in STOP_WORDS for part in terms(word))


@dataclass(frozen=True)
class Analyzer:
    """What becomes of the words of a text. By default they are its terms; both options are for English.

    Attributes:
        stem: words with one stem are one term (`english.stem`).
        stop_words: stop words are dropped (`english.STOP_WORDS`), and the parts of contractions among them: "don", "t".
    """

    stem: bool = False
    stop_words: bool = False

    @classmethod
    def parse(cls, argument: str) -> Analyzer:
        """An analyzer from names of `ANALYSES` that are joined by "+", each once at most, in any order.

        Raises:
            ValueError: another name, none, or one that is given twice.
        """
        names = argument.split("+")
        if unknown := [name for name in names if name not in ANALYSES]:
            raise ValueError(f"unknown analysis {unknown[0]!r}; expected one or more of {', '.join(ANALYSES)}")
        if len(set(names)) < len(names):
            raise ValueError(f"{argument!r} names an analysis twice; expected each once at most")
        return cls(**dict.fromkeys(names, True))

    def __call__(self, text: str) -> list[str]:
        """The terms of `text`, in order, repetitions kept. Raises ValueError where `english.stem` does."""
        found = terms(text)
        if self.stop_words:
            found = [word for word in found if word not in _DROPPED]
        return list(map(stem, found)) if self.stem else found
