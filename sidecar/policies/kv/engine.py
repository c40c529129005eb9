"""What the engine says of its cache: how far to trust our index, and how fast it prefills."""

from sidecar.loads import is_published
from sidecar.wire import LoadReport

CALIBRATION_TOKENS = 262_144
"""Prompt tokens over which expectation and truth are compared: some ten long prompts."""
PRIOR = CALIBRATION_TOKENS / 10
"""Tokens of agreement taken for granted, so that one surprise does not decide."""
RATE_KEEP = 0.99
"""What a measurement of the prefill rate leaves of those before it."""


class PrefillRate:
    """Prefilled tokens a second of a rank that has some to prefill; one for all ranks."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A rank with a queue computed `tokens` tokens in so many seconds."""
        self._tokens = RATE_KEEP * self._tokens + tokens
        self._seconds = RATE_KEEP * self._seconds + seconds

    @property
    def value(self) -> float:
        """Tokens a second; 0.0: not known yet."""
        return self._tokens / self._seconds if self._seconds else 0.0


class Engine:
    """The reports of one rank, compared with what was expected of it."""

    __slots__ = ("_at", "_expected", "_found", "credit", "report")

    def __init__(self) -> None:
        self.report: LoadReport | None = None
        self._at = 0.0
        self._found = self._expected = 0.0
        self.credit = 1.0
        """Share of the expected cached tokens that are found, 0 to 1. Less than 1 where the cache
        evicts more than we know of: prompts wait for long, or the KV pool holds other things."""

    def emptied(self, report: LoadReport) -> bool:
        """Whether the cache was emptied since the last report: by a flush, or a new process."""
        last = self.report
        if last is None or is_published(last) != is_published(report):
            return False  # another source counts by itself
        return (last.epoch, last.flushes) != (report.epoch, report.flushes)

    def emptied_at(self, report: LoadReport, now: float) -> float:
        """When, if it was `emptied` since the last report: what came later may be in it again.

        A new process begins with an empty cache, at any time since the old one was heard last.
        """
        last = self.report
        return now if last is None or last.epoch == report.epoch else self._at

    def heard(self, report: LoadReport, expected: int, now: float, rate: PrefillRate) -> None:
        """Take in a report. expected: cached tokens of the requests admitted since the last one."""
        last, then = self.report, self._at
        self.report, self._at = report, now
        if last is None or last.epoch != report.epoch or is_published(report):
            return
        admitted = report.admitted_tokens - last.admitted_tokens
        found = report.cached_tokens - last.cached_tokens
        if min(admitted, found) < 0:
            return
        if admitted or expected:
            keep = 1 / (1 + max(admitted, expected) / CALIBRATION_TOKENS)
            self._found = keep * self._found + found
            self._expected = keep * self._expected + expected
            self.credit = min(1.0, (self._found + PRIOR) / (self._expected + PRIOR))
        # Only a rank that had a queue all the time shows how fast it is.
        computed = admitted - found - (report.prefilling_tokens - last.prefilling_tokens)
        if computed >= 0 and now > then and (last.waiting or last.prefilling_tokens):
            rate.add(computed, now - then)

    @property
    def typical_uncached(self) -> float:
        """Tokens to compute of a request of which nothing is known: the mean of all so far."""
        report = self.report
        if report is None or not report.received:
            return 0.0
        return max(0, report.admitted_tokens - report.cached_tokens) / report.received
