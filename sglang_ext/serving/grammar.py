"""Constraining an answer to a pool's labels, with SGLang's grammar backend."""

from __future__ import annotations

import json
from collections.abc import Sequence


def label_grammar(labels: Sequence[str], lead: str, end: str) -> str:
    """An EBNF grammar of `lead`, one label, and `end`.

    What follows a label in the demonstrations (`end`) is part of the grammar: where one label begins another ("card",
    "card lost"), it is what tells the model's choice apart.

    Args:
        labels: at least one.
        lead: the white space an answer starts with.
        end: template text and separator after an output; may be empty, then only end-of-sequence ends a label.
    """
    if not labels:
        raise ValueError("the pool has no labels to constrain to")
    choices = " | ".join(json.dumps(lead + label + end, ensure_ascii=False) for label in labels)
    return f"root ::= {choices}"
