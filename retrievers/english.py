"""English words for retrieval: their stems, and those that say too little to be searched for."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

LONGEST = 64
"""Characters of the longest word that is stemmed: no English one is longer, and clients choose which are remembered."""

_STOP_WORDS = """
    a about above after again against all am an and any are aren't as at be because been before being below between
    both but by can't cannot could couldn't did didn't do does doesn't doing don't down during each few for from
    further had hadn't has hasn't have haven't having he he'd he'll he's her here here's hers herself him himself
    his how how's i i'd i'll i'm i've if in into is isn't it it's its itself let's me more most mustn't my myself no
    nor not of off on once only or other ought our ours ourselves out over own same shan't she she'd she'll she's
    should shouldn't so some such than that that's the their theirs them themselves then there there's these they
    they'd they'll they're they've this those through to too under until up very was wasn't we we'd we'll we're
    we've were weren't what what's when when's where where's which while who who's whom why why's with won't would
    wouldn't you you'd you'll you're you've your yours yourself yourselves
    """
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""The Snowball project's English stop words (snowballstem.org/algorithms/english/stop.txt; 3-clause BSD licence)."""


class Stemmer(Protocol):
    """The part of a stemmer of `snowballstemmer` that is used."""

    def stemWord(self, word: str) -> str:
        """The stem of a word in lower case."""
        ...


def stem(word: str) -> str:
    """The stem of a word in lower case, by Snowball's English stemmer (Porter2): "cards" and "card" have the same.

    A word of more than `LONGEST` characters is its own stem. Several threads may call this at a time.

    Raises:
        ValueError: snowballstemmer is not installed.
    """
    return word if len(word) > LONGEST else _stem(word)


@lru_cache(maxsize=65536)
def _stem(word: str) -> str:
    # A stemmer holds the word at hand, so that threads cannot share one; to make another takes a microsecond.
    return _new_stemmer().stemWord(word)


def _new_stemmer() -> Stemmer:
    try:
        from snowballstemmer import stemmer
    except ImportError as error:
        raise ValueError(
            f"the retriever bm25 with stem needs snowballstemmer ({error}); run: pip install sglang_ext[stem],"
            " or use bm25 or bm25:stop_words"
        ) from error
    new: Stemmer = stemmer("english")
    return new
