"""What others do, and bounds; each sees the true state of every rank where it needs any.

`key_mod` and `first_tokens_mod` (hash % ranks) as in SGLang PR 37543 and its kin; `chbl`:
consistent hashing with bounded loads (Mirrokni et al., arXiv 1608.01350); `lmetric`: new prefill
tokens x batch size (arXiv 2603.15202); `least_waiting_uncached`: fewest prompt tokens that wait for
prefill; `prefix_affinity_token_guard`: the PR's guard on resident tokens, a fault since fixed;
`oracle`: one cache of all ranks' size and the least work. It bounds what placing can gain, but not
reuse alone: equal prompts that come side by side are computed on several ranks at once, where an
arm that sends them all to one rank computes them once.
"""

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from bench.arms.base import Kind
from bench.arms.sidecar import prefix_of
from bench.model.cluster import Cluster
from bench.model.server import Placement
from bench.workloads.base import Call
from sidecar import hashing

FIRST_TOKENS = 4096  # SGLang PR 31170's hash_tokens


class _Chooser(Kind):
    """Knows the affinity hash of a call: its key, else its first tokens."""

    def __init__(self, cluster: Cluster, params: Any) -> None:
        super().__init__(cluster, params)
        self.page = cluster.spec.rank.page_tokens
        self._rank_bytes = hashing.rank_bytes(list(range(self.size)))
        self._next = 0

    def affinity(self, call: Call) -> int:
        key = hashing.normalize_key(call.key)
        return hashing.key_hash(key) if key else prefix_of(call, FIRST_TOKENS, self.page)

    def order(self, call: Call) -> list[int]:
        """Ranks by rendezvous score, the highest first."""
        scores = hashing.scores(self.affinity(call), self._rank_bytes)
        return sorted(range(self.size), key=scores.__getitem__, reverse=True)

    def load(self, rank: int) -> int:
        """Requests sent to a rank and not answered."""
        return self.cluster.outstanding(rank)

    def least(self, costs: list[float]) -> int:
        """The rank that costs least; equals take turns."""
        best = min(costs)
        turns = [(self._next + i) % self.size for i in range(self.size)]
        rank = next(i for i in turns if costs[i] == best)
        self._next = (rank + 1) % self.size
        return rank


class KeyMod(_Chooser):
    """hash(routing key) % ranks, no guard; keyless requests in turn."""

    def choose(self, call: Call, now: float) -> Placement:
        if call.key:
            rank = self.affinity(call) % self.size
            return Placement(rank, "affinity_hit", rank)
        return Placement(self.least([0.0] * self.size), "fallback")


class FirstTokensParams(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Parameters of `first_tokens_mod`."""

    tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = FIRST_TOKENS


class FirstTokensMod(_Chooser):
    """hash(first tokens) % ranks, whatever the key, no guard."""

    Params = FirstTokensParams

    def choose(self, call: Call, now: float) -> Placement:
        rank = prefix_of(call, self.params.tokens, self.page) % self.size
        return Placement(rank, "token_affinity_hit", rank)


class ChblParams(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Parameters of `chbl`."""

    bound: Annotated[float, Meta(gt=1.0, le=1e6)] = 1.25
    """No rank takes more than this times the average, the new request included."""


class Chbl(_Chooser):
    """The first rank in rendezvous order below the bound."""

    Params = ChblParams

    def choose(self, call: Call, now: float) -> Placement:
        loads = [self.load(rank) for rank in range(self.size)]
        limit = math.ceil(self.params.bound * (sum(loads) + 1) / self.size)
        order = self.order(call)
        rank = next(rank for rank in order if loads[rank] + 1 <= limit)
        return Placement(rank, "affinity_hit" if rank == order[0] else "spill", order[0])


class Lmetric(_Chooser):
    """Least (tokens to prefill, the new request's included) x (requests, the new one included)."""

    def choose(self, call: Call, now: float) -> Placement:
        return Placement(self.least([self._cost(call, rank) for rank in range(self.size)]))

    def _cost(self, call: Call, rank: int) -> float:
        state = self.cluster.ranks[rank]
        new = state.uncached_of(call.pages, call.prompt_tokens)
        return float((self.cluster.to_prefill(rank) + new) * (self.load(rank) + 1))


class LeastWaitingUncached(_Chooser):
    """Fewest prompt tokens to prefill, the new request's included."""

    def choose(self, call: Call, now: float) -> Placement:
        ranks = self.cluster.ranks
        costs = [
            float(self.cluster.to_prefill(i) + ranks[i].uncached_of(call.pages, call.prompt_tokens))
            for i in range(self.size)
        ]
        return Placement(self.least(costs))


class TokenGuardParams(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Parameters of `prefix_affinity_token_guard`."""

    max_load_skew: Annotated[float, Meta(ge=1.0, le=1e6)] = 1.5


class TokenGuard(_Chooser):
    """Rendezvous with a guard on tokens: a session that is long is driven from its own cache."""

    Params = TokenGuardParams

    def choose(self, call: Call, now: float) -> Placement:
        tokens = [snapshot.load.tokens for snapshot in self.cluster.snapshots]
        limit = self.params.max_load_skew * max(sum(tokens) / self.size, 1.0)
        order = self.order(call)
        rank = next((rank for rank in order if tokens[rank] <= limit), order[0])
        return Placement(rank, "affinity_hit" if rank == order[0] else "spill", order[0])


class Oracle(_Chooser):
    """One cache for all ranks, and the rank with the least work."""

    shared_cache = True

    def choose(self, call: Call, now: float) -> Placement:
        costs = [self.cluster.to_prefill(rank) * 1e6 + self.load(rank) for rank in range(self.size)]
        return Placement(self.least(costs))
