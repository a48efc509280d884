"""What a label that was searched for makes of an answer: beside schedulers that are imitated."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from sglang_ext.cache.rows import Row
from sglang_ext.config import RequestOptions
from sglang_ext.serving.labels import Prompt
from sglang_ext.serving.likely import Chosen, LabelAnswer, Labels, Whole
from tests.serving.imitated import Service, quiet

DEMOS = [{"input": f"demonstration {n}", "output": f"label {n}"} for n in range(4)]
PARAMS = {"max_new_tokens": 64, "temperature": 0.0, "stop": "l", "n": 2}


def answered(manager: Any, monkeypatch: pytest.MonkeyPatch, shown: bool, lead: str, end: str) -> LabelAnswer:
    """The answer to a request with `choose`, where the search finds "label 2"."""

    async def found(*_: Any) -> Chosen:
        return Chosen("label 2", -0.5, 1, 3)

    async def whole() -> LabelAnswer:
        service = Service(manager, random.Random(1), None)
        service.fails = 0.0
        await service.put("p", DEMOS, {"block_size": 2})
        labels = Labels(service, service.version("p"), RequestOptions("p", choose="likely"), lead, end)
        monkeypatch.setattr(labels, "_search", found)
        await labels.prepare(PARAMS)
        answer = await labels.answer(Prompt(Row(()), [1]), dict(PARAMS), shown)
        await quiet(service)
        return answer

    return asyncio.run(asyncio.wait_for(whole(), 60))


@pytest.mark.parametrize(("lead", "end"), [(" ", "\n\n"), ("", "")], ids=["completion", "chat"])
def test_one_token_is_asked_for_whose_place_the_label_takes(
    manager: Any, monkeypatch: pytest.MonkeyPatch, lead: str, end: str
) -> None:
    answer = answered(manager, monkeypatch, False, lead, end)
    assert answer.params == {"max_new_tokens": 1, "temperature": 0.0, "n": 2}
    assert answer.said == {"choice": {"log_prob": -0.5, "passes": 1, "tokens": 3}}
    ids = manager.tokenizer.encode(lead + "label 2" + end, add_special_tokens=False)
    eos = manager.tokenizer.eos_token_id
    assert answer.whole == Whole(lead + "label 2", (*ids, *([] if end else [eos])), end or eos)


def test_a_server_without_grammars_says_what_to_leave_out(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'^choose="likely": .*--grammar-backend none.*or leave out .*log-probabilit'):
        answered(manager, monkeypatch, True, " ", "\n\n")
