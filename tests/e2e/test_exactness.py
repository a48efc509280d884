"""Answers over stitched views equal those of ``transformers`` within 1e-4, on the real engine in float32.

What must be right is computed by ``tests/oracle``, which uses none of this project's code. Read back from the
engine are only facts, never states: a pool's blocks with their token ids, the selection in view order, and the
tokens that were generated. Every comparison covers the generated tokens' log-probabilities and, at each step,
the eight most probable tokens.

Every engine start takes ten seconds and more, so that the engines differ in several things at once (model, chunk
size, overlap scheduling) and every test runs on each of them.
"""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
import torch

from sglang_ext import compat
from tests.e2e.exact import TOLERANCE, Answer, Ask, Served
from tests.oracle import models, oracle

CONTEXT = 512  # tokens; short, so that one pool can be longer than the context

# The blocks have about 45 tokens. Chunks of 32 and 40 cut each of them once, chunks of 20 twice; 128 takes two or
# three blocks at once, and cuts among those where another request has taken a part of the chunk.
ENGINES: dict[str, dict[str, Any]] = {
    "llama-chunk32": {"model": "llama", "chunked_prefill_size": 32},
    "llama-chunk128-no_overlap": {
        "model": "llama",
        "chunked_prefill_size": 128,
        "disable_overlap_schedule": True,
    },
    "qwen2-chunk128": {"model": "qwen2", "chunked_prefill_size": 128},
    "qwen3-chunk40": {"model": "qwen3", "chunked_prefill_size": 40},
    "llama3_rope-chunk20-no_overlap": {
        "model": "llama3_rope",
        "chunked_prefill_size": 20,
        "disable_overlap_schedule": True,
    },
    "yarn-chunk48": {"model": "yarn", "chunked_prefill_size": 48},
}

# Name -> encoding options. Each is created with both position modes.
ENCODINGS: dict[str, dict[str, Any]] = {
    "full": {"pattern": "full"},
    "sink_previous_self": {"pattern": "sink+previous+self"},
    "sink_self": {"pattern": "sink+self"},
    "self": {"pattern": "self"},
    "two_sinks_one_previous": {"pattern": "sink+previous+self", "sink_blocks": 2, "previous_blocks": 1},
    "no_previous": {"pattern": "sink+previous+self", "previous_blocks": 0},
    "four_previous": {"pattern": "sink+previous+self", "previous_blocks": 4},
}
POOLS = [f"{name}-{positions}" for name in ENCODINGS for positions in oracle.POSITIONS]

DEMONSTRATIONS = 20  # in blocks of 3: seven blocks of about 45 tokens, the last one short
BLOCK_SIZE = 3


# --------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module", params=sorted(ENGINES))
def served(request, tmp_path_factory):
    """An engine with every pool of ``POOLS`` and the oracle's copy of its model."""
    from sglang_ext import Engine

    options = dict(ENGINES[request.param])
    name = options.pop("model")
    folder = models.save_model(name, tmp_path_factory.mktemp(name), max_position_embeddings=CONTEXT)
    # Models this small gain nothing from a second thread, and lose a lot when both processes want both cores.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = Engine(
        model_path=str(folder),
        dtype="float32",
        max_total_tokens=12288,
        max_running_requests=16,
        log_level="error",
        **options,
    )
    try:
        for pool in POOLS:
            encoding, positions = pool.split("-")
            engine.create_pool(
                pool,
                models.demonstrations(DEMONSTRATIONS),
                block_size=BLOCK_SIZE,
                positions=positions,
                **ENCODINGS[encoding],
            )
        yield Served(engine, models.load_model(folder), models.load_tokenizer(folder))
    finally:
        engine.shutdown()
        torch.set_num_threads(threads)
        monkeypatch.undo()


@pytest.fixture
def question(served):
    """Own tokens of a short request."""
    return served.text("77: freeze my card, case 3\nLabel:")


@pytest.fixture
def long_question(served):
    """Own tokens of a request that takes several chunks by itself."""
    shots = "".join(f"{d['input']}\nLabel: {d['output']}\n\n" for d in models.demonstrations(6, seed=9))
    return served.text(shots + "78: open the branch, case 4?\nLabel:")


# Selections by block ids, as (view order) over seven blocks; the sinks (at most two) stand first.
SELECTIONS = {
    "sinks": [0, 1],
    "pool order": [0, 1, 3, 6],
    "reversed": [0, 1, 6, 4, 3],
    "mixed": [0, 1, 5, 2, 6],
    "neighbours": [0, 1, 2, 3],
    "all": [0, 1, 2, 3, 4, 5, 6],
    "all, rest reversed": [0, 1, 6, 5, 4, 3, 2],
}


# --------------------------------------------------------------------------- tests


def test_a_message_to_the_scheduler_has_the_requests_own_tokens_only(served, question, monkeypatch):
    """However much is stitched in front of them. The scheduler's row holds what the other tests compare."""
    manager, sent = served.engine.tokenizer_manager, []
    send = manager._dispatch_to_scheduler
    monkeypatch.setattr(
        manager, "_dispatch_to_scheduler", lambda message: (sent.append(pickle.dumps(message)), send(message))
    )
    stitched = []
    for chosen in ([0], list(range(7))):
        (answer,) = served.generate([Ask(POOLS[0], question, {"block_ids": chosen})])
        stitched.append(answer.view["stitched_tokens"])
        assert answer.meta["prompt_tokens"] == stitched[-1] + len(question)
    few, many = sent
    assert stitched[1] - stitched[0] > 200
    assert len(many) - len(few) < 6 * 80  # six more names of blocks; eight bytes a token before


def test_pools_are_what_was_asked_for(served):
    """The blocks: seven, BOS once, at the very beginning; every demonstration in exactly one block."""
    for pool in POOLS:
        info = served.info(pool)
        blocks = served.blocks(pool)
        assert info["status"] == "ready"
        assert len(blocks) == 7
        flat = [t for b in blocks for t in b]
        assert flat[0] == served.tokenizer.bos_token_id
        assert flat.count(served.tokenizer.bos_token_id) == 1
        assert sum(len(b) for b in blocks) == info["tokens"]
        names = [d for b in info["blocks"] for d in b["demonstrations"]]
        assert sorted(names) == sorted(f"d{i}" for i in range(DEMONSTRATIONS))
        demos = models.demonstrations(DEMONSTRATIONS)
        for number, block in enumerate(info["blocks"]):
            parts = [demos[int(d[1:])] for d in block["demonstrations"]]
            text = "".join(f"{d['input']}\nLabel: {d['output']}\n\n" for d in parts)
            expected = served.text(text)
            assert block["token_ids"] == ([served.tokenizer.bos_token_id, *expected] if number == 0 else expected)


def test_plain_requests(served, question, long_question):
    """Requests without a pool are the plain model's: the engine and the oracle agree where nothing is ours."""
    asks = [Ask(None, [served.tokenizer.bos_token_id, *own]) for own in (question, long_question)]
    served.assert_exact(served.generate(asks))


@pytest.mark.parametrize("pool", POOLS)
def test_every_encoding_and_selection(served, pool, question):
    """(a), (b): one pattern and position mode, every selection of ``SELECTIONS``, in one batch."""
    asks = [Ask(pool, question, {"block_ids": ids}) for ids in SELECTIONS.values()]
    answers = served.generate(asks)
    blocks = served.blocks(pool)
    for answer in answers:
        ids = answer.ask.select["block_ids"]
        stitched = sum(len(blocks[b]) for b in ids)
        assert answer.view["pool"] == pool
        assert list(answer.view["blocks"]) == ids
        assert answer.view["stitched_tokens"] == stitched
        assert answer.meta["cached_tokens"] >= stitched
    served.assert_exact(answers)


def test_full_pattern_is_the_dense_model(served, question):
    """Without a detour over the oracle's encoder: pattern full and all blocks are the plain dense prompt."""
    for positions in oracle.POSITIONS:
        pool = f"full-{positions}"
        flat = [t for b in served.blocks(pool) for t in b]
        stitched, dense = served.generate(
            [Ask(pool, question, {"block_ids": list(range(7))}), Ask(None, flat + question)]
        )
        assert stitched.tokens == dense.tokens
        pairs = zip(stitched.meta["output_token_logprobs"], dense.meta["output_token_logprobs"], strict=True)
        assert max(abs(a[0] - b[0]) for a, b in pairs) < TOLERANCE


def test_many_selections_in_one_batch(served, question, long_question):
    """Every pool and selection at once, with plain requests between: more than can run together, of different
    lengths, so that batches mix prefill and decoding and change their members at every step.
    """
    asks = []
    for n, pool in enumerate(POOLS):
        for k, ids in enumerate(SELECTIONS.values()):
            own = long_question if (n + k) % 3 == 0 else question
            asks.append(Ask(pool, own, {"block_ids": ids}, new_tokens=2 + (5 * n + 3 * k) % 9))
        asks.append(Ask(None, [served.tokenizer.bos_token_id, *question], new_tokens=3 + n % 4))
    asks = asks[::2] + asks[1::2]
    served.assert_exact(served.generate(asks))


def test_no_step_for_answers_that_end_by_their_length(served, question, request):
    """With overlap each saves the step that nobody would read, alone and among longer ones; without, there is none.

    SGLang 0.5.23 leaves such requests out by itself.
    """

    def saved():
        return served.engine.get_server_info()["internal_states"][0]["sglang_ext"]["steps_saved"]

    ours = "no_overlap" not in request.node.name and not compat.LEAVES_OUT_ENDING
    for lengths in ([1], [4], [1, 2, 2, 5, 9]):
        before = saved()
        answers = served.generate([Ask(POOLS[0], question, {"block_ids": [0, 2, 3]}, new_tokens=n) for n in lengths])
        assert [len(answer.tokens) for answer in answers] == lengths
        assert saved() - before == ours * len(lengths)
        served.assert_exact(answers)


def test_alone_equals_in_a_batch(served, question):
    asks = [Ask(pool, question, {"block_ids": [0, 1, 6, 3]}) for pool in POOLS]
    together = served.generate(asks)
    alone = [served.generate([ask])[0] for ask in asks]
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    served.assert_exact(alone)


def test_repeating_a_request_hits_its_own_tokens(served, long_question):
    """The own part is cached under its (pool, selection): nearly all of it is hit, and the answer stays."""
    pool = "sink_previous_self-sequential"
    ask = Ask(pool, [*long_question, 7], {"block_ids": [0, 1, 5, 4]})
    first, second = (served.generate([ask])[0] for _ in range(2))
    served.assert_exact([first, second])
    assert second.meta["cached_tokens"] >= second.view["stitched_tokens"] + len(ask.own) - 1


def test_equal_tokens_under_different_selections_do_not_mix(served, long_question):
    """Requests with the same own tokens over different views, one after the other: none hits another's tokens."""
    pool = "sink_previous_self-sequential"
    own = [*long_question, 8]
    for ids in ([0, 1, 4, 5], [0, 1, 5, 4], [0, 1, 4], [0, 1, 4, 5]):
        served.assert_exact(served.generate([Ask(pool, own, {"block_ids": ids})]))


@pytest.mark.parametrize("order", ["pool", "low_to_high", "high_to_low", "reversed"])
def test_orders(served, question, order):
    """(b): retrieval by the server, in every order and both position modes; the sinks stay first."""
    pools = [f"{name}-{p}" for name in ("sink_previous_self", "two_sinks_one_previous") for p in oracle.POSITIONS]
    query = "report my loan and freeze the refund"
    asks = [Ask(p, question, {"blocks": 5, "order": order, "query": query}) for p in pools]
    other = "high_to_low" if order == "low_to_high" else "low_to_high"
    mirror = [Ask(p, question, {"blocks": 5, "order": other, "query": query}) for p in pools]
    answers = served.generate(asks + mirror)
    served.assert_exact(answers)
    for answer, mirrored in zip(answers[: len(pools)], answers[len(pools) :], strict=True):
        sinks = 2 if "two_sinks" in answer.ask.pool else 1
        ids = list(answer.view["blocks"])
        rest, other_rest = ids[sinks:], list(mirrored.view["blocks"])[sinks:]
        assert len(ids) == 5
        assert ids[:sinks] == list(range(sinks))
        assert sorted(rest) == sorted(other_rest)
        if order == "pool":
            assert rest == sorted(rest)
        elif order == "reversed":
            assert rest == sorted(rest, reverse=True)
        else:
            assert rest == other_rest[::-1]


def test_multi_turn(served, question):
    """(c): three turns over one selection; every turn hits all of the turns before it but the last token."""
    rng = torch.Generator().manual_seed(5)
    talks = [Ask(pool, question, {"block_ids": SELECTIONS[view]}) for pool in POOLS for view in ("mixed", "reversed")]
    for turn in range(3):
        answers = served.generate(talks)
        served.assert_exact(answers)
        for answer in answers:
            if turn > 0:
                hit = answer.meta["cached_tokens"] - answer.view["stitched_tokens"]
                assert hit >= len(answer.ask.before) - 1, (turn, answer.ask.pool, answer.meta)
        talks = [
            Ask(
                a.ask.pool,
                torch.randint(7, 370, (5 + turn,), generator=rng).tolist(),
                a.ask.select,
                before=a.ask.sent + a.tokens,
            )
            for a in answers
        ]


def test_logprobs_of_given_answers(served, question):
    """Teacher-forced: the log-probabilities of the prompt's last tokens, as scoring and ``select`` ask for them."""
    answers = [served.text(a) for a in (" card issue", " card", " lost item\n\n")]
    pool = "sink_previous_self-local"
    asks = [Ask(pool, question + a, {"block_ids": [0, 1, 6, 2]}, new_tokens=1) for a in answers]
    starts = [len(question) - 1] * len(answers)  # counted in what the request itself sent
    for given, scored in zip(answers, served.generate(asks, logprob_start_len=starts), strict=True):
        assert scored.meta["cached_tokens"] >= scored.view["stitched_tokens"]
        (nothing, *_), *entries = scored.meta["input_token_logprobs"]
        assert nothing is None
        assert [token for _, token, *_ in entries] == given
        table = served.table(scored, served.pieces(scored))
        first = len(scored.ask.sent) - len(given) - 1
        for step, (logprob, token, *_) in enumerate(entries):
            assert abs(logprob - table[first + step, token].item()) < TOLERANCE
        assert served.deviation(scored) is None


def test_pool_longer_than_the_context(served, question):
    """Local positions carry a pool over the model's context; what a request selects still fits into it."""
    pool = "long-local"
    served.engine.create_pool(pool, models.demonstrations(60), block_size=5, positions="local")
    blocks = served.blocks(pool)
    assert sum(len(b) for b in blocks) > CONTEXT
    views = ([0, len(blocks) - 1], [0, 3, 9, 5], [0, 11, 10, 1])
    served.assert_exact(served.generate([Ask(pool, question, {"block_ids": v}) for v in views]))
    served.engine.delete(pool)


@pytest.mark.parametrize("positions", oracle.POSITIONS)
def test_encoding_among_other_requests(served, question, positions):
    """A pool that is encoded while other requests prefill and decode, so that they share chunks: its blocks are cut
    at other places than alone, and neither side's answers change.
    """
    from sglang_ext.serving.tenancy import pools_of

    pool, busy = f"meanwhile-{positions}", f"sink_previous_self-{positions}"
    rng = torch.Generator().manual_seed(17)
    asks = []
    for n in (45, 51, 77, 102, 109, 138, 150):  # remainders of every chunk size
        own = torch.randint(7, 370, (n,), generator=rng).tolist()
        asks += [Ask(None, own, new_tokens=8), Ask(busy, own, {"block_ids": [0, 2]}, new_tokens=8)]
    service = pools_of(served.engine.tokenizer_manager)

    async def both() -> list[Answer]:
        answers = served.start(asks)
        created = service.put(pool, models.demonstrations(26, seed=4), {"block_size": 3, "positions": positions})
        return (await asyncio.gather(answers, created))[0]

    served.assert_exact(served.engine.loop.run_until_complete(both()))
    views = ([0, 8], [0, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 4, 3])
    served.assert_exact(served.generate([Ask(pool, question, {"block_ids": v}) for v in views]))
    served.engine.delete(pool)


@pytest.mark.parametrize("positions", oracle.POSITIONS)
def test_appended_deleted_and_purged(served, question, positions):
    """Blocks that come later are as if there from the start; a deleted demonstration is cut out of the view; after
    a purge, the pool is as if made without it.
    """
    pool = f"changing-{positions}"
    demos = models.demonstrations(DEMONSTRATIONS)
    served.engine.create_pool(pool, demos[:9], block_size=BLOCK_SIZE, positions=positions)
    served.engine.append(pool, demos[9:15])
    assert len(served.blocks(pool)) == 5
    views = [{"block_ids": v} for v in ([0, 4], [0, 1, 2, 3, 4], [0, 4, 2])]
    served.assert_exact(served.generate([Ask(pool, question, v) for v in views]))
    block = served.info(pool)["blocks"][2]
    victim, (low, high) = block["demonstrations"][1], block["spans"][1]
    served.engine.delete(pool, demonstration_id=victim)
    (shown,) = served.engine.select(pool, block_ids=[2])["selection"]
    assert [item["id"] for item in shown["demonstrations"]] == [id for id in block["demonstrations"] if id != victim]
    assert shown["tokens"] == block["tokens"] - (high - low)
    ask = Ask(pool, question, {"block_ids": [0, 4, 2, 3]})
    pieces = oracle.whole_blocks(served.blocks(pool), [0, 4, 2, 3])
    pieces[2:3] = [(2, 0, low), (2, high, block["tokens"])]
    assert served.deviation(served.generate([ask])[0], pieces) is None
    served.engine.append(pool, demos[15:18])  # a new version, in which it can be purged
    served.engine.delete(pool, demonstration_id=victim, purge=True)
    assert all(victim not in b["demonstrations"] for b in served.info(pool)["blocks"])
    served.assert_exact(served.generate([Ask(pool, question, v) for v in views]))
    served.engine.delete(pool)


WRITTEN = [pool for pool in POOLS if not pool.startswith("self-")]


def test_blocks_that_are_seen_where_they_were_written(served, question, long_question):
    """`rebase: false`: whole blocks, and turns behind them, among requests that rebase and plain ones; all of it in
    batches that mix them, and alone.
    """
    asks = []
    for n, pool in enumerate(WRITTEN):
        for k, ids in enumerate(([0, 1], [0, 1, 3, 6], [0, 1, 6, 4, 3])):
            own = long_question if (n + k) % 3 == 0 else question
            asks.append(Ask(pool, own, {"block_ids": ids, "rebase": False}, new_tokens=2 + (5 * n + 3 * k) % 9))
            if k == n % 3:
                asks.append(Ask(pool, own, {"block_ids": ids}, new_tokens=4))
        asks.append(Ask(None, [served.tokenizer.bos_token_id, *question], new_tokens=3 + n % 4))
    answers = served.generate(asks)
    served.assert_exact(answers)
    first = served.generate(asks[:1])  # alone: SGLang's own attention serves the batch
    served.assert_exact(first)
    assert first[0].meta["cached_tokens"] >= first[0].view["stitched_tokens"]
    talks = [a for a in answers if a.ask.pool is not None]
    rng = torch.Generator().manual_seed(6)
    more = [
        Ask(
            a.ask.pool,
            torch.randint(7, 370, (6,), generator=rng).tolist(),
            a.ask.select,
            before=a.ask.sent + a.tokens,
        )
        for a in talks
    ]
    further = served.generate(more)
    served.assert_exact(further)
    for answer in further:
        hit = answer.meta["cached_tokens"] - answer.view["stitched_tokens"]
        assert hit >= len(answer.ask.before) - 1, (answer.ask.pool, answer.ask.select)


def test_examples_that_are_seen_where_they_were_written(served, question):
    select = {"granularity": "example", "ratio": 0.6, "retriever": "bm25", "query": "cancel my card", "order": "pool"}
    answers = served.generate([Ask(pool, question, {**select, "rebase": False}) for pool in WRITTEN])
    wrong = [served.deviation(answer, _expected_pieces(served, answer.ask)) for answer in answers]
    assert not any(wrong), wrong
    seen = [(answer.view["stitched_tokens"], served.info(answer.ask.pool)["tokens"]) for answer in answers]
    assert all(some < whole - 20 for some, whole in seen), "nothing was left out between two examples"


def test_where_blocks_were_written_must_be_known_and_within_the_context(served, question):
    for select, message in (
        ({"rebase": False, "order": "reversed"}, "order 'reversed' with rebase false: what stays"),
        ({"rebase": 0}, "rebase"),
    ):
        with pytest.raises(ValueError, match=message):
            served.generate([Ask(WRITTEN[0], question, select)])
    with pytest.raises(ValueError, match="rebase false over pool 'self-local' with pattern 'self'"):
        served.generate([Ask("self-local", question, {"rebase": False})])
    pool, far = "sink_previous_self-sequential", {"block_ids": [0, 6], "rebase": False}
    end = served.info(pool)["tokens"]
    own = torch.randint(7, 370, (CONTEXT - end,), generator=torch.Generator().manual_seed(3)).tolist()
    with pytest.raises(ValueError, match=f"has {len(own)} tokens and with rebase false follows position {end}"):
        served.generate([Ask(pool, own, far)])
    (answer,) = served.generate([Ask(pool, own[:-8], far, new_tokens=50)])
    assert len(answer.tokens) == 7, "the last token's position is the last one but one of the context, as SGLang has it"
    served.assert_exact([answer])
    (answer,) = served.generate([Ask(pool, own[:-8], {"block_ids": [0, 6]}, new_tokens=50)])
    assert len(answer.tokens) == 50


def _expected_pieces(served: Served, ask: Ask) -> list[oracle.Piece]:
    """The pieces of a selection of single demonstrations, from the pool's published spans.

    Which demonstrations those are is not the oracle's matter: the project's own retriever says it. Where each one
    lies in its block is checked against the tokenizer's offsets.
    """
    from sglang_ext.retrievers.registry import get
    from sglang_ext.retrievers.selection import example_budget, select_examples

    demos = models.demonstrations(DEMONSTRATIONS)
    blocks = served.info(ask.pool)["blocks"]
    texts, sizes, spans = [], [], {}
    for number, block in enumerate(blocks):
        chosen = [demos[int(name[1:])] for name in block["demonstrations"]]
        parts = [f"{d['input']}\nLabel: {d['output']}\n\n" for d in chosen]
        offsets = served.tokenizer("".join(parts), add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in offsets["offset_mapping"]] + [len("".join(parts))]
        shift = 1 if number == 0 else 0  # BOS
        at = 0
        for index, part in enumerate(parts):
            spans[number, index] = (starts.index(at) + shift, starts.index(at + len(part)) + shift)
            at += len(part)
        assert [tuple(s) for s in block["spans"]] == [spans[number, i] for i in range(len(parts))]
        texts += parts
        sizes.append(len(parts))
    sinks = served.info(ask.pool)["options"]["sink_blocks"]
    scores = get(ask.select["retriever"]).build(texts).score(ask.select["query"])
    m = example_budget(ask.select["ratio"], block_sizes=sizes, sinks=sinks)
    picked = select_examples(scores, sizes, m, sinks, ask.select["order"])
    return [(0, 0, 1), *((number, *spans[number, index]) for number, index in picked)]


@pytest.mark.parametrize("retriever", ["bm25", "all"])
def test_example_granularity(served, question, retriever):
    """(d): demonstrations cut out of their blocks, in every order, after one and two sinks, both position modes."""
    asks = [
        Ask(
            f"{name}-{positions}",
            question,
            {
                "granularity": "example",
                "ratio": 0.6,
                "order": order,
                "retriever": retriever,
                "query": "cancel my card",
            },
        )
        for name in ("sink_previous_self", "full", "self", "two_sinks_one_previous")
        for positions in oracle.POSITIONS
        for order in ("pool", "low_to_high", "high_to_low", "reversed")
    ]
    answers = served.generate(asks)
    wrong = []
    for answer in answers:
        pieces = _expected_pieces(served, answer.ask)
        assert answer.view["stitched_tokens"] == sum(end - start for _, start, end in pieces)
        assert list(answer.view["blocks"]) == list(dict.fromkeys(block for block, _, _ in pieces))
        wrong.append(served.deviation(answer, pieces))
    wrong = [line for line in wrong if line]
    assert not wrong, f"{len(wrong)} of {len(answers)} answers deviate:\n" + "\n".join(wrong[:20])
