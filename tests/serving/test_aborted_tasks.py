"""A task of ours that is cancelled takes its request with it, whether or not SGLang still knows the request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq

from sglang_ext.compat.manager import abort_request


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
