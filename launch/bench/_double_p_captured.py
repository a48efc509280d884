"""Keys that the reference model's trained heads write, and how much of the attention each method recovers of them.

Texts are what the model was trained to read: demonstrations of the demo's intents with a question at the end, and in
every second one a passkey among them. Each is as long as the model's context, and every layer's keys, values and last
queries are kept: what the heads do where an answer begins.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

import sglang_ext
from sglang_ext.config import PoolOptions
from sglang_ext.kernels.cluster_attention.pool import centroid_dtype, narrowed
from sglang_ext.kernels.cluster_attention.types import HeadShape
from sglang_ext.kernels.kmeans import Clusters
from sglang_ext.kernels.kmeans import kmeans as kmeans_reference
from sglang_ext.launch.bench._double_p_rows import WIDTH, CachedRows, Level
from sglang_ext.launch.bench._record import Curve, Figure, Timing
from sglang_ext.launch.demo_data import INTENTS, sentence
from sglang_ext.policies import double_p, quest, retroinfer, twilight
from sglang_ext.policies.double_p import DoubleP

if TYPE_CHECKING:
    from sglang_ext.names import Tokenizer


MODEL = Path(sglang_ext.__file__).resolve().parent / "assets" / "reference"
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
Selecting = DoubleP | retroinfer.RetroInfer | quest.Quest | twilight.Twilight | Literal["exact"]
"""A method; "exact" is Double-P with the clusters' true masses."""
GRID = tuple(x / 100 for x in range(50, 101, 2))
"""Shares of the attention at which the distribution of what is recovered is drawn."""


@dataclass(frozen=True)
class Text:
    """Caches of one text.

    Attributes:
        keys, values: [layers, kv_heads, tokens, head_dim] keys rotated, as the KV cache has them.
        query: [layers, heads, head_dim] of the last token, rotated.
    """

    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor


def prompt(tokenizer: Tokenizer, length: int, seed: int) -> list[int]:
    """Exactly `length` tokens: demonstrations and a question; with an odd seed it asks for a passkey among them."""
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


def capture(device: torch.device, count: int, length: int, saved: Path | None = None) -> list[Text]:
    """Caches of `count` texts, by transformers in float32, kept in bfloat16 (queries in float32).

    Args:
        device: where the model runs and the caches are.
        count: texts, with seeds 0, 1, ...
        length: tokens of each; at most the model's context.
        saved: file that the caches are read from where it is there, else written to.

    Raises:
        ValueError: longer texts than the model was trained for; a file of other texts.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    if saved is not None and saved.exists():
        texts = [Text(**{k: v.to(device) for k, v in text.items()}) for text in torch.load(saved, weights_only=True)]
        if len(texts) < count or texts[0].keys.shape[2] != length:
            raise ValueError(
                f"{saved} has {len(texts)} texts of {texts[0].keys.shape[2]} tokens, expected {count} of {length}: "
                "delete it to have them captured anew"
            )
        return texts[:count]
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    model = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)
    torch.nn.Module.to(model, device).eval()
    if length > model.config.max_position_embeddings:
        raise ValueError(
            f"texts of {length} tokens: expected at most {model.config.max_position_embeddings}, the model's context"
        )
    dim = model.config.head_dim
    last: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda _m, _i, out: last.append(out[:, -1:]))
    texts = []
    with torch.no_grad():
        for seed in range(count):
            last.clear()
            ids = torch.tensor([prompt(tokenizer, length, seed)], device=device)
            cache = model.model(ids, use_cache=True).past_key_values
            raw = torch.stack([x.view(-1, dim) for x in last]).unsqueeze(2)  # [layers, heads, 1, head_dim]
            cos, sin = model.model.rotary_emb(raw, torch.tensor([[length - 1]], device=device))
            query, _ = apply_rotary_pos_emb(raw, raw, cos, sin)
            layers = range(len(last))
            keys, values = (
                torch.stack([getattr(cache.layers[layer], which)[0] for layer in layers]).bfloat16()
                for which in ("keys", "values")
            )
            texts.append(Text(keys, values, query.squeeze(2)))
    if saved is not None:
        torch.save([{k: v.cpu() for k, v in vars(text).items()} for text in texts], saved)
    return texts


def check_texts(count: int, tokens: int, length: int, batch: int, layers: int | None = None) -> None:
    """Raise ValueError where `count` texts of so many tokens do not make `batch` rows of `length` (see `Captured`).

    Args:
        count, tokens: of the texts.
        length, batch: of the rows.
        layers: of the model; None: the reference model's.
    """
    if layers is None:
        layers = json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]
    needed = -(-batch // (layers // 2)) * (length // tokens)
    if length < tokens or length % tokens or count < needed:
        raise ValueError(
            f"{batch} rows of {length} from {count} texts of {tokens} tokens: expected {needed} texts, of a length "
            "that divides the row's"
        )


class Captured(CachedRows):
    """Rows tiled from captured texts: eight key-value heads of 64 components, four query heads each.

    A row's key-value heads are those of a pair of layers side by side (row 0 layers 0 and 1, row 1 layers 2 and 3 and
    so on), and each of the model's two query heads a key-value head stands twice: a group of four costs what one of
    Llama-3.1-8B does, and its union is that of two trained heads. A row longer than a text is whole texts end to end,
    each at positions from 0 as it was captured; the query is the last text's. After all pairs of layers, further rows
    take the next texts.

    Args: as `CachedRows`; texts: enough of them, of a length that divides the row's.

    Raises:
        ValueError: too few texts, or of another length.
    """

    words = "captured keys"

    def __init__(
        self,
        length: int,
        batch: int,
        texts: Sequence[Text],
        config: DoubleP,
        device: torch.device,
        cluster: Callable[..., Clusters] = kmeans_reference,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        layers, kv_heads, tokens, dim = texts[0].keys.shape
        check_texts(len(texts), tokens, length, batch, layers)
        pairs, each = layers // 2, length // tokens
        group = texts[0].query.shape[1] // kv_heads
        shape = HeadShape(heads=4 * group * kv_heads, kv_heads=2 * kv_heads, head_dim=dim, value_dim=dim, dtype=dtype)
        super().__init__(length, batch, shape, config, device, cluster)
        queries = []
        for row in range(batch):
            own = texts[row // pairs * each : (row // pairs + 1) * each]
            pair = slice(2 * (row % pairs), 2 * (row % pairs) + 2)
            keys, values = (
                torch.cat([getattr(text, which)[pair].flatten(0, 1) for text in own], 1).transpose(0, 1)
                for which in ("keys", "values")
            )
            self.fill(row, keys, values)
            query = own[-1].query[pair].unflatten(1, (kv_heads, group))  # [2, kv_heads, group, head_dim]
            queries.append(query.repeat_interleave(2, 2).flatten(0, 2))
        self._queries = torch.stack(queries).to(device, dtype)

    def queries(self, level: Level | None = None) -> torch.Tensor:
        return self._queries


@dataclass(frozen=True)
class Recovered:
    """What one method recovers, over the query heads of all layers and texts.

    Attributes:
        mass: [heads] share of the true attention to the middle tokens, sinks and window left aside.
        whole: [heads] share of all of it, sinks and window counted as recovered.
        tokens: [key-value heads] share of the middle tokens that is kept, exactly or by centroid.
        exact: [key-value heads] share that is read token by token.
    """

    mass: torch.Tensor
    whole: torch.Tensor
    tokens: torch.Tensor
    exact: torch.Tensor

    def violations(self, p: float) -> float:
        """Share of the heads that recover less than p of the middle's attention."""
        return float((self.mass < p).double().mean())


def methods(config: DoubleP) -> dict[str, Selecting]:
    """Double-P and the baselines with the budgets that their authors recommend."""
    return {
        f"Double-P ({config.p1:g}, {config.p2:g})": config,
        "Double-P, centroids in float8": replace(config, centroids="float8"),
        "Double-P, exact cluster masses": "exact",
        "RetroInfer, 1.8% and 23.2% of the clusters": retroinfer.RetroInfer(),
        "Quest, 25% of the tokens": quest.Quest(),
        f"Quest with Twilight's top-p ({config.p1:g}) in 25%": twilight.Twilight(p=config.p1),
    }


def kept_tokens(
    method: Selecting, query: torch.Tensor, keys: torch.Tensor, labels: torch.Tensor, config: DoubleP
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which middle tokens of one layer a method reads: (exact, by centroid), each [kv_heads, tokens] bool.

    Args:
        method: one of `methods`.
        query: [kv_heads, group, head_dim] float32.
        keys: [kv_heads, tokens, head_dim] float32, the middle tokens'.
        labels: [kv_heads, tokens] int64, their clusters.
        config: of Double-P, for its p.
    """
    none = torch.zeros(keys.shape[:2], dtype=torch.bool, device=keys.device)
    if isinstance(method, quest.Quest):
        scores = quest.page_scores(query, *quest.page_bounds(keys, method.page))
        return quest.select(scores, keys.shape[1], method), none
    if isinstance(method, twilight.Twilight):
        return twilight.select(query, keys, method), none
    clusters = int(labels.max()) + 1
    sizes = double_p.cluster_sizes(labels, clusters)
    if method == "exact":
        log_mass = double_p.exact_log_mass(double_p.logits(query, keys), labels, clusters)
    else:
        centroids = double_p.cluster_values(keys, labels, clusters)
        if isinstance(method, DoubleP):
            centroids = narrowed(centroids, centroid_dtype(method.centroids, keys.dtype)).to(keys.dtype)
        log_mass = double_p.estimated_log_mass(query, centroids, sizes)
    share = double_p.distribution(log_mass)
    if isinstance(method, retroinfer.RetroInfer):
        exact, approx = retroinfer.select(share, method)
    else:
        exact, approx = double_p.select(share, config)
    return exact.gather(1, labels), approx.gather(1, labels)


def recovered(
    texts: Sequence[Text],
    chosen: dict[str, Selecting],
    config: DoubleP,
    cluster: Callable[..., Clusters] = kmeans_reference,
) -> dict[str, Recovered]:
    """What each method recovers of every text's last step, all layers; selections in float32, by the policies."""
    parts: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in chosen}
    for text in texts:
        layers, kv_heads, length, _ = text.keys.shape
        begin, end = config.clustered(length)
        slots = torch.arange(begin, end, dtype=torch.int32, device=text.keys.device)
        for layer in range(layers):
            cached = text.keys[layer].transpose(0, 1).contiguous()
            values = text.values[layer].transpose(0, 1).contiguous()
            found = cluster(
                cached, values, slots, config.plan(begin, end, WIDTH), iterations=config.iterations,
                assignment=config.assignment,
            )  # fmt: skip
            labels = found.labels.long()
            keys = text.keys[layer].float()
            query = text.query[layer].float().unflatten(0, (kv_heads, -1))
            x = double_p.logits(query, keys)
            share, middle = x.softmax(-1)[..., begin:end], x[..., begin:end].softmax(-1)
            for name, method in chosen.items():
                exact, approx = kept_tokens(method, query, keys[:, begin:end], labels, config)
                kept = (exact | approx).unsqueeze(1)
                mass = (middle * kept).sum(-1)
                whole = 1 - (share * ~kept).sum(-1)
                tokens = kept.squeeze(1).double().mean(-1)
                parts[name].append((mass.flatten(), whole.flatten(), tokens, exact.double().mean(-1)))
    return {name: Recovered(*(torch.cat(each) for each in zip(*rows, strict=True))) for name, rows in parts.items()}


def figures_of(found: dict[str, Recovered], p: float, length: int, texts: int) -> list[Figure]:
    """A row for each method: its distribution of recovered mass (median, 10% to 90%), beside the first one's."""
    figures: list[Figure] = []
    first: Timing | None = None
    for name, each in found.items():
        mass = each.mass.double()
        timing = Timing.of(mass.tolist())
        low = each.violations(p)
        notes = {
            "recovered_p5": float(mass.quantile(0.05)),
            "recovered_mean": float(mass.mean()),
            "recovered_least": float(mass.min()),
            "whole_p5": float(each.whole.double().quantile(0.05)),
            "violations": low,
            "kept_tokens": float(each.tokens.mean()),
            "exact_tokens": float(each.exact.mean()),
            "texts": texts,
            "heads": len(mass),
        }
        words = (
            f"recovered attention to the middle, captured keys, {length} tokens: {name} ({notes['kept_tokens']:.0%} of "
            f"the tokens kept, below {p:g} in {low:.0%} of the heads, 5th percentile {notes['recovered_p5']:.3f})"
        )
        baseline = "" if first is None else next(iter(found))
        figures.append(Figure(words, timing, baseline, first, unit="%", notes=notes))
        first = first or timing
    return figures


def curve_of(found: dict[str, Recovered], length: int) -> Curve:
    """Which share of the heads recovers less than x of the attention to the middle (the paper's Figures 2 and 3)."""
    return Curve(
        title=f"Heads that recover less, captured keys, {length} tokens",
        x="share of the attention to the middle",
        y="share of the heads below it",
        series={name: [(x, each.violations(x)) for x in GRID] for name, each in found.items()},
    )


def measure(
    device: torch.device, count: int, length: int, config: DoubleP, saved: Path | None = None
) -> tuple[list[Figure], Curve, list[Text]]:
    """All rows of recovered mass, their distributions, and the texts that they are about."""
    cluster: Callable[..., Clusters] = kmeans_reference
    if device.type == "cuda":
        from sglang_ext.kernels.kmeans.dispatch import kmeans as cluster
    texts = capture(device, count, length, saved)
    found = recovered(texts, methods(config), config, cluster)
    return figures_of(found, config.p1, length, count), curve_of(found, length), texts
