"""`--speculative-algorithm SPARSE_DRAFT`: what SGLang is told of it."""

from __future__ import annotations

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ext.config import DRAFTING
from sglang_ext.names import Passed, ServerArgs
from sglang_ext.systems.registry import system_of, systems

TOKENS = 9
"""Rows of a verification, if nothing else is asked for: a request's last token and eight drafts (docs/results)."""

MOST = 32
"""Rows of a verification at most: a request needs twice as many KV slots beside its tokens."""


class SparseDraft(CustomSpecAlgo):
    """Drafts by the server's own model: there is no second one, and no tokens but these are relayed between passes."""

    def is_ngram(self) -> bool:
        """SGLang's own algorithm without a draft model; what it does for that one is what this one needs."""
        return True

    def has_draft_kv(self) -> bool:
        """Drafts are written where their verification writes them again."""
        return False

    # SGLang asks these of every algorithm, and a registered one lacks them.

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(self, *args: Passed, **kwargs: Passed) -> Passed:
        return SpeculativeAlgorithm.NGRAM.create_future_map(*args, **kwargs)

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Set what SGLang's speculative decoding reads.

        Raises:
            ValueError: the server's attention does not draft, or a number does not fit.
        """
        system = system_of(server_args)
        if system is None or not system.drafts:
            able = [name for name, each in systems().items() if each.drafts]
            raise ValueError(
                f"--speculative-algorithm {DRAFTING} with --attention-backend {server_args.attention_backend}: drafts"
                f" are sparse decoding steps; set --attention-backend to one of {', '.join(able)}"
            )
        if server_args.speculative_num_draft_tokens is None:
            server_args.speculative_num_draft_tokens = TOKENS
        tokens = server_args.speculative_num_draft_tokens
        if not 2 <= tokens <= MOST:
            raise ValueError(
                f"--speculative-num-draft-tokens {tokens}: the last token and at least one draft are verified; set 2 to"
                f" {MOST}"
            )
        if server_args.speculative_num_steps not in (None, tokens - 1):
            raise ValueError(
                f"--speculative-num-steps {server_args.speculative_num_steps}: {tokens} tokens are verified, so that"
                f" {tokens - 1} are drafted, a step each; leave it out"
            )
        if server_args.speculative_eagle_topk not in (None, 1):
            raise ValueError(
                f"--speculative-eagle-topk {server_args.speculative_eagle_topk}: a step drafts one token; leave it out"
            )
        if server_args.enable_mixed_chunk:
            raise ValueError(
                f"--speculative-algorithm {DRAFTING} with --enable-mixed-chunk: steps that draft are not told from"
                " prompts in one batch; leave one of them out"
            )
        server_args.speculative_num_steps, server_args.speculative_eagle_topk = tokens - 1, 1
        if server_args.device == "cpu":
            server_args.disable_overlap_schedule = True  # SGLang has none for speculative decoding there


def register() -> None:
    """Make the algorithm known to SGLang, once a process."""
    if isinstance(_known(), SparseDraft):
        return

    @SpeculativeAlgorithm.register(DRAFTING, supports_overlap=True, spec_class=SparseDraft)
    def worker(_server_args: ServerArgs) -> type:
        from sglang_ext.drafting.worker import DraftWorker

        return DraftWorker


def _known() -> Passed:
    try:
        return SpeculativeAlgorithm.from_string(DRAFTING)
    except ValueError:
        return None
