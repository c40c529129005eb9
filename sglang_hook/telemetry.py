"""What the hook measures of its own queries, for the sidecar to show.

A measurement costs two looks at the clock and a bisection; what is told are sums since the process
started, about once a second, so nearly every query travels without them.
"""

from bisect import bisect_left

from sidecar.wire import ROUND_TRIP_US, Telemetry

TOLD_EVERY_NS = 1_000_000_000
_BOUNDS_NS = tuple(us * 1000 for us in ROUND_TRIP_US)


class Meter:
    """Round trips by length, and how often the breaker opened."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._total_ns = 0
        self._opened = 0
        self._open = True
        """As the client's breaker starts: nobody waits for a sidecar never heard of."""
        self._due_ns = 0
        self._due = True

    def waited(self, begun_ns: int, ended_ns: int) -> None:
        """Account a query that waited for its answer, or in vain. Monotonic nanoseconds."""
        spent = ended_ns - begun_ns
        self._counts[bisect_left(_BOUNDS_NS, spent)] += 1
        self._total_ns += spent
        if ended_ns >= self._due_ns:
            self._due = True
            self._due_ns = ended_ns + TOLD_EVERY_NS

    def breaker(self, *, is_open: bool) -> None:
        """Note the breaker's state; a change is told with the next query."""
        if is_open != self._open:
            self._open, self._due = is_open, True
            self._opened += is_open

    def tell(self, *, everything: bool = False) -> Telemetry | None:
        """What to put into a query; None: nothing is due."""
        if not (self._due or everything):
            return None
        self._due = False
        return Telemetry(list(self._counts), self._total_ns, self._opened, self._open)
