"""The classification sets, and the line between what is trained on and what is held out.

A data directory holds one folder a set with ``train.jsonl`` and ``test.jsonl`` (or ``.jsonl.gz``), one object
``{"text": str, "label": str}`` a line. Held out: every third class of each training set, with every text that any
set files under such a class (``trec`` and ``trec_fine`` share their texts), and all of ``banking77``.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

TRAINING_SETS = ("clinc150", "nlu", "trec", "trec_fine")
HELD_OUT_SET = "banking77"

# The only texts of the training sets that banking77 (train or test) also holds, in the spelling of ``clean``. They are
# listed, not looked up, so that training never has to read banking77; a test compares the sets again.
SHARED_WITH_HELD_OUT_SET = frozenset(
    {
        "can you tell me why my card was declined",
        "why was my card declined",
        "can i get a new card",
        "when can i expect my new card to get here",
    }
)


def read_rows(data_dir: str | Path, name: str, split: str) -> list[tuple[str, str]]:
    """Rows of one split of one set as ``(text, label)``, in file order.

    Raises:
        ValueError: neither ``<split>.jsonl`` nor ``<split>.jsonl.gz`` exists, or a line is not such an object.
    """
    folder = Path(data_dir) / name
    for path in (folder / f"{split}.jsonl", folder / f"{split}.jsonl.gz"):
        if path.exists():
            break
    else:
        raise ValueError(
            f"no {split}.jsonl(.gz) in {folder}; expected one folder a set, see launch/reference/corpus.py"
        )
    opener = gzip.open if path.suffix == ".gz" else open
    rows = []
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                rows.append((row["text"].strip(), row["label"]))
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f'{path}:{number}: expected {{"text": str, "label": str}}, got {line[:80]!r}'
                ) from error
    return rows


def held_out_classes(labels: set[str] | list[str]) -> set[str]:
    """Every third class in sorted order: the third, the sixth, ..."""
    return set(sorted(set(labels))[2::3])


def clean(text: str) -> str:
    """Lower case, single spaces, and no space before punctuation or apostrophes (trec is written with them)."""
    text = re.sub(r"\s+", " ", text.lower()).strip()
    text = re.sub(r" (?=[?!.,;:'])", "", text)
    return re.sub(r"``|''", '"', text).rstrip(" ?")


def split_rows(
    data_dir: str | Path, sets: tuple[str, ...] = TRAINING_SETS
) -> tuple[dict[str, dict[str, list[str]]], dict[str, dict[str, list[str]]]]:
    """Training texts by set and class: ``(seen, held_out)``, both from the sets' ``train`` files.

    ``seen`` never holds a text that any set files under a held-out class, in any spelling ``clean`` unifies, so that
    a held-out class is not seen under another name either, nor one of banking77's. Texts are unique within a class.

    Raises:
        ValueError: ``sets`` names the set that is held out whole.
    """
    if HELD_OUT_SET in sets:
        raise ValueError(f"{HELD_OUT_SET} is held out whole and must not be trained on; got sets={sets}")
    rows = {name: read_rows(data_dir, name, "train") for name in sets}
    held = {name: held_out_classes([label for _, label in rows[name]]) for name in sets}
    banned = {clean(text) for name in sets for text, label in rows[name] if label in held[name]}
    banned |= SHARED_WITH_HELD_OUT_SET
    seen: dict[str, dict[str, list[str]]] = {name: {} for name in sets}
    unseen: dict[str, dict[str, list[str]]] = {name: {} for name in sets}
    for name in sets:
        for text, label in rows[name]:
            if label in held[name]:
                unseen[name].setdefault(label, []).append(text)
            elif clean(text) not in banned:
                seen[name].setdefault(label, []).append(text)
        for part in (seen, unseen):
            part[name] = {label: list(dict.fromkeys(texts)) for label, texts in sorted(part[name].items())}
    return seen, unseen
