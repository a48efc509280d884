"""Random numbers that are a function of a key alone: the same in every process and version.

Python's hash() is salted by process, and NumPy's Generator methods may change between releases; SHA-256 and
the raw stream of a NumPy bit generator are fixed.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def digest(*key: int | str) -> int:
    """A 256-bit integer from `key`; keys that differ in any part, or in where parts begin, differ."""
    # repr keeps 1 and "1" apart; surrogatepass because JSON may bring lone surrogates.
    return int.from_bytes(hashlib.sha256(repr(key).encode("utf-8", "surrogatepass")).digest(), "big")


def uniform(n: int, *key: int | str) -> NDArray[np.float64]:
    """`n` numbers, uniform in [0, 1): float64 [n]. A longer draw of the same key begins with the shorter."""
    raw = np.random.PCG64(digest(*key)).random_raw(n)
    return np.asarray((raw >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def permutation(n: int, *key: int | str) -> list[int]:
    """0..n-1 in random order."""
    order: list[int] = np.argsort(uniform(n, *key), kind="stable").tolist()
    return order
