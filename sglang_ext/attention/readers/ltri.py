"""Streams of Ltri-LLM in kernels: chunk by chunk, and the host waits for nothing (`attention.ltri_kernels`)."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_ext.attention.choice import KERNELS_ENV
from sglang_ext.attention.ltri import LtriPolicy
from sglang_ext.attention.ltri_kernels import Attention
from sglang_ext.attention.ltri_stores import KernelChunks
from sglang_ext.attention.model import Machine, Model
from sglang_ext.attention.readers.streams import StreamReader
from sglang_ext.kernels.cells import Rotation, flashinfer_impl
from sglang_ext.kernels.clamped_attention import reference
from sglang_ext.policies.ltri_options import Ltri

BLOCKS = (16, 32, 64, 128)
"""Tokens of a block that the kernel of spans takes (`kernels.span_index`)."""
MOST: Mapping[str, int] = {"retrieved": 64, "ways": 128, "vectors": 128}
"""What the kernels of votes and of the host take at most (`kernels.block_votes`, `kernels.host_fetch`)."""


def check_kernels(settings: Ltri) -> None:
    """Raise ValueError for settings that the kernels do not take."""
    wrong = [f"{name}={getattr(settings, name)} (at most {most})" for name, most in MOST.items()
             if getattr(settings, name) > most]  # fmt: skip
    if settings.index == "ltri" and settings.block not in BLOCKS:
        wrong.append(f"block={settings.block} ({', '.join(map(str, BLOCKS))})")
    if wrong:
        raise ValueError(
            f"--policy: the kernels do not take {'; '.join(wrong)}: choose other sizes, or set {KERNELS_ENV}=torch in"
            " the server's environment"
        )


class LtriReader(StreamReader):
    """`LtriPolicy.attend` for each request of a batch, in kernels.

    Raises:
        ValueError: settings or the model's heads are none that the kernels take; the index does not fit the GPU; one
            request may need more slots than there are, or than a row has columns.
    """

    def __init__(self, model: Model, policy: LtriPolicy, machine: Machine) -> None:
        check_kernels(policy.config)
        model.check_cache_type()
        super().__init__(model, policy, machine)
        caches, settings = model.caches(), policy.config
        self._chunks = KernelChunks(
            settings,
            policy.blocks_on_host,
            caches,
            {layer: policy.voter(layer) for layer in caches},
            model.shape.heads,
            model.request_slots // settings.slots,
            Rotation.of(model.rope),
            self._attention(machine.kernels),
        )
        policy.compute_in(self._chunks)

    def _attention(self, chosen: str) -> Attention:
        """What computes attention."""
        shape, device = self.model.shape, self.model.device
        if chosen != "flashinfer":
            return reference
        if shape.head_dim != shape.value_dim or not flashinfer_impl.serves(shape.head_dim, shape.dtype, device):
            sizes = ", ".join(map(str, flashinfer_impl.HEAD_SIZES))
            raise ValueError(
                f"heads of size {shape.head_dim} in {shape.dtype}: FlashInfer serves {sizes} in half precision; set"
                f" {KERNELS_ENV}=triton in the server's environment"
            )
        from sglang_ext.kernels.clamped_attention import flashinfer_impl as clamped

        return clamped

    def stats(self) -> Mapping[str, Mapping[str, float]]:
        return {**super().stats(), "host_cache": self._chunks.counters()}
