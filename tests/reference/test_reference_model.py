"""The embedded model: loads, is as small as promised, never saw what it is judged on, and learns in context."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import sglang_ext
from sglang_ext.launch.bench import reference as bench
from sglang_ext.launch.bench._reference_reader import Demo, ModelReader
from sglang_ext.launch.reference import corpus as corpora
from sglang_ext.launch.reference.episodes import MIX, EpisodeSampler, batch
from sglang_ext.launch.reference.model import ReferenceLlama
from sglang_ext.launch.reference.tokenizer import build
from sglang_ext.launch.reference.tokens import Corpus
from sglang_ext.launch.reference.train import parse_phases

ASSETS = Path(sglang_ext.__file__).resolve().parent / "assets" / "reference"
DATA_SETS = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA_SETS.exists(), reason=f"no classification sets in {DATA_SETS}")

# Small stand-ins for the sets, so that the rules are tested where the sets are not.
WORDS = ("copper", "lantern", "river", "saddle", "mirror", "garden", "violin", "harbor", "thunder", "basket")


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four training sets of six classes and a banking77, texts of random words."""
    root = tmp_path_factory.mktemp("sets")
    rng = random.Random(0)
    for name in (*corpora.TRAINING_SETS, corpora.HELD_OUT_SET):
        (root / name).mkdir()
        for split in ("train", "test"):
            rows = []
            for c in range(6):
                for i in range(12):
                    words = " ".join(rng.choices(WORDS, k=6))
                    rows.append({"text": f"{words} {name} {split} class{c} text{i}", "label": f"{name}_{c}"})
            (root / name / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    # trec and trec_fine share their texts: a text of a held-out fine class must vanish from trec as well
    shared = {"text": "a text that two sets share"}
    for name, label in (("trec", "trec_0"), ("trec_fine", "trec_fine_2")):
        with (root / name / "train.jsonl").open("a") as out:
            out.write(json.dumps(shared | {"label": label}) + "\n")
    return root


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


@pytest.fixture(scope="module")
def reader() -> ModelReader:
    return ModelReader(ASSETS, "cpu")


# -- the files ----------------------------------------------------------------------------------------------------


def test_size_and_configuration(reader: ModelReader) -> None:
    size = (ASSETS / "model.safetensors").stat().st_size
    assert size <= 15_000_000, f"{size} bytes of weights; at most 15 MB may ship"
    config = reader.model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.head_dim == 64
    assert config.num_attention_heads > config.num_key_value_heads >= 2
    assert config.tie_word_embeddings
    assert config.max_position_embeddings >= 16384
    assert len(reader.tokenizer) == config.vocab_size
    assert not (set(json.loads((ASSETS / "config.json").read_text())) & {"rope_scaling", "auto_map"})


def test_weights_are_trained_and_finite(reader: ModelReader) -> None:
    for name, value in reader.model.named_parameters():
        assert torch.isfinite(value).all(), name
    assert reader.model.model.layers[0].input_layernorm.weight.float().std() > 1e-3  # ones before training


def test_training_model_is_the_exported_model(reader: ModelReader) -> None:
    own = ReferenceLlama(json.loads((ASSETS / "config.json").read_text()))
    state = {k: v for k, v in reader.model.state_dict().items() if k != "lm_head.weight"}
    own.load_state_dict(state)
    tokens = torch.randint(7, 4096, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (own(tokens) - reader.model(tokens).logits).abs().max().item()
    assert difference < 1e-3, difference


def test_tokenizer(reader: ModelReader) -> None:
    text = "what's my balance? 12345\nLabel: card_arrival\n\nÜber naïve 東京\nLabel:"
    ids = reader.encode(text)
    assert reader.tokenizer.decode(ids) == text
    assert reader.tokenizer(text)["input_ids"] == [reader.tokenizer.bos_token_id, *ids]
    # parts of a demonstration are token boundaries: a prompt is the sum of its parts
    whole = reader.encode("play music\nLabel: red\n\nstop it\nLabel:")
    assert whole == reader.encode("play music\nLabel: red\n\n") + reader.encode("stop it\nLabel:")
    chat = reader.tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert chat == "<|bos|><|system|>s<|end|><|user|>u<|end|><|assistant|>"


# -- the data -----------------------------------------------------------------------------------------------------


def test_held_out_rule() -> None:
    assert corpora.held_out_classes(["d", "a", "b", "c", "f", "e", "g"]) == {"c", "f"}


def _texts(part: dict[str, dict[str, list[str]]]) -> set[str]:
    return {corpora.clean(t) for classes in part.values() for texts in classes.values() for t in texts}


def test_split_keeps_held_out_texts_away(tiny_data: Path) -> None:
    seen, unseen = corpora.split_rows(tiny_data)
    assert set(seen["nlu"]) == {"nlu_0", "nlu_1", "nlu_3", "nlu_4"}
    assert set(unseen["nlu"]) == {"nlu_2", "nlu_5"}
    assert not _texts(seen) & _texts(unseen)
    assert "a text that two sets share" in _texts(unseen)
    assert not any("banking77" in text or " test " in text for text in _texts(seen))
    with pytest.raises(ValueError, match="held out whole"):
        corpora.split_rows(tiny_data, ("clinc150", "banking77"))


def test_no_held_out_word_in_any_episode(tiny_data: Path) -> None:
    """Every text here names its set and class: no such name of a held-out class may reach an episode's tokens."""
    seen, unseen = corpora.split_rows(tiny_data)
    tokenizer = build(tiny_data)
    plain = Corpus(tokenizer, seen).plain
    known = {tuple(plain.flat[a : a + n].tolist()) for a, n in zip(plain.start, plain.size, strict=True)}
    assert len(known) > 100
    for name, classes in unseen.items():
        for texts in classes.values():
            for text in texts:
                assert tuple(tokenizer.encode(corpora.clean(text), add_special_tokens=False).ids) not in known, name


@needs_data
def test_real_sets_keep_banking77_out() -> None:
    seen, unseen = corpora.split_rows(DATA_SETS)
    rows = [r for split in ("train", "test") for r in corpora.read_rows(DATA_SETS, "banking77", split)]
    banking = {corpora.clean(text) for text, _ in rows}
    assert not _texts(seen) & banking
    assert not _texts(seen) & _texts(unseen)
    labels = {label for _, label in corpora.read_rows(DATA_SETS, "clinc150", "train")}
    assert set(unseen["clinc150"]) == set(sorted(labels)[2::3])
    assert len(unseen["clinc150"]) == 50


def test_read_rows_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no train\.jsonl"):
        corpora.read_rows(tmp_path, "nlu", "train")
    (tmp_path / "nlu").mkdir()
    (tmp_path / "nlu" / "train.jsonl").write_text('{"text": "a", "label": "b"}\nnonsense\n')
    with pytest.raises(ValueError, match=r"train\.jsonl:2"):
        corpora.read_rows(tmp_path, "nlu", "train")


def test_episodes_follow_from_the_seed(tiny_data: Path, tokenizer: Tokenizer) -> None:
    seen, _ = corpora.split_rows(tiny_data)
    loaded = Corpus(tokenizer, seen)
    first, again, other = (batch(EpisodeSampler(loaded, 3, s), 6, 512, 128) for s in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(first[0], other[0])
    with pytest.raises(ValueError, match="mix"):
        EpisodeSampler(loaded, 0, mix={"poetry": 1.0})


@pytest.mark.parametrize("kind", sorted(MIX))
def test_targets_can_be_read_from_the_context(tiny_data: Path, tokenizer: Tokenizer, kind: str) -> None:
    """Each scored label occurred before, after the same prefix, so the context holds the answer."""
    seen, _ = corpora.split_rows(tiny_data)
    sampler = EpisodeSampler(Corpus(tokenizer, seen), 0, mix={kind: 1.0})
    scored = 0
    for _ in range(8):
        row = sampler.sample(1024)
        tokens = row.tokens.tolist()
        assert len(tokens) == 1025 and row.weight.shape == (1024,)
        for at, size, shots in zip(row.label_at, row.label_size, row.shots, strict=True):
            label = tokens[at : at + size]
            earlier = any(tokens[i : i + size] == label for i in range(1, at - size + 1))
            assert (row.weight[at - 1] > 0) == (shots > 0)
            assert not shots or earlier
            scored += bool(shots)
    assert scored > 8


def test_phases() -> None:
    assert parse_phases("512x4x10,1024x2x5") == [(512, 4, 10), (1024, 2, 5)]
    for bad in ("512x4", "", "0x1x1", "axbxc"):
        with pytest.raises(ValueError, match="phases"):
            parse_phases(bad)


# -- what it can do -----------------------------------------------------------------------------------------------


def _invented(seed: int, classes: int, shots: int, queries: int) -> tuple[list[Demo], list[Demo], list[str]]:
    """Classes invented here, so certainly never seen: each speaks of four words; names are random."""
    rng = random.Random(seed)
    topics = [
        "tractor plough barley harvest",
        "violin cello sonata orchestra",
        "glacier avalanche summit crampon",
        "oven dough yeast flour",
        "turbine voltage transformer cable",
        "puppy kennel leash vaccine",
        "submarine torpedo periscope sonar",
        "mortgage landlord tenancy lease",
        "comet nebula telescope orbit",
        "goalkeeper penalty referee offside",
    ][:classes]
    names = ["amber", "seven", "north", "paper", "delta", "lemon", "queen", "radio", "silver", "tango"][:classes]
    frames = (
        "can you tell me about the {} and the {}",
        "i need a {} with my {} please",
        "what is the {} for a {}",
        "where do i find a {} or a {}",
        "my {} is broken so i use the {}",
        "is there any {} left near the {}",
    )

    def say(c: int) -> str:
        return rng.choice(frames).format(*rng.sample(topics[c].split(), 2))

    demos = [(say(c), names[c]) for c in range(classes) for _ in range(shots)]
    rng.shuffle(demos)
    return demos, [(say(c), names[c]) for c in (rng.randrange(classes) for _ in range(queries))], names


def test_learns_invented_classes_from_the_context(reader: ModelReader) -> None:
    demos, queries, names = _invented(0, classes=10, shots=8, queries=60)
    texts = [text for text, _ in queries]
    answers = reader.classify(demos, texts, names)
    assert set(answers) <= set(names)
    right = sum(a == label for a, (_, label) in zip(answers, queries, strict=True)) / len(queries)
    assert right >= 0.75, f"{right:.2f} of invented classes right (chance 0.10)"
    # the answers come from the labels in the context: exchange the names and the answers go with them
    turned = dict(zip(names, names[1:] + names[:1], strict=True))
    other = reader.classify([(text, turned[label]) for text, label in demos], texts, names)
    follow = sum(turned[label] == a for a, (_, label) in zip(other, queries, strict=True)) / len(queries)
    assert follow >= 0.75, f"{follow:.2f} right after the names were exchanged"


def test_recalls_a_passkey(reader: ModelReader) -> None:
    rng = random.Random(1)
    for depth in (0.05, 0.5, 0.9):
        prompt, key = bench.passkey_prompt(reader, 2048, depth, rng)
        assert len(prompt) == 2048
        out = reader.continue_greedily([prompt], 5)
        assert reader.tokenizer.decode(out[0]).strip() == key


def test_constrained_answers_with_labels_that_are_prefixes(reader: ModelReader) -> None:
    demos = [("play some jazz", "red"), ("set an alarm", "red fox")] * 6
    answers = reader.classify(demos, ["play some jazz", "set an alarm"], ["red", "red fox"])
    assert answers == ["red", "red fox"]


def test_queries_do_not_see_each_other(reader: ModelReader) -> None:
    demos, queries, names = _invented(2, classes=5, shots=3, queries=7)
    texts = [text for text, _ in queries]
    together = reader.classify(demos, texts, names, group=7)
    alone = reader.classify(demos, texts, names, group=1)
    assert together == alone


def test_bm25_matches_rank_bm25() -> None:
    from rank_bm25 import BM25Okapi

    demos, queries, _ = _invented(3, classes=10, shots=5, queries=40)
    theirs = BM25Okapi([bench._words(text) for text, _ in demos])
    right = sum(demos[int(np.argmax(theirs.get_scores(bench._words(text))))][1] == label for text, label in queries)
    assert bench.bm25_neighbour(demos, queries) == right / len(queries)
