"""Prompt tokens that wait for prefill on a rank, by what each request was expected to lack.

Schedulers serve first come, first served: with n requests queued, the last n sent are those. So
counters that are exact (budget.py) give the tokens, and nothing has to be told when a request ends.
"""

from collections import deque
from typing import NamedTuple

KEPT = 512
"""Requests remembered a rank."""
LATE_SECONDS = 0.25
"""In flight for longer: the reports are late, not the request; a step takes less."""
LATE_KEPT = 16
"""Requests in flight that are drained one by one; those before them have waited long enough."""


class Sent(NamedTuple):
    """A request that went to the rank."""

    cached: int
    """Prompt tokens that it was expected to find in the cache."""
    uncached: int
    at: float
    """When it was sent, monotonic seconds."""


class PrefillQueue:
    """One rank. `credit`, where it is asked for: which share of `cached` is really found."""

    __slots__ = ("_cached", "_sent", "_uncached", "left")

    def __init__(self) -> None:
        self._sent: deque[Sent] = deque()
        self._cached = self._uncached = 0
        self.left = 0
        """Expected cached tokens of those that left the queue; for the owner to take and reset."""

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, sent: Sent) -> None:
        """A request went to the rank."""
        self._sent.append(sent)
        self._cached += sent.cached
        self._uncached += sent.uncached
        if len(self._sent) > KEPT:
            self._leave()

    def shrink(self, queued: int) -> int:
        """No more than `queued` are queued; returns how many of them were never added."""
        while len(self._sent) > queued:
            self._leave()
        return queued - len(self._sent)

    def retract(self, requests: int) -> None:
        """The last so many never went here; they are not among those that left."""
        for _ in range(min(requests, len(self._sent))):
            never = self._sent.pop()
            self._cached -= never.cached
            self._uncached -= never.uncached

    def tokens(self, credit: float) -> float:
        """Tokens to compute of all that are queued."""
        return self._uncached + (1 - credit) * self._cached

    def since(self, in_flight: int) -> float:
        """When the first of the last `in_flight` requests was sent; inf: there is none."""
        count = min(in_flight, len(self._sent), LATE_KEPT)
        return self._sent[-count].at if count else float("inf")

    def drained(self, base: float, in_flight: int, rate: float, credit: float, now: float) -> float:
        """`base` + tokens, less what the rank has computed since its last report, if that is late.

        The last `in_flight` were sent after that report was made; until then nothing is guessed.
        rate: prefilled tokens a second of a rank that has some to prefill; 0: unknown.
        """
        total = base + self.tokens(credit)
        count = min(in_flight, len(self._sent), LATE_KEPT)
        if not count or not rate or now - self._sent[-count].at < LATE_SECONDS:
            return total
        flying = [
            (sent.uncached + (1 - credit) * sent.cached, sent.at)
            for sent in (self._sent[-back] for back in range(count, 0, -1))
        ]
        level, then = total - sum(tokens for tokens, _ in flying), flying[0][1]
        for tokens, at in flying:
            level = max(0.0, level - rate * (at - then)) + tokens
            then = at
        return max(0.0, level - rate * (now - then))

    def _leave(self) -> None:
        gone = self._sent.popleft()
        self._cached -= gone.cached
        self._uncached -= gone.uncached
        self.left += gone.cached
