"""SGLang 0.5.23's own methods, with what makes them herd.

`data_parallel_controller.py`: load snapshots are read at most every 20 ms and overwrite the counts
that were raised since; `total_*` take the first of equals. A test compares it with SGLang's.
"""

from typing import Any

from bench.arms.base import Kind
from bench.model.cluster import Cluster
from bench.model.server import Placement
from bench.workloads.base import Call

REFRESH_SECONDS = 0.02


class RoundRobin(Kind):
    """Each rank in turn."""

    def __init__(self, cluster: Cluster, params: Any) -> None:
        super().__init__(cluster, params)
        self._next = 0

    def choose(self, call: Call, now: float) -> Placement:
        rank = self._next
        self._next = (rank + 1) % self.size
        return Placement(rank)


class _Budget(Kind):
    """What SGLang's DPBudget holds: counts from snapshots, raised by each dispatch."""

    def __init__(self, cluster: Cluster, params: Any) -> None:
        super().__init__(cluster, params)
        self.requests, self.tokens = [0] * self.size, [0] * self.size
        self._stamps = [0.0] * self.size
        self._refreshed = float("-inf")

    def choose(self, call: Call, now: float) -> Placement:
        if now - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = now
            self._read_snapshots()
        rank = self._least()
        self.requests[rank] += 1
        self._raise_tokens(rank, call.prompt_tokens)
        return Placement(rank)

    def _read_snapshots(self) -> None:
        for rank, (at, load, _) in enumerate(self.cluster.snapshots):
            if at != self._stamps[rank]:
                self._stamps[rank] = at
                self.requests[rank] = load.running + load.waiting
                self.tokens[rank] = load.tokens

    def _least(self) -> int:
        raise NotImplementedError

    def _raise_tokens(self, rank: int, tokens: int) -> None:
        """total_requests does not know the length of a prompt."""


class TotalRequests(_Budget):
    """Fewest running + waiting requests."""

    def _least(self) -> int:
        return self.requests.index(min(self.requests))


class TotalTokens(_Budget):
    """Fewest tokens, then fewest requests."""

    def _least(self) -> int:
        return min(range(len(self.tokens)), key=lambda i: (self.tokens[i], self.requests[i]))

    def _raise_tokens(self, rank: int, tokens: int) -> None:
        self.tokens[rank] += tokens
