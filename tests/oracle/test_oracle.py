"""The oracle judged before it judges: two routes agree, its precision suffices, and it sees every mistake."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from tests.oracle import models, oracle

BLOCK_SIZES = (3, 2, 4, 2, 3, 2, 3)


@pytest.fixture(scope="module", params=sorted(models.CONFIGS))
def saved(request, tmp_path_factory):
    return models.save_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(saved):
    torch.manual_seed(0)
    return models.load_model(saved)


@pytest.fixture(scope="module")
def tokenizer(saved):
    return models.load_tokenizer(saved)


@pytest.fixture(scope="module")
def blocks(tokenizer):
    """Seven blocks of uneven size, BOS at the head of the first, about 300 tokens in all."""
    demos = iter(models.demonstrations(sum(BLOCK_SIZES)))
    made = []
    for size in BLOCK_SIZES:
        text = "".join(f"{d['input']}\nLabel: {d['output']}\n\n" for d in islice(demos, size))
        made.append(tokenizer.encode(text, add_special_tokens=False))
    made[0] = [tokenizer.bos_token_id, *made[0]]
    return made


@pytest.fixture(scope="module")
def own(tokenizer):
    """A question and an answer of several tokens: (own tokens, number of answer tokens)."""
    question = tokenizer.encode("77: freeze my card, case 3\nLabel:", add_special_tokens=False)
    answer = tokenizer.encode(" lost item\n\n", add_special_tokens=False)
    return question + answer, len(answer)


def _answer(table: torch.Tensor, own: tuple[list[int], int]) -> torch.Tensor:
    tokens, n = own
    return table[-n - 1 : -1].gather(1, torch.tensor(tokens[-n:])[:, None])[:, 0]


def _largest_difference(a: oracle.EncodedBlocks, b: oracle.EncodedBlocks) -> float:
    pairs = [(a.keys, b.keys), (a.values, b.values)]
    return max(
        (x - y).abs().max().item()
        for u, v in pairs
        for p, q in zip(u, v, strict=True)
        for x, y in zip(p, q, strict=True)
    )


def test_tokenizer_round_trip_and_bos(tokenizer):
    text = "0: activate my card ünï\nLabel: card issue\n\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.encode(text)[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in tokenizer.encode(text, add_special_tokens=False)
    assert len(tokenizer) <= models.VOCAB_SIZE
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<s><|user|>hi<|end|><|assistant|>"


def test_merges_cross_boundaries(tokenizer):
    """Tokens depend on where a text is cut, or a boundary put at a wrong place could not be seen."""
    whole = tokenizer.encode("Label: card issue", add_special_tokens=False)
    apart = [tokenizer.encode(t, add_special_tokens=False) for t in ("Label: c", "ard issue")]
    assert whole != [*apart[0], *apart[1]]


@pytest.mark.parametrize("pattern", oracle.PATTERNS)
@pytest.mark.parametrize(("sinks", "previous"), [(1, 2), (2, 1), (1, 0)])
def test_two_routes_agree(model, blocks, pattern, sinks, previous):
    """Block by block with re-rotated cached keys equals one dense forward under a block mask."""
    by_block = oracle.encode(model, blocks, pattern, sinks, previous)
    at_once = oracle.encode_in_one_forward(model, blocks, pattern, sinks, previous)
    assert _largest_difference(by_block, at_once) < 1e-5
    assert all(torch.equal(p, q) for p, q in zip(by_block.positions, at_once.positions, strict=True))


def test_full_selection_is_the_dense_model(model, blocks, own):
    """Pattern full, all blocks in pool order: nothing but the plain model on the concatenated tokens."""
    encoded = oracle.encode(model, blocks, "full")
    ours = oracle.log_probs(model, encoded, oracle.whole_blocks(blocks, range(len(blocks))), own[0])
    flat = [t for b in blocks for t in b] + own[0]
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([flat])).logits[0].log_softmax(-1)[-len(own[0]) :]
    assert (ours - plain).abs().max() < 2e-5


def test_local_equals_sequential_where_rope_is_relative(model, blocks):
    """Pattern full: the two frames coincide. Pattern self: they differ by a shift, which RoPE ignores."""
    full = [oracle.encode(model, blocks, "full", positions=p) for p in oracle.POSITIONS]
    assert _largest_difference(*full) < 1e-6
    alone = [oracle.encode(model, blocks, "self", positions=p) for p in oracle.POSITIONS]
    assert _largest_difference(*alone) < 5e-5


def test_local_frames_by_a_dense_forward(model, blocks):
    """A local frame by a second route: with sinks only, block i's frame is the plain text [sink, block i]."""
    encoded = oracle.encode(model, blocks, "sink+self", positions="local")
    for i in (1, 4):
        pair = oracle.encode_in_one_forward(model, [blocks[0], blocks[i]], "full")
        for layer in range(3):
            assert (encoded.keys[i][layer] - pair.keys[1][layer]).abs().max() < 1e-5
            assert (encoded.values[i][layer] - pair.values[1][layer]).abs().max() < 1e-5


def test_a_single_turn_is_a_prefix_of_two(model, blocks, own):
    encoded = oracle.encode(model, blocks)
    pieces = oracle.whole_blocks(blocks, [0, 3, 5])
    one = oracle.log_probs(model, encoded, pieces, own[0])
    two = oracle.log_probs(model, encoded, pieces, own[0] + own[0])
    assert (one - two[: len(own[0])]).abs().max() < 2e-5
    split = oracle.answer_logprobs(model, blocks, pieces, [(own[0], own[0][:3]), (own[0][3:], [5, 6])])
    assert [len(s) for s in split] == [3, 2]
    assert abs(split[0][0] - one[-1, own[0][0]]) < 2e-5


def test_pieces_of_whole_blocks_are_the_blocks(model, blocks, own):
    encoded = oracle.encode(model, blocks)
    whole = oracle.log_probs(model, encoded, oracle.whole_blocks(blocks, [0, 4]), own[0])
    n = len(blocks[4])
    cut = oracle.log_probs(model, encoded, [(0, 0, len(blocks[0])), (4, 0, 7), (4, 7, n)], own[0])
    assert (whole - cut).abs().max() < 1e-6
    with pytest.raises(ValueError, match="overlaps"):
        oracle.log_probs(model, encoded, [(0, 0, 5), (0, 4, 6)], own[0])


def test_float32_is_precise_enough(saved, model, blocks, own):
    """Against float64 the oracle's own error stays under a fifth of the tests' tolerance of 1e-4."""
    exact = models.load_model(saved, torch.float64)
    for positions in oracle.POSITIONS:
        tables = []
        for m in (model, exact):
            encoded = oracle.encode(m, blocks, positions=positions)
            tables.append(oracle.log_probs(m, encoded, oracle.whole_blocks(blocks, [0, 6, 2]), own[0]).double())
        assert (tables[0] - tables[1]).abs().max() < 2e-5


# What an engine could get wrong; the right one is the default pattern and blocks 0, 5, 3 in this order.
MISTAKES = {
    "no previous blocks": {"encode": {"previous_blocks": 0}},
    "one previous block too few": {"encode": {"previous_blocks": 1}},
    "one previous block too many": {"encode": {"previous_blocks": 3}},
    "dense encoding": {"encode": {"pattern": "full"}},
    "sink not attended": {"encode": {"sink_blocks": 0}},
    "local instead of sequential": {"encode": {"positions": "local"}},
    "view in pool order": {"view": [0, 3, 5]},
    "sink left out of the view": {"view": [5, 3]},
    "own tokens one position late": {"answer": {"own_offset": 1}},
    "own tokens one position early": {"answer": {"own_offset": -1}},
    "keys not rebased": {"answer": {"rebase": False}},
    "sink's last token missing": {"cut": 1},
}


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_mistake_is_seen(model, blocks, own, mistake):
    """Each mistake moves the answer's log-probabilities by over 1e-2, a hundred times the tolerance."""
    wrong = MISTAKES[mistake]
    view = oracle.whole_blocks(blocks, [0, 5, 3])
    right = _answer(oracle.log_probs(model, oracle.encode(model, blocks), view, own[0]), own)
    if "view" in wrong:
        view = oracle.whole_blocks(blocks, wrong["view"])
    if "cut" in wrong:
        view = [(0, 0, len(blocks[0]) - wrong["cut"]), *view[1:]]
    encoded = oracle.encode(model, blocks, **wrong.get("encode", {}))
    got = _answer(oracle.log_probs(model, encoded, view, own[0], **wrong.get("answer", {})), own)
    assert (got - right).abs().max() > 1e-2


def test_attention_is_not_flat(model, blocks):
    """Mean perplexity of the attention rows well below the number of keys a row sees."""
    flat = torch.tensor([[t for b in blocks for t in b]])
    with torch.no_grad():
        attentions = model(input_ids=flat, output_attentions=True).attentions
    seen = torch.arange(1, flat.shape[1] + 1)
    for probs in attentions:
        entropy = -(probs * probs.clamp_min(1e-30).log()).sum(-1)[0]
        assert (entropy.exp() / seen)[:, 50:].mean() < 0.5
