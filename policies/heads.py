"""Retrieval heads of a model (Wu et al., 2024, "Retrieval Head Mechanistically Explains Long-Context Factuality").

A retrieval head copies: while the model repeats a needle out of a long text, such a head attends first to the very
token that comes next. Its score is the share of the needle's tokens at which it does. `sglang-ext heads` measures the
scores; here are the file that it writes, and the rule by which heads of the file vote.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_ext.types import JsonObject

FORMAT = "sglang_ext heads 1"
LEAST = 0.1
"""Score above which a head is a retrieval head (Wu et al., section 2)."""
SHIPPED = Path(__file__).parents[1] / "assets" / "heads"
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
"""Files of weights, the first kind that a folder has."""
_WHOLE, _PIECES, _PIECE = 1 << 28, 1024, 1 << 16


def weight_files(model: str) -> list[Path]:
    """The files that hold a model's weights, in the order of their names.

    Args:
        model: a folder, a file, or the name of a model in Hugging Face's cache.

    Raises:
        ValueError: there are none.
    """
    path = Path(model)
    if path.is_file():
        return [path]
    if not path.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            path = Path(snapshot_download(model, local_files_only=True))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
            raise ValueError(f"model {model}: expected a folder with weights, or a model that is downloaded") from None
    for kind in WEIGHTS:
        files = sorted(path.glob(kind))
        if files:
            return files
    raise ValueError(f"model {model}: expected files of weights ({', '.join(WEIGHTS)}) in {path}; found none")


def weights_hash(model: str) -> str:
    """A hash of a model's weights: 64 hexadecimal digits.

    Of a file above 256 MiB it takes the size and 1,024 pieces of 64 KiB, evenly spread: a tensor that was trained on
    differs in them, and a server does not wait for all bytes of a large model to be read.
    """
    found = hashlib.sha256()
    for path in weight_files(model):
        found.update(str(path.stat().st_size).encode())
        for piece in _pieces(path):
            found.update(piece)
    return found.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE:
            while piece := file.read(1 << 20):
                yield piece
            return
        for number in range(_PIECES):
            file.seek((size - _PIECE) * number // (_PIECES - 1))
            yield file.read(_PIECE)


@dataclass(frozen=True)
class Heads:
    """What `sglang-ext heads` found.

    Attributes:
        model: its name, for people.
        weights: hash of its weights (`weights_hash`); empty for scores that somebody chose, whatever the model.
        scores: score of every head of every layer.
        measured: how: lengths, depths, seeds, and the number of prompts.
    """

    model: str
    weights: str
    scores: tuple[tuple[float, ...], ...]
    measured: JsonObject

    @property
    def voters(self) -> Mapping[int, tuple[int, float]]:
        """Layer -> (its best head, that head's score), of layers that have a retrieval head."""
        best = {layer: max(range(len(row)), key=row.__getitem__) for layer, row in enumerate(self.scores)}
        return {n: (head, self.scores[n][head]) for n, head in best.items() if self.scores[n][head] > LEAST}

    def save(self, path: Path) -> None:
        """Write the file."""
        values = {"format": FORMAT, **asdict(self)}
        rows = ",\n  ".join(json.dumps([round(score, 4) for score in row]) for row in values.pop("scores"))
        head = json.dumps(values, indent=1)[:-2]
        path.write_text(f'{head},\n "scores": [\n  {rows}\n ]\n}}\n')

    @classmethod
    def load(cls, path: Path) -> Heads:
        """Read a file of `save`.

        Raises:
            ValueError: there is none, or it is another kind of file.
        """
        try:
            values = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(f"heads file {path}: {error.strerror}; sglang-ext heads MODEL writes one") from None
        except ValueError as error:
            raise ValueError(f"heads file {path}: expected JSON ({error})") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"heads file {path}: expected a file of sglang-ext heads, with format {FORMAT!r}")
        scores = values.get("scores") or []
        if not _is_table(scores):
            raise ValueError(f"heads file {path}: scores: expected a list of numbers from 0 to 1 for each layer")
        rows = tuple(tuple(float(score) for score in row) for row in scores)
        return cls(str(values.get("model", "")), str(values.get("weights", "")), rows, values.get("measured") or {})

    def check(self, path: Path, weights: str, layers: int, heads: int) -> None:
        """Whether the file is one of a model with so many layers and query heads.

        Raises:
            ValueError: it is another's, or it has no retrieval head.
        """
        if self.weights and self.weights != weights:
            raise ValueError(
                f"heads file {path} is of {self.model} (weights {self.weights[:12]}), and the server's model has the"
                f" weights {weights[:12]}: measure that one with sglang-ext heads"
            )
        sizes = sorted({len(row) for row in self.scores})
        if len(self.scores) != layers or sizes != [heads]:
            raise ValueError(
                f"heads file {path} has {len(self.scores)} layers of {' or '.join(map(str, sizes))} heads; the model"
                f" has {layers} layers of {heads} heads"
            )
        if not self.voters:
            best = max(max(row) for row in self.scores)
            raise ValueError(
                f"heads file {path}: the best head scores {best}, and a retrieval head scores above {LEAST}: measure"
                ' shorter prompts, or let all heads vote with {"heads": "all"}'
            )


def _is_table(scores: object) -> bool:
    return (
        isinstance(scores, list)
        and bool(scores)
        and all(isinstance(row, list) and row for row in scores)
        and all(type(score) in (int, float) and 0 <= score <= 1 for row in scores for score in row)
    )


def shipped(weights: str) -> Path | None:
    """The file that this package has for a model with such weights."""
    path = SHIPPED / f"{weights[:16]}.json"
    return path if path.is_file() else None
