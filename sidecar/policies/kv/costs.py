"""What each rank costs a request that it holds nothing of, in tokens of prefill."""

from typing import TYPE_CHECKING

from sidecar.loads import LoadView

if TYPE_CHECKING:
    from sidecar.policies.kv.memory import RankMemory

INFINITE = float("inf")


class Costs:
    """Costs by position in the load view, kept up to date piece by piece: a decision that summed
    up all of 320 ranks anew would take too long.

    request_tokens: what each running or queued request counts. recent_weight: what a token counts
    that is active in the cache or was computed lately, where a new conversation is placed.
    """

    def __init__(self, request_tokens: float, recent_weight: float) -> None:
        self.request_tokens = request_tokens
        self.recent_weight = recent_weight
        self.serving: list[float] = []
        """Of serving one request: tokens that wait for prefill, and the requests beside it."""
        self.placing: list[float] = []
        """Of placing a conversation: the same, and what the rank has on its hands for longer."""

    def resize(self, ranks: int) -> None:
        """Forget all; `update` gives each position its costs."""
        self.serving, self.placing = [0.0] * ranks, [0.0] * ranks

    def update(self, position: int, rank: "RankMemory", view: LoadView, rate: float) -> None:
        """Compute one position anew. rate: prefilled tokens a second, 0: unknown."""
        if not view.usable[position]:
            self.serving[position] = self.placing[position] = INFINITE
            return
        serving = rank.waiting(view, position, rate) + self.request_tokens * view.requests[position]
        self.serving[position] = serving
        recent = rank.footprint.active + rank.recent_uncached
        self.placing[position] = serving + self.recent_weight * recent
