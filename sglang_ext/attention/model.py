"""What readers need to know of the model and of its memory, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_ext import compat
from sglang_ext.attention.policy import ServedModel
from sglang_ext.attention.rope import find_rope, no_rotation
from sglang_ext.compat.ranks import this_rank
from sglang_ext.kernels.float8 import FLOAT8
from sglang_ext.names import AttentionBackend, ModelConfig, ModelRunner


@dataclass(frozen=True)
class Machine:
    """What a reader finds beside the model.

    Attributes:
        kernels: `torch`, `triton` or `flashinfer` (`attention.choice`).
        base: the attention backend that the reader belongs to, of which a reader uses what is SGLang's own: attention
            of single requests. It calls none of the `forward` methods, which come back to the reader.
    """

    kernels: str
    base: AttentionBackend


def layers_read(config: ModelConfig, layers: int) -> int:
    """How many of a model's layers readers read, before it is built: a policy keeps something of these alone."""
    windows, _ = compat.listed_windows(config)
    return layers - windows


class Model:
    """The sizes of the attention layers, the rotation, the KV cache and the table of requests.

    Raises:
        ValueError: the model has no rotary embedding that views can use.

    Attributes:
        window_layers: numbers of the layers with a sliding window. SGLang's own attention serves them, and what is said
            here of layers leaves them out.
        rope: the model's rotation. Where some layers have windows or states, there are no views that move keys, and it
            rotates nothing: the layers of such a model may have different rotations, or none.
        table: [requests, columns] int32, the KV slot of each column of each request in SGLang's request pool.
        slots: rows of every layer's KV buffer.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        self._runner = model_runner
        self.table: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self.window_layers = compat.window_layers(model_runner)
        states, _ = compat.listed_states(model_runner.model_config)
        views_move = not self.window_layers and not states
        self.rope = find_rope(model_runner.model) if views_move else no_rotation(self.table.device)
        self.slots = compat.num_kv_slots(model_runner)

    @cached_property
    def shape(self) -> compat.AttentionShape:
        """Sizes of the attention layers; ValueError where layers differ."""
        return compat.attention_shape(self._runner)

    @property
    def served(self) -> ServedModel:
        """What policies may know of it."""
        path, loaded = compat.model_path(self._runner)
        kv_heads = compat.model_kv_heads(self._runner)
        shape = self.shape
        return ServedModel(path, len(self.caches()), shape.heads, kv_heads, loaded, this_rank(), shape.head_dim)

    @property
    def device(self) -> torch.device:
        return self.rope.inv_freq.device

    def caches(self) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
        """(keys [slots, kv_heads, head_dim], values [slots, kv_heads, value_dim]) by number of the layer."""
        return compat.kv_by_layer(self._runner.token_to_kv_pool, but=self.window_layers)

    @property
    def request_slots(self) -> int:
        """KV slots that requests can be given."""
        return compat.num_request_slots(self._runner)

    @property
    def context(self) -> int:
        """Positions that the model knows; a row of the table is that long."""
        return compat.context_length(self._runner)

    @property
    def tokens_of_a_pass(self) -> int:
        """Tokens of prompts that SGLang computes in one pass, at most (`--chunked-prefill-size`); 0 for any number."""
        return compat.chunked_prefill_size(self._runner)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values in the KV cache: the model's, or float8 e4m3."""
        keys, _ = next(iter(self.caches().values()))
        return keys.dtype

    def check_cache_type(self, float8: bool = False) -> None:
        """Raise ValueError where the KV cache has another type than kernels expect.

        Args:
            float8: whether they read float8 e4m3 beside the model's type.
        """
        kind = self.cache_dtype
        if kind != self.shape.dtype and not (float8 and kind == FLOAT8):
            raise ValueError(
                f"a KV cache of {kind} for a model in {self.shape.dtype}: expected the model's type; leave out"
                " --kv-cache-dtype"
            )
