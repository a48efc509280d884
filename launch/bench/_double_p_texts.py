"""Keys, values and last queries that a model's heads write where it has read a text.

By default the model is the embedded one, and a text is what it was trained to read: demonstrations of the demo's
intents with a question at the end, and in every second one a passkey among them. Another model reads them, too, or
pieces of books.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_ext.config import PoolOptions
from sglang_ext.launch.bench.reference import MODEL
from sglang_ext.launch.demo_data import INTENTS, sentence

if TYPE_CHECKING:
    from sglang_ext.names import Tokenizer

NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
STEPS = 16
"""Of a text's last tokens, so many queries are kept: a decoding step has one each."""


@dataclass(frozen=True)
class Text:
    """Caches of one text.

    Attributes:
        keys, values: [layers, kv_heads, tokens, head_dim] bfloat16; keys are rotated, as the KV cache has them.
        queries: [layers, heads, `STEPS`, head_dim] float32 of the last tokens, rotated.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor

    @property
    def query(self) -> torch.Tensor:
        """[layers, heads, head_dim] of the last token."""
        return self.queries[:, :, -1]


@dataclass(frozen=True)
class TextSource:
    """Which model reads what.

    Attributes:
        model: folder of a Llama.
        books: files in UTF-8 whose pieces are read; none: demonstrations.
    """

    model: Path = MODEL
    books: tuple[Path, ...] = ()

    @property
    def words(self) -> str:
        """What rows and plots call the keys."""
        name = "" if self.model == MODEL else f" of {self.model.name}"
        return f"captured keys{name}{', books' if self.books else ''}"

    def ids(self, tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
        """The token ids of `count` texts of `length` tokens; those of books begin at equal distances.

        Raises:
            ValueError: books with fewer tokens than a text, or texts that are shorter than a question.
        """
        if not self.books:
            return [prompt(tokenizer, length, seed) for seed in range(count)]
        read = "\n".join(path.read_text(encoding="utf-8") for path in self.books)
        tokens = list(tokenizer(read, add_special_tokens=False)["input_ids"])
        room = len(tokens) - length + 2  # where a text may begin
        if room < 1:
            raise ValueError(f"books of {len(tokens)} tokens: expected at least {length - 1} for a text of {length}")
        begins = [room * number // count for number in range(count)]
        return [[tokenizer.bos_token_id, *tokens[begin : begin + length - 1]] for begin in begins]


def prompt(tokenizer: Tokenizer, length: int, seed: int) -> list[int]:
    """Exactly `length` tokens: demonstrations and a question; with an odd seed it asks for a passkey among them.

    Raises:
        ValueError: no room for a demonstration.
    """
    dice, template = random.Random(seed), PoolOptions()
    labels = list(INTENTS)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    key = "".join(dice.choice("0123456789") for _ in range(5))
    needle = encode(NEEDLE.format(key=key) + template.separator) if seed % 2 else []
    asked = QUESTION if seed % 2 else template.render_query(sentence(dice.choice(labels), dice))[0]
    question = encode(asked)
    room = length - 1 - len(needle) - len(question)
    if room < 1:
        raise ValueError(f"texts of {length} tokens: expected at least {length - room + 1}")
    ids: list[int] = []
    stops = [0]  # where a demonstration begins
    while len(ids) < room:
        label = dice.choice(labels)
        ids += encode(template.render(sentence(label, dice), label) + template.separator)
        stops.append(len(ids))
    depth = dice.random() * room
    at = max(stop for stop in stops if stop <= depth)
    # The last demonstration is cut, not the question.
    return [tokenizer.bos_token_id, *ids[:at], *needle, *ids[at:room], *question]


def capture(
    device: torch.device, count: int, length: int, saved: Path | None = None, source: TextSource | None = None
) -> list[Text]:
    """Caches of `count` texts, by transformers in float32.

    Args:
        device: where the model runs and the caches are.
        count: texts.
        length: tokens of each; at most the model's context.
        saved: file that the caches are read from where it is there, else written to.
        source: the model, and what it reads (default: the embedded one, and demonstrations).

    Raises:
        ValueError: longer texts than the model was trained for, or of fewer than `STEPS` tokens; a file of other texts;
            a model that is no Llama; and what `TextSource.ids` raises.
    """
    from transformers import AutoTokenizer

    source = source or TextSource()
    ids = source.ids(AutoTokenizer.from_pretrained(str(source.model)), count, length)
    digests = [hashlib.sha256(json.dumps([str(source.model), each]).encode()).hexdigest() for each in ids]
    if saved is not None and saved.exists():
        return _read(saved, digests, length, source, device)
    texts = _captured(device, ids, source)
    if saved is not None:
        kept = [{name: value.cpu() for name, value in vars(text).items()} for text in texts]
        torch.save({"of": source.words, "digests": digests, "texts": kept}, saved)
    return texts


def _read(saved: Path, digests: list[str], length: int, source: TextSource, device: torch.device) -> list[Text]:
    """The texts of a file, where they are those that are asked for, by digests of their models and tokens."""
    read = torch.load(saved, weights_only=True)
    if not isinstance(read, dict) or {"of", "digests", "texts"} != set(read):
        raise ValueError(f"{saved}: another layout; delete it to have the texts captured anew")
    texts = [Text(**{name: value.to(device) for name, value in text.items()}) for text in read["texts"]]
    if read["digests"][: len(digests)] != digests:
        raise ValueError(
            f"{saved} has {len(texts)} texts of {texts[0].keys.shape[2]} tokens ({read['of']}), expected "
            f"{len(digests)} of {length} ({source.words}), of the same model and books: delete it to have them "
            "captured anew"
        )
    return texts[: len(digests)]


def _captured(device: torch.device, texts_ids: list[list[int]], source: TextSource) -> list[Text]:
    """What the model writes where it reads each text."""
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    length = len(texts_ids[0])
    model = AutoModelForCausalLM.from_pretrained(str(source.model), dtype=torch.float32)
    torch.nn.Module.to(model, device).eval()
    if model.config.model_type != "llama":
        raise ValueError(f"{source.model}: model type {model.config.model_type!r}, expected 'llama'")
    if not STEPS <= length <= model.config.max_position_embeddings:
        raise ValueError(
            f"texts of {length} tokens: expected {STEPS} to {model.config.max_position_embeddings}, the model's context"
        )
    dim = model.config.head_dim
    last: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda _m, _i, out: last.append(out[0, -STEPS:]))
    places = torch.arange(length - STEPS, length, device=device).unsqueeze(0)
    texts = []
    with torch.no_grad():
        for ids in texts_ids:
            last.clear()
            cache = model.model(torch.tensor([ids], device=device), use_cache=True).past_key_values
            raw = torch.stack([x.unflatten(-1, (-1, dim)).transpose(0, 1) for x in last])
            cos, sin = model.model.rotary_emb(raw, places)
            queries, _ = apply_rotary_pos_emb(raw, raw, cos, sin)
            keys, values = (
                torch.stack([getattr(cache.layers[layer], which)[0] for layer in range(len(last))]).bfloat16()
                for which in ("keys", "values")
            )
            texts.append(Text(keys, values, queries))
    return texts
