"""Rates and shares from the differences of two answers: pure.

A counter that went backwards began anew (a restart of what counts it): all it shows is new.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from sidecar.policies import SPILLS, Reason
from sidecar.top.source import Histogram, Instance, Rank, Status

# Long enough that shares of some ten requests a second do not jump, short enough to see a change.
WINDOW_SECONDS = 10.0
HITS = frozenset(
    {Reason.AFFINITY_HIT, Reason.TOKEN_AFFINITY_HIT, Reason.PREFIX_HIT, Reason.REPLICA_HIT}
)


@dataclass(frozen=True)
class Flow:
    """What happened in the window. Shares are of 1; None where there was nothing to share."""

    decisions: float | None = None
    """A second."""
    hit: float | None = None
    spill: float | None = None
    fallback: float | None = None
    bypass: float | None = None
    """Of all requests: those that the hook decided alone."""
    p50_us: float | None = None
    p99_us: float | None = None


@dataclass(frozen=True)
class RankFlow:
    """The same of one rank."""

    requests: float | None = None
    """Sent to it, a second."""
    cache_hit: float | None = None
    """Prompt tokens found in its cache, of those whose prefill began."""


@dataclass(frozen=True)
class Picture:
    """A status and what happened in the `span` seconds before it."""

    status: Status
    span: float = 0.0
    flow: Flow = field(default_factory=Flow)
    round_trips: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """Instance -> p50 and p99 of what its hook waited, microseconds."""
    ranks: dict[tuple[str, int], RankFlow] = field(default_factory=dict)
    """(instance, rank) -> its flow."""


class History:
    """The answers of the last `window` seconds and the one before them."""

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self.window = window
        self._samples: deque[tuple[float, Status]] = deque()

    def add(self, at: float, status: Status) -> Picture:
        """Take in the answer of time `at` (monotonic seconds); what is to be seen then."""
        samples = self._samples
        if samples and _restarted(samples[-1][1], status):
            samples.clear()
        samples.append((at, status))
        while len(samples) > 2 and at - samples[1][0] >= self.window:
            samples.popleft()
        first, before = samples[0]
        return picture(before, status, at - first)


def _restarted(before: Status, after: Status) -> bool:
    if before.pid != after.pid:
        return True
    uptimes = before.uptime_seconds, after.uptime_seconds
    return uptimes[0] is not None and uptimes[1] is not None and uptimes[1] < uptimes[0]


def picture(before: Status, after: Status, span: float) -> Picture:
    """`after`, and what happened in the `span` seconds since `before`."""
    if span <= 0:
        return Picture(after)
    old = {instance.instance: instance for instance in before.instances}
    pairs = [(old.get(new.instance), new) for new in after.instances]
    waits = {
        new.instance: _quantiles(
            was.hook.round_trip if was and was.hook else Histogram(), new.hook.round_trip
        )
        for was, new in pairs
        if new.hook is not None
    }
    ranks = {
        (new.instance, rank.rank): _rank_flow(known.get(rank.rank), rank, span)
        for was, new in pairs
        for known in [{rank.rank: rank for rank in was.ranks} if was else {}]
        for rank in new.ranks
    }
    return Picture(after, span, _flow(pairs, before, after, span), waits, ranks)


def _flow(
    pairs: Iterable[tuple[Instance | None, Instance]], before: Status, after: Status, span: float
) -> Flow:
    reasons: dict[str, int] = {}
    bypassed = 0
    for was, new in pairs:
        for policy, counts in new.decisions.items():
            known = was.decisions.get(policy, {}) if was else {}
            for reason, count in counts.items():
                reasons[reason] = reasons.get(reason, 0) + since(known.get(reason, 0), count)
        told = was.bypassed if was else {}
        bypassed += sum(since(told.get(cause, 0), count) for cause, count in new.bypassed.items())
    decided = sum(reasons.values())
    p50, p99 = _quantiles(before.query_time, after.query_time)
    return Flow(
        decided / span,
        share(_sum(reasons, HITS), decided),
        share(_sum(reasons, SPILLS), decided),
        share(reasons.get(Reason.FALLBACK, 0), decided),
        share(bypassed, decided + bypassed),
        p50,
        p99,
    )


def _rank_flow(was: Rank | None, now: Rank, span: float) -> RankFlow:
    if was is None:
        return RankFlow()
    admitted = since(was.admitted_tokens or 0, now.admitted_tokens or 0)
    cached = since(was.cached_tokens or 0, now.cached_tokens or 0)
    return RankFlow(since(was.sent, now.sent) / span, share(min(cached, admitted), admitted))


def _quantiles(before: Histogram, after: Histogram) -> tuple[float | None, float | None]:
    old = before.counts if before.bounds_us == after.bounds_us else [0] * len(after.counts)
    if len(after.counts) != len(after.bounds_us) + 1 or len(old) != len(after.counts):
        return None, None
    counts = [since(a, b) for a, b in zip(old, after.counts, strict=True)]
    return quantile(after.bounds_us, counts, 0.5), quantile(after.bounds_us, counts, 0.99)


def quantile(bounds: list[float], counts: list[int], q: float) -> float | None:
    """The q-quantile by linear interpolation in its bucket, as Prometheus's histogram_quantile.

    What took longer than the last bound counts as infinite; None: no observation.
    """
    cumulative = list(accumulate(counts))
    total = cumulative[-1]
    if not total:
        return None
    bucket = bisect_left(cumulative, q * total)
    if bucket >= len(bounds):
        return float("inf")
    low = bounds[bucket - 1] if bucket else 0.0
    within = q * total - (cumulative[bucket] - counts[bucket])
    return low + (bounds[bucket] - low) * within / counts[bucket]


def since(before: int, now: int) -> int:
    """What a counter counted in between; all of it if it began anew."""
    return now - before if now >= before else now


def share(part: float, whole: float) -> float | None:
    """`part` of `whole`; None of nothing."""
    return part / whole if whole else None


def _sum(counts: Mapping[str, int], of: Iterable[str]) -> int:
    return sum(counts.get(reason, 0) for reason in of)
