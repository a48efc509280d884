"""The tasks of the study `--suite ruler`: prompts of `_ruler`, and how answers to them are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_ext.launch.bench._quality_tasks import QualityTask, of_model
from sglang_ext.launch.bench._reference_reader import PREFIX, SEPARATOR, Writer
from sglang_ext.launch.bench._ruler import KINDS, found, ruler_prompt
from sglang_ext.launch.bench._ruler_pieces import RulerSource, ruler_source
from sglang_ext.launch.bench.reference import MODEL
from sglang_ext.serving.grammar import label_grammar
from sglang_ext.types import Options

BETWEEN = ", "
"""Expected answers of a prompt, in results."""
LEAD = f"{PREFIX[-1]} "
"""What stands before a label, behind a prompt."""


@dataclass(frozen=True)
class FindTask(QualityTask):
    """A task whose score is RULER's string match: the share of the expected answers that an answer holds.

    Attributes:
        expected: of each prompt, what its answer is to hold; `answers` is the same, in one text.
    """

    expected: list[list[str]] = field(default_factory=list)

    def marks(self, said: Sequence[str]) -> tuple[list[int], list[float]]:
        shares = [found(text, answers) for text, answers in zip(said, self.expected, strict=True)]
        return [int(share == 1) for share in shares], shares


def ruler_tasks(writer: Writer, settings: Options, length: int) -> list[QualityTask]:
    """The suite's tasks whose prompts and answers are `length` tokens together, or a little less."""
    source = ruler_source(writer, settings["data"], Path(settings["model"]) == MODEL)
    return [_task(source, settings, kind, length) for kind in settings["tasks"]]


def _task(source: RulerSource, settings: Options, kind: str, length: int) -> FindTask:
    """A task whose prompts depend on their number, and not on how many there are.

    The embedded model says labels under the grammar of all labels of the set: it was not trained to say anything else.
    """
    of_kind, frame = KINDS[kind], source.frame
    count, room = settings["prompts"][str(length)], length - of_kind.new_tokens
    prompts = [ruler_prompt(source, kind, room, settings["seed"], number) for number in range(count)]
    forced = of_kind.labelled and frame.trained
    return FindTask(
        f"{of_model(settings)}{of_kind.title}, {length} tokens",
        [each.tokens for each in prompts],
        [BETWEEN.join(each.answers) for each in prompts],
        of_kind.new_tokens,
        lead=LEAD if forced else "",
        grammar=label_grammar(source.labels, LEAD, SEPARATOR) if forced else None,
        # A chat model says where an answer ends; one without a template may begin a list with an empty line.
        stop=SEPARATOR if frame.trained or (of_kind.labelled and not frame.chat) else None,
        cells=[10 * each.places[0][0] // len(each.tokens) for each in prompts if each.places],
        ends=True,
        chance=max(each.chance for each in prompts),
        expected=[each.answers for each in prompts],
    )
