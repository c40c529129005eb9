"""Time in spans: how recency is kept without a list of every use."""

from bisect import bisect_right

KEPT = 4096
"""Spans whose beginnings are known; what is older counts as of the oldest."""
PAST = 600
"""Spans before the first, for what is told of the past."""


class SpanClock:
    """Numbers consecutive spans of `seconds`; a span in which nobody asks is not numbered."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.span = 0
        """The present span."""
        self._begins = [float("-inf")]
        self._first = 0
        """Number of the span that `_begins` begins with."""

    def begin(self, now: float) -> None:
        """Number the spans that went before, of which there will be news; once, at the start."""
        self._begins += [now - back * self.seconds for back in range(PAST, 0, -1)]
        self.span += PAST

    def advance(self, now: float) -> bool:
        """Begin a new span if the present one is over; True if so. now: monotonic seconds."""
        if now - self._begins[-1] < self.seconds:
            return False
        self.cut(now)
        return True

    def cut(self, now: float) -> None:
        """Begin a new span now."""
        self.span += 1
        self._begins.append(now)
        if len(self._begins) > 2 * KEPT:
            self._first += KEPT
            del self._begins[:KEPT]

    def at(self, time: float) -> int:
        """The span that held at `time`."""
        return self._first + bisect_right(self._begins, time) - 1
