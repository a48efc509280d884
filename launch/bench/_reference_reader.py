"""This module asks the reference model: a `Writer` turns demonstrations and queries into tokens with a tokenizer alone,
and a `ModelReader` also has the model in transformers, which caches one prefix and answers many queries over it, either
constrained to labels or greedily.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import DynamicCache

PREFIX, SEPARATOR = "\nLabel:", "\n\n"
Demo = tuple[str, str]  # (text, label)


class Writer:
    """A tokenizer, and how prompts are written with it."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(path))

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text`` without BOS."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt(self, demos: Sequence[Demo]) -> list[int]:
        """BOS and the demonstrations in the default template, each followed by the separator."""
        text = "".join(f"{text}{PREFIX} {label}{SEPARATOR}" for text, label in demos)
        return [self.tokenizer.bos_token_id, *self.encode(text)]


class ModelReader(Writer):
    """A causal language model with one cached prefix that many queries read at once."""

    def __init__(self, path: str | Path, device: str | None = None) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(path)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # bfloat16 matrix products are slow on most CPUs, and float32 is what the CPU engine serves
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, attn_implementation="sdpa")
        torch.nn.Module.to(self.model, self.device).eval()
        self.context = self.model.config.max_position_embeddings

    @torch.no_grad()
    def prefill(self, tokens: list[int]) -> DynamicCache:
        """The key-value cache of a prefix."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        self.model.model(torch.tensor([tokens], device=self.device), past_key_values=cache, use_cache=True)
        return cache

    @torch.no_grad()
    def _extend(
        self, cache: DynamicCache, prefix: int, owner: list[int], rows: list[tuple[int, int, int]]
    ) -> torch.Tensor:
        """Append tokens to the cache and return their logits (rows, V).

        Args:
            cache: holds the prefix and every token in ``owner``.
            prefix: tokens of the shared prefix.
            owner: query of each token after the prefix; extended here.
            rows: (query, token, position) to append, a query's rows in order.
        """
        owner.extend(query for query, _, _ in rows)
        new = torch.tensor([query for query, _, _ in rows], device=self.device)
        all_ = torch.tensor(owner, device=self.device)
        index = torch.arange(len(owner), device=self.device)
        own = (all_[None] == new[:, None]) & (index[None] <= index[len(owner) - len(rows) :, None])
        mask = torch.cat([torch.ones(len(rows), prefix, dtype=torch.bool, device=self.device), own], dim=1)
        out = self.model(
            torch.tensor([[token for _, token, _ in rows]], device=self.device),
            position_ids=torch.tensor([[position for _, _, position in rows]], device=self.device),
            attention_mask=mask[None, None],
            past_key_values=cache,
            use_cache=True,
        )
        return out.logits[0].float()

    def classify(
        self, demos: Sequence[Demo], queries: Sequence[str], labels: Sequence[str], group: int = 50
    ) -> list[str]:
        """The constrained greedy answer to each query after all demonstrations.

        At each token only continuations of labels are allowed; a label that is a prefix of another ends with the
        separator.
        """
        end = self.encode(SEPARATOR)
        spelled = {label: tuple(self.encode(f"{PREFIX} {label}")[len(self.encode(PREFIX)) :] + end) for label in labels}
        tokens = self.prompt(demos)
        cache = self.prefill(tokens)
        answers: list[str] = []
        for begin in range(0, len(queries), group):
            part = [self.encode(f"{text}{PREFIX}") for text in queries[begin : begin + group]]
            owner: list[int] = []
            rows = [(q, t, len(tokens) + i) for q, ids in enumerate(part) for i, t in enumerate(ids)]
            left = {q: list(labels) for q in range(len(part))}
            depth = 0
            while rows:
                logits = self._extend(cache, len(tokens), owner, rows)
                last = {q: i for i, (q, _, _) in enumerate(rows)}
                rows = []
                for q, i in last.items():
                    allowed = sorted({spelled[label][depth] for label in left[q]})
                    best = allowed[int(logits[i, torch.tensor(allowed, device=self.device)].argmax())]
                    left[q] = [label for label in left[q] if spelled[label][depth] == best]
                    if len(left[q]) > 1:
                        rows.append((q, best, len(tokens) + len(part[q]) + depth))
                depth += 1
            answers += [left[q][0] for q in range(len(part))]
            cache.crop(-len(owner))
        return answers

    @torch.no_grad()
    def continue_greedily(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """``count`` greedy tokens after each prompt; the prompts have one length."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        step = torch.tensor(prompts, device=self.device)
        out: list[list[int]] = [[] for _ in prompts]
        for _ in range(count):
            hidden = self.model.model(step, past_key_values=cache, use_cache=True).last_hidden_state[:, -1:]
            step = self.model.lm_head(hidden).argmax(-1)
            for row, token in zip(out, step[:, 0].tolist(), strict=True):
                row.append(token)
        return out
