"""What a request may have of the KV cache: no more than SGLang can ever give it, or it would wait for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import compat
from sglang_ext.serving.tree import CHUNK_MARGIN, TreeMode, fit

TOTAL = 1360


@pytest.mark.parametrize("page", [1, 16, 128])
@pytest.mark.parametrize("held", [0, 200])
@pytest.mark.parametrize("ahead", [0, 18])
def test_the_longest_prompt_that_sglang_takes(
    monkeypatch: pytest.MonkeyPatch, page: int, held: int, ahead: int
) -> None:
    """SGLang takes a request whose tokens and a page are fewer than those of the cache; what is guessed needs more."""
    refused = list[str]()
    monkeypatch.setattr(compat, "abort", lambda _req, why, _status: refused.append(why))

    def asked(tokens: int) -> Any:
        cache = SimpleNamespace(held_by_pools=held, page_size=page, slots_ahead=ahead, loose_tokens=lambda _keys: 0)
        params = SimpleNamespace(max_new_tokens=50, min_new_tokens=20)
        req: Any = SimpleNamespace(origin_input_ids=range(tokens), output_ids=[], sampling_params=params)
        fit(SimpleNamespace(tree_cache=cache, max_total_num_tokens=TOTAL), req, None)  # type: ignore[arg-type]
        return params

    longest = TOTAL - held - page - 1 - ahead
    assert asked(longest).max_new_tokens == 0 and asked(longest - 30).max_new_tokens == 30 and not refused
    assert longest + page + ahead < TOTAL - held
    asked(longest + 1)
    assert len(refused) == 1 and (
        f"needs {longest + 1} tokens of KV cache and {page + 1 + ahead} beside them, {TOTAL - held} of {TOTAL}"
        in refused[0]
    )


@pytest.mark.parametrize(("step", "ahead", "taken"), [(1, 0, 5 + 2), (9, 18, (45 + 18) + (2 + 18))])
def test_running_requests_leave_room_for_what_they_guess(step: int, ahead: int, taken: int) -> None:
    """Five steps run beside a long prompt of 250 tokens in chunks of 100; the second request ends after two tokens."""
    cache = SimpleNamespace(step_tokens=step, slots_ahead=ahead, evictable_size=lambda: 300)
    scheduler: Any = SimpleNamespace(
        tree_cache=cache,
        chunked_prefill_size=100,
        chunked_req=SimpleNamespace(full_untruncated_fill_ids=range(260), prefix_indices=range(10), prefix_len=10),
        is_mixed_chunk=False,
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 1000),
    )
    running: Any = [
        SimpleNamespace(sampling_params=SimpleNamespace(max_new_tokens=limit), output_ids=[1, 2]) for limit in (90, 4)
    ]
    mode = TreeMode()
    mode.__dict__["encoding_tokens"] = 100
    assert mode.room_beside(scheduler, running) == 1300 - 250 - taken - CHUNK_MARGIN
    adder: Any = SimpleNamespace(tree_cache=cache)
    assert mode.offset(lambda *_: 40.0, adder, running[0]) == 40 + ahead
