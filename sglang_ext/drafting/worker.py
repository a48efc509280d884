"""What runs a batch on a server that drafts: SGLang calls it in place of its own worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask, record_stream_for_v2_verify

from sglang_ext import compat
from sglang_ext.drafting.verify import accepted, row_positions
from sglang_ext.names import Passed, Req, ScheduleBatch, ServerArgs

Publish = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Lengths:
    """Columns of a batch's requests whose keys are in the cache and hold: on the device and on the host, [requests]."""

    device: torch.Tensor
    host: torch.Tensor


class DraftWorker(BaseSpecWorker):
    """Drafts by sparse decoding steps of the target model, and verifies them in one dense pass of it.

    Args:
        server_args: of the server.
        target_worker: the server's model.

    Attributes:
        speculative_num_draft_tokens: rows of a verification: a request's last token and the drafts behind it.
        speculative_num_steps: drafts.
    """

    def __init__(self, server_args: ServerArgs, target_worker: Passed, **_of_this_process: Passed) -> None:
        super().__init__()
        self._target_worker, self._draft_worker = target_worker, None
        self._graphs: Passed = None
        self.speculative_num_draft_tokens: int = compat.resolved(server_args).speculative_num_draft_tokens
        self.speculative_num_steps = self.speculative_num_draft_tokens - 1

    # ---- weights: the target's are the only ones ----

    def update_weights_from_disk(self, recv_req: Passed) -> tuple[bool, str]:
        return True, "Succeeded to update model weights."

    def update_weights_from_ipc(self, recv_req: Passed) -> tuple[bool, str]:
        return True, "Succeeded to update model weights."

    def update_weights_from_tensor(self, recv_req: Passed) -> Passed:
        return self.target_worker.update_weights_from_tensor(recv_req)

    # ---- graphs ----

    def init_cuda_graphs(self) -> None:
        """Sparse steps have graphs of their own: SGLang has captured those of verifications."""
        self._graphs = compat.capture_steps(self.target_worker.model_runner)

    # ---- passes ----

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Publish | None = None, pp_proxy_tensors: None = None
    ) -> GenerationBatchResult:
        """Run one batch: a prompt's pass as ever, a decoding batch as drafts and their verification.

        Args:
            batch: SGLang's; what is changed of it here, SGLang puts back.
            on_publish: takes the new lengths [requests] as soon as they are known.
            pp_proxy_tensors: of pipeline parallelism, which is refused at start.
        """
        # The scheduler made these tensors on a stream of its own, and lets go of them while this one still reads them.
        stream = torch.get_device_module(batch.seq_lens.device).current_stream()
        record_stream_for_v2_verify(batch, None, stream)
        if not batch.forward_mode.is_decode():
            return self._prompts(batch, on_publish)
        lengths = Lengths(batch.seq_lens, batch.seq_lens_cpu)
        slots = self._slots(batch, lengths)
        answered = [
            length + 1 - len(req.origin_input_ids)
            for req, length in zip(batch.reqs, lengths.host.tolist(), strict=True)
        ]
        each = [_most(req, count, slots.shape[1]) for req, count in zip(batch.reqs, answered, strict=True)]
        most = torch.tensor(each, pin_memory=slots.is_cuda)
        drafts = self._drafts(batch, lengths, slots)
        return self._verified(batch, lengths, slots, drafts, most.to(slots.device, non_blocking=True), on_publish)

    def _prompts(self, batch: ScheduleBatch, on_publish: Publish | None) -> GenerationBatchResult:
        result = self.target_worker.forward_batch_generation(batch)
        tokens = result.next_token_ids.new_zeros(len(batch.reqs), self.speculative_num_draft_tokens)
        tokens[:, 0] = result.next_token_ids
        lengths = batch.seq_lens.clone()
        if on_publish is not None:
            on_publish(lengths)
        return self._result(result, result.next_token_ids, tokens, torch.ones_like(lengths, dtype=torch.int32), lengths)

    def _slots(self, batch: ScheduleBatch, lengths: Lengths) -> torch.Tensor:
        """[requests, tokens] int64: the KV slots of the rows to be verified, which SGLang has allotted."""
        table = batch.req_to_token_pool.req_to_token
        columns = row_positions(lengths.device, self.speculative_num_draft_tokens).view(len(batch.reqs), -1)
        found: torch.Tensor = table[batch.req_pool_indices.unsqueeze(1), columns].to(torch.int64)
        return found

    def _drafts(self, batch: ScheduleBatch, lengths: Lengths, slots: torch.Tensor) -> torch.Tensor:
        """[requests, tokens] int64: the last token of each request, and what sparse steps draft behind it.

        A step is greedy: the likeliest token is the one that a verification most likely draws, too.
        """
        before: NgramVerifyInput = batch.spec_info
        last = before.accept_tokens.view(len(batch.reqs), -1).gather(1, before.accept_lens.long().unsqueeze(1) - 1)
        drafts = [last.flatten().to(torch.int64)]
        batch.spec_info = None  # it has positions of its own for passes with more rows
        with compat.as_steps(self.target_worker.model_runner, self._graphs):
            for step in range(self.speculative_num_steps):
                batch.input_ids, batch.out_cache_loc = drafts[-1], slots[:, step].contiguous()
                batch.seq_lens, batch.seq_lens_cpu = lengths.device + step + 1, lengths.host + step + 1
                batch.seq_lens_sum = None
                result = self.target_worker.forward_batch_generation(batch, is_verify=True)  # draws no token
                drafts.append(result.logits_output.next_token_logits.argmax(dim=-1))
        return torch.stack(drafts, dim=1)

    def _verified(
        self,
        batch: ScheduleBatch,
        lengths: Lengths,
        slots: torch.Tensor,
        drafts: torch.Tensor,
        most: torch.Tensor,
        on_publish: Publish | None,
    ) -> GenerationBatchResult:
        """One dense pass over all drafts, and what of them holds."""
        positions = row_positions(lengths.device, drafts.shape[1])
        batch.forward_mode, batch.input_ids, batch.out_cache_loc = (
            ForwardMode.TARGET_VERIFY,
            drafts.flatten(),
            slots.flatten(),
        )
        batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = lengths.device, lengths.host, None
        batch.spec_info = NgramVerifyInput(
            draft_token=batch.input_ids,
            positions=positions,
            draft_token_num=drafts.shape[1],
            new_seq_lens=lengths.device,
        )
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        drawn = self._drawn(batch, result.logits_output, drafts, positions)
        held = accepted(drafts, drawn, most)
        new_lengths = lengths.device + held
        if batch.return_logprob:
            rows = torch.arange(drafts.numel(), device=drafts.device).view_as(drafts)
            compat.verified_logprobs(batch, result.logits_output, drawn.flatten(), rows)
        if on_publish is not None:
            on_publish(new_lengths)
        batch.forward_mode = ForwardMode.DECODE
        return self._result(result, drawn.flatten(), drawn, held, new_lengths)

    def _drawn(
        self, batch: ScheduleBatch, logits: LogitsProcessorOutput, drafts: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[requests, tokens] int64: the target's token behind each row, drawn as SGLang draws it in a decoding step."""
        info = repeated(batch.sampling_info, drafts.shape[1])
        if batch.has_grammar:
            info.grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=GrammarTree.from_linear_chain(drafts),
                sampling_info=batch.sampling_info,
                device=drafts.device,
                barrier=None,
            )
        info.apply_logits_bias(logits.next_token_logits)
        # The sampler turns logits into probabilities in their place, and log-probabilities are computed of them yet.
        copied = replace(logits, next_token_logits=logits.next_token_logits.clone())
        drawn = self.target_worker.model_runner.sampler(copied, info, False, [], [], positions)
        ranks = get_tp_group()
        if ranks.world_size > 1 and not info.is_all_greedy:
            ranks.broadcast(drawn, src=0)  # else ranks that round otherwise would accept other lengths
        return drawn.view_as(drafts).to(torch.int64)

    def _result(
        self,
        of: GenerationBatchResult,
        next_token_ids: torch.Tensor,
        tokens: torch.Tensor,
        held: torch.Tensor,
        lengths: torch.Tensor,
    ) -> GenerationBatchResult:
        """What SGLang takes from a pass: the tokens, how many of them hold, and what the next pass begins with."""
        return GenerationBatchResult(
            logits_output=of.logits_output,
            next_token_ids=next_token_ids,
            can_run_cuda_graph=of.can_run_cuda_graph,
            accept_lens=held,
            new_seq_lens=lengths,
            next_draft_input=NgramVerifyInput(
                draft_token_num=self.speculative_num_draft_tokens,
                new_seq_lens=lengths,
                accept_tokens=tokens.flatten(),
                accept_lens=held,
            ),
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
        )


def repeated(info: Passed, times: int) -> Passed:
    """Sampling parameters of a batch, for `times` rows of each of its requests (SGLang's `SamplingBatchInfo`)."""
    tensors = (
        "temperatures",
        "top_ps",
        "top_ks",
        "min_ps",
        "sampling_seed",
        "logit_bias",
        "acc_additive_penalties",
        "acc_scaling_penalties",
    )
    found = {name: getattr(info, name) for name in tensors}
    rows = {name: each.repeat_interleave(times, dim=0) for name, each in found.items() if each is not None}
    return replace(info, **rows, grammar_mask=None)


def _most(req: Req, answered: int, tokens: int) -> int:
    """How many tokens of a verification a request takes: one where each changes the distribution of the next.

    Where SGLang looks at an answer's length before it looks for what stops it, the last token is taken alone.

    Args:
        req: the request.
        answered: tokens of its answer so far. `req.output_ids` lacks those of the newest pass where passes overlap.
        tokens: that are verified.
    """
    params = req.sampling_params
    if compat.LENGTH_HIDES_STOPS:
        tokens = max(1, min(tokens, params.max_new_tokens - answered - 1))
    changing = (
        params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.repetition_penalty != 1
        or params.min_new_tokens > answered
    )
    return 1 if changing else tokens
