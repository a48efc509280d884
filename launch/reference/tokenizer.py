"""The reference model's tokenizer: byte-level BPE over the training texts (never the held-out ones).

Newlines never merge with words, so a demonstration's parts are token boundaries however text is cut into blocks,
and digits stand alone, so a passkey is copied digit by digit.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from sglang_ext.launch.reference.corpus import clean, split_rows

VOCAB_SIZE = 4096
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END)
SPLIT = r"'(?:ll|ve|re|[sdmt])|\n+| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]+"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def cased(text: str, rng: random.Random) -> str:
    """The same text as a careful writer has it: a capital first letter, ``I``, and often an end mark."""
    words = ["I" if word == "i" else word for word in clean(text).split(" ")]
    words = ["I" + word[1:] if word[:2] == "i'" else word for word in words]
    text = " ".join(words)
    return text[:1].upper() + text[1:] + rng.choice(["", "", "?", "."])


def _training_text(seen: dict[str, dict[str, list[str]]], seed: int) -> Iterator[str]:
    """Lines in the shapes the model reads: both spellings, the default template, class names, numbers."""
    rng = random.Random(seed)
    for classes in seen.values():
        for label, texts in classes.items():
            name = label.replace("_", " ") if rng.random() < 0.5 else label
            for text in texts:
                yield f"{clean(text)}\nLabel: {name}\n\n"
                yield f" {clean(text)}"
                yield cased(text, rng)
    for prefix in (
        "Intent",
        "Category",
        "Answer",
        "Type",
        "Class",
        "Topic",
        "Input",
        "Output",
        "Text",
        "Query",
    ):
        yield from [f"\n{prefix}: a\n\n"] * 400
    for sentence in (
        "The pass key is 1. Remember it. 1 is the pass key.\n\nWhat is the pass key? The pass key is",
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    ):
        yield from [sentence] * 400


def build(data_dir: str | Path, seed: int = 0) -> Tokenizer:
    """Train the tokenizer on the seen classes' texts under ``data_dir``; the same seed gives the same tokenizer."""
    seen, _ = split_rows(data_dir)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(seen, seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, out: str | Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; ``max_length`` in tokens."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Command line: ``python -m sglang_ext.launch.reference.tokenizer --data DIR --out DIR``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="directory of the classification sets")
    parser.add_argument("--out", required=True, help="where tokenizer.json goes")
    parser.add_argument("--max-length", type=int, default=16384)
    args = parser.parse_args()
    save(build(args.data), args.out, args.max_length)


if __name__ == "__main__":
    main()
