"""A prompt that nobody sent, read before a server of Ltri-LLM takes requests.

The first requests are not to wait for compilers, and whole chunks are recorded (`ltri_graphs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sglang_ext.attention.ltri import LtriPolicy
from sglang_ext.attention.ltri_chunks import AnyMemory, Beginning, KVCaches
from sglang_ext.attention.ltri_layer import LayerTokens
from sglang_ext.attention.ltri_memory import LayerHost
from sglang_ext.attention.ltri_stores import KernelChunks
from sglang_ext.attention.policy import Caches, Carry
from sglang_ext.cache.host_blocks import HostLease
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.span_index import Spans


@dataclass(frozen=True)
class WarmUp:
    """Reads a prompt on SGLang's padding slot; what it leaves on the host and in its row is let go.

    Attributes:
        policy: whose streams there will be.
        chunks: what computes them.
        caches: layer -> (keys, values).
        heads: query heads of a layer.
        rope: the model's rotation.
        scale: factor of the logits.
    """

    policy: LtriPolicy
    chunks: KernelChunks
    caches: KVCaches
    heads: int
    rope: Rope
    scale: float

    def read(self, places: int) -> None:
        """Read a prompt until blocks come back; record its last whole chunk, if it does what all later ones would do.

        Even after recording, a turn's first chunks are launched one by one, and a turn may begin inside a chunk and a
        block. So one chunk is cut there here, which compiles the kernels for that case.

        Args:
            places: whole chunks of a run, at most; 0 records nothing.
        """
        settings, host = self.policy.config, self.policy.blocks_on_host
        first, chunk = settings.alike_from, settings.chunk
        room = settings.longest(host.available) - 1
        end = min(room, settings.slots + 3 * chunk)
        turn = (end - 1) // chunk * chunk - chunk // 2 + 1  # within a chunk, and within a block
        recorded = first is not None and places > 0 and first + 3 * chunk + settings.last <= room
        if recorded and first is not None:
            end, turn = first + 3 * chunk, first + chunk + chunk // 2 + 1
        lease = host.lease(settings.evicted(end))
        memories = {layer: self.chunks.memory() for layer in sorted(self.caches)}
        prompt = end + settings.last if recorded else end
        bounds = settings.chunks(0, end, prompt)
        with torch.no_grad():
            for begin, stop in _cut(bounds, turn):
                carry: Carry = {}
                votes: dict[int, torch.Tensor] = {}
                parts = {
                    layer: self._tokens(layer, lease, memory, (begin, stop), settings.ending(begin, prompt), carry)
                    for layer, memory in memories.items()
                }
                if recorded and stop == end:
                    self.chunks.record(parts, places)
                    continue
                for tokens in parts.values():
                    rows, keys = stop - begin, tokens.caches.keys
                    query = keys.new_zeros(rows, self.heads, keys.shape[2])
                    new = [each.new_zeros(rows, *each.shape[1:]) for each in self.caches[tokens.caches.layer]]
                    self.chunks.launched(tokens).attend(query, new[0], new[1], votes)
            self._fork(lease)
        self.chunks.close(lease)
        self.chunks.forget_counts()
        lease.release()
        host.taken = 0

    def _fork(self, lease: HostLease) -> None:
        """Do what a stream begins with that is a copy of another one, from the padding slot to the padding slot."""
        keys, _ = next(iter(self.caches.values()))
        nowhere = torch.zeros(self.policy.config.slots, dtype=torch.int64, device=keys.device)
        copy, block = lease.fork(1), nowhere[: self.policy.config.block]
        self.chunks.begin(
            Beginning(
                like=lease,
                lease=copy,
                layers={layer: self.chunks.memory() for layer in self.caches},
                tokens=0,
                slots=nowhere.int(),
                source=block,
                target=block,
                blocks=copy.ids,
                block_target=block,
            )
        )
        self.chunks.close(copy)
        copy.release()

    def _tokens(
        self, layer: int, lease: HostLease, memory: AnyMemory, bounds: tuple[int, int], ending: bool, carry: Carry
    ) -> LayerTokens[Spans]:
        keys, values = self.caches[layer]
        nowhere = torch.zeros(self.policy.config.slots, dtype=torch.int32, device=keys.device)
        return LayerTokens(
            settings=self.policy.config,
            memory=memory,
            host=LayerHost(self.policy.blocks_on_host, lease, layer, keys.device),
            caches=Caches(layer, keys, values, nowhere[:0], self.rope, self.scale, carry),
            slots=nowhere,
            voter=self.policy.voter(layer),
            heads=self.heads,
            begin=bounds[0],
            end=bounds[1],
            answers=False,
            ending=ending,
            given=(),
            kept=False,
        )


def _cut(bounds: Sequence[tuple[int, int]], at: int) -> Iterator[tuple[int, int]]:
    """Chunks, of which the one that has token `at` is cut there."""
    for begin, end in bounds:
        if begin < at < end:
            yield begin, at
            begin = at
        yield begin, end
