"""What a tenant takes of a server beside what it may take (`tenants.TenantQuotas`).

Waiting helps where answers are under way, so one more is refused with 429; where it does not help, with 403.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.tenants import TenantQuotas


class Quota:
    """One tenant's; without quotas, nothing is refused.

    Args:
        quotas: of the tenant. They may be replaced at any time: what is under way goes on.

    Attributes:
        running: answers under way.
    """

    def __init__(self, quotas: TenantQuotas | None = None) -> None:
        self.quotas = quotas or TenantQuotas()
        self.running = 0

    def check_pools(self, pools: int) -> None:
        """PoolError (403) where a tenant that has so many pools may not have one more."""
        most = self.quotas.max_pools
        if most is not None and pools >= most:
            raise PoolError(
                f"you have {pools} pools, and your quota is {most} (max_pools): delete one first, or ask whoever"
                " operates the server for more",
                403,
            )

    def check_tokens(self, name: str, needed: int, others: int) -> None:
        """PoolError (403) where a version of a pool has too many tokens beside the other pools.

        Args:
            name: of the pool.
            needed: tokens of the version.
            others: tokens of the other pools.
        """
        most = self.quotas.max_tokens
        if most is not None and needed + others > most:
            raise PoolError(
                f"pool {name!r} would have {needed} tokens, your other pools have {others}, and your quota is {most}"
                " (max_tokens); nothing was changed: use fewer demonstrations, delete a pool, or ask whoever operates"
                " the server for more",
                403,
            )

    def enter(self, answers: int) -> Callable[[], None]:
        """So many answers begin; returns what is to be called when they have ended, once or more often.

        Raises:
            PoolError: (429) too many are under way; (403) they alone are too many.
        """
        most = self.quotas.max_requests
        if most is not None and answers > most:
            raise PoolError(
                f"the request asks for {answers} answers (prompts times n), and your quota is {most} under way at a"
                " time (max_requests): send several requests, one after the other",
                403,
            )
        if most is not None and self.running + answers > most:
            raise PoolError(
                f"the request asks for {answers} answers (prompts times n), {self.running} are under way, and your"
                f" quota is {most} at a time (max_requests): retry when one has ended",
                429,
            )
        self.running += answers
        left = [answers]

        def leave() -> None:
            if left:
                self.running -= left.pop()

        return leave
