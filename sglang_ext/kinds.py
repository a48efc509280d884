"""Kinds of layers, told apart by what a system leaves to SGLang."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kinds:
    """Kinds of layers that SGLang's own code serves beside those that a system reads.

    Attributes:
        windows: whether these are layers with a sliding window, of the models `compat.layers.MIXED`.
        states: whether these are layers that keep a state, of the models `compat.layers.HYBRID`.
    """

    windows: bool = False
    states: bool = False
