"""A task of ours that is cancelled takes its request with it, whether or not SGLang still knows the request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import ReqState

from sglang_ext.compat.line import ABORT_FLAG
from sglang_ext.compat.manager import abort_request, abort_was_asked, before_abort_request
from sglang_ext.hooks import HOOKS


@pytest.mark.parametrize("known", [True, False])
def test_the_scheduler_hears_of_it(known: bool) -> None:
    asked: list[Any] = []
    manager = SimpleNamespace(
        rid_to_state={"r": None} if known else {},
        abort_request=lambda rid: asked.append(rid),
        _dispatch_to_scheduler=asked.append,
    )
    abort_request(manager, "r")
    (said,) = asked
    if known:
        assert said == "r"
    else:
        assert isinstance(said, AbortReq) and said.rid == "r" and not said.abort_all


def test_either_sglang_or_we_note_who_is_to_be_aborted() -> None:
    ours = any(hook.ours.endswith(":before_abort_request") for hook in HOOKS)
    assert ours != (ABORT_FLAG in ReqState.__dataclass_fields__)


@pytest.mark.parametrize(
    ("given", "noted"), [({"rid": "a"}, ["a"]), ({"abort_all": True}, ["a", "b"]), ({"rid": "c"}, [])]
)
def test_who_is_to_be_aborted(given: dict[str, Any], noted: list[str]) -> None:
    manager = SimpleNamespace(rid_to_state={name: SimpleNamespace() for name in "ab"})
    before_abort_request(manager, **given)
    assert [name for name, state in manager.rid_to_state.items() if abort_was_asked(manager, name, state)] == noted
