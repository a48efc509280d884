"""The cascade's settings and its rule, token by token, against the paper's examples and StreamingLLM."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sglang_ext.policies.cascade import Cascade, ReferenceStream


def tokens(stream: ReferenceStream) -> list[int]:
    return [k.token for k in stream.kept()]


def test_one_cascade_is_streaming_llm():
    """Sinks and the last W tokens, whatever the scores are; cells are reused in order."""
    rng = random.Random(0)
    for window, sinks, stride in ((1, 0, 1), (7, 3, 4), (16, 5, 16), (9, 0, 20)):
        stream = ReferenceStream(Cascade(window=window, cascades=1, sinks=sinks, stride=stride))
        for seen in range(1, 6 * (window + sinks)):
            stream.add([rng.random()])
            wanted = [t for t in range(seen) if t < sinks or t >= seen - window]
            assert tokens(stream) == wanted
            assert max(k.cell for k in stream.kept()) < sinks + window + stride


def test_without_selection_every_second_token_goes_on():
    """Figure 4 (top): what sub-cache i keeps lies 2^i tokens apart, and the span is eq. 4's."""
    cascade = Cascade(window=4 * 8, cascades=4, sinks=2, stride=8, selection=False)
    stream = ReferenceStream(cascade)
    stream.add([0.0] * 5000)
    for i, sub_cache in enumerate(stream.sub_caches):
        numbers = [k.token for k in sub_cache]
        assert [b - a for a, b in pairwise(numbers)] == [2**i] * 7
    assert cascade.token_span == 8 * 15
    assert abs(stream.seen - stream.sub_caches[3][0].token - cascade.token_span) <= 2**4
    assert cascade.sparsity == pytest.approx(1 - 32 / 120)


def test_the_better_attended_of_two_stays_and_a_tie_is_the_later_tokens():
    """Figure 4, cases 2 to 4, by hand: two sub-caches of two tokens, no sinks."""
    cascade = Cascade(window=4, cascades=2, sinks=0, stride=1)
    for scores, kept in (
        ((9, 8, 7, 6, 5, 4), [1, 2, 4, 5]),  # step 4 accepts 2 for 0; in step 5 token 3 (6) loses to it (7)
        ((9, 8, 6, 7, 5, 4), [1, 3, 4, 5]),
        ((9, 8, 7, 7, 5, 4), [1, 3, 4, 5]),  # tie: the incoming token
    ):
        stream = ReferenceStream(cascade)
        stream.add(scores)
        assert tokens(stream) == kept
        assert stream.dropped == [0, 5 - kept[1]]


def test_kept_tokens_are_in_order_and_none_is_lost_uncounted():
    rng = random.Random(1)
    for _ in range(50):
        cascades = rng.randint(1, 5)
        size, sinks, stride = rng.randint(1, 9), rng.randint(0, 6), rng.randint(1, 12)
        stream = ReferenceStream(Cascade(window=size * cascades, cascades=cascades, sinks=sinks, stride=stride))
        stream.add([rng.randrange(4) for _ in range(rng.randint(1, 300))])
        now = tokens(stream)
        assert now == sorted(now) and now[:sinks] == list(range(min(sinks, stream.seen)))
        assert sorted(now + stream.dropped) == list(range(stream.seen))
        assert len(now) == stream.cascade.rings.kept(stream.seen)
        newest = range(max(sinks, stream.seen - size), stream.seen)
        assert now[len(now) - len(newest) :] == list(newest)  # the newest sub-cache forgets nothing


def test_acceptance():
    cascade = Cascade(window=6, cascades=3, sinks=4)
    assert all(cascade.accepts(i, seen) for i in range(3) for seen in range(1, 11))  # the window still fills
    assert [[cascade.accepts(i, seen) for i in range(3)] for seen in (11, 12, 13)] == [
        [True, True, False],
        [True, False, False],
        [True, True, True],
    ]


def test_strides_end_at_absolute_multiples():
    cascade = Cascade(window=8, stride=10)
    assert cascade.strides(0, 25) == [(0, 10), (10, 20), (20, 25)]
    assert cascade.strides(7, 10) == [(7, 10)]
    assert cascade.strides(10, 21) == [(10, 20), (20, 21)]
    assert cascade.strides(13, 13) == []


def test_sizes():
    cascade = Cascade(window=16384, cascades=4, sinks=64, stride=4096)
    assert (cascade.size, cascade.slots, cascade.token_span) == (4096, 20544, 61440)
    assert cascade.rings.entries == cascade.slots and cascade.rings.window == cascade.window
    assert cascade.lanes(8) == 8 and Cascade(window=8, heads="homogeneous").lanes(8) == 1


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"window": 10, "cascades": 4}, "take window=12 or 8"),
        ({"window": 3, "cascades": 4}, "take window=4$"),
        ({"window": 0}, "window=0: expected a whole number of at least 1"),
        ({"window": 8.0}, r"window=8\.0"),
        ({"window": 8, "cascades": 0}, "cascades=0"),
        ({"window": 8, "sinks": -1}, "sinks=-1: expected a whole number of at least 0"),
        ({"window": 8, "stride": True}, "stride=True"),
        ({"window": 8, "beta": 1.0}, r"beta=1\.0"),
        ({"window": 8, "beta": float("nan")}, "beta=nan"),
        ({"window": 8, "beta": "0.9"}, "beta='0.9'"),
        ({"window": 8, "head_reduction": "median"}, "head_reduction='median': expected one of mean, max"),
        ({"window": 8, "heads": "both"}, "heads='both': expected one of independent, homogeneous"),
        ({"window": 8, "selection": 1}, "selection=1"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Cascade(**settings)
