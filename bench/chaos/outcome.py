"""What a fault did: figures from the records and the processes, and the bounds on them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil
from statistics import median
from typing import Any

from msgspec import Struct

from bench.chaos.process import Weight
from bench.chaos.records import KEYLESS, Record

ALLOWANCE = 0.005
"""Seconds by which a dispatch may exceed the deadline: ZeroMQ counts it in whole milliseconds, and
a process that was asleep is woken later on a loaded machine. Time that the kernel kept a thread
waiting that could run is not counted; the row without a fault says what is left of the noise."""


class Bounds(Struct, frozen=True):
    """What a fault may do; 0 requests are lost in any."""

    waits: int = 3
    """Requests that wait for a whole deadline."""
    moved: int = 0
    """Sessions that move though their rank lives."""
    recovery: float = 0.3
    """Seconds from the end of the fault to the first remote decision."""
    hook_mib: float = 8.0
    """Growth of controllers and ranks together."""
    sidecar_mib: float = 16.0
    hook_descriptors: int = 0
    sidecar_descriptors: int = 4
    """A scrape's connections among them."""


class Outcome(Struct, kw_only=True):
    """Of one fault under load; None: not to be had."""

    name: str
    title: str
    seconds: float
    load: float
    """Of the machine, its one-minute average."""
    requests: int
    lost: int
    waits: int
    delayed: int
    """Requests over deadline and allowance."""
    worst_ms: float
    """Longest dispatch, without waiting for a core."""
    worst_wall_ms: float
    alone_us: float | None
    """Median of the requests that the hook decided without waiting."""
    moved: int
    remote: int
    """Requests that a sidecar decided."""
    causes: dict[str, int]
    """Why the others were decided by the hook."""
    first_remote_ms: float | None
    exact_ms: float | None
    """From the end of the fault to a view of every rank's load that is the truth."""
    returned: bool
    """Whether sent - received was 0 for every rank once the load had stopped."""
    hook_mib: float
    hook_descriptors: int
    sidecar_mib: float | None
    """None: another process than before."""
    sidecar_descriptors: int | None
    notes: list[str] = []
    broken: list[str] = []
    """Bounds that do not hold."""

    def judge(self, bounds: Bounds, noise: float = 0.0) -> None:
        """Fill `broken`. noise: share of the requests that wait in vain without any fault, as the
        sidecar does not get a core; three times as many may wait beyond the bound."""
        remote, may = self.first_remote_ms, bounds.waits + ceil(3 * noise * self.requests)
        checks = (
            (self.lost == 0, f"{self.lost} lost"),
            (self.waits <= may, f"{self.waits} waited, {may} may"),
            (self.delayed == 0, f"{self.delayed} delayed, {self.worst_ms} ms"),
            (self.moved <= bounds.moved, f"{self.moved} moved"),
            (remote is not None, "no remote decision"),
            (remote is None or remote <= bounds.recovery * 1000, f"{remote} ms to recover"),
            (self.exact_ms is not None, "no exact view"),
            (self.returned, "sent - received does not return to 0"),
            (self.hook_mib <= bounds.hook_mib, f"hook +{self.hook_mib} MiB"),
            ((self.sidecar_mib or 0) <= bounds.sidecar_mib, f"sidecar +{self.sidecar_mib} MiB"),
            (
                self.hook_descriptors <= bounds.hook_descriptors,
                f"hook +{self.hook_descriptors} descriptors",
            ),
            (
                (self.sidecar_descriptors or 0) <= bounds.sidecar_descriptors,
                f"sidecar +{self.sidecar_descriptors} descriptors",
            ),
        )
        self.broken = [text for holds, text in checks if not holds]


def moves(records: Iterable[Record], died: Sequence[tuple[float, int]]) -> int:
    """Requests with a key on another rank than the last of it, though that rank lived.

    died: when (monotonic seconds) which rank's process was killed.
    """
    last: dict[int, Record] = {}
    count = 0
    for record in records:
        if record.session == KEYLESS or record.rank < 0:
            continue
        before = last.get(record.session)
        last[record.session] = record
        if before is None or before.rank == record.rank:
            continue
        lived = int(record.live) >> before.rank & 1
        count += bool(lived) and not any(
            rank == before.rank and at >= before.at for at, rank in died
        )
    return count


def figures(records: Sequence[Record], deadline: float) -> dict[str, Any]:
    """What the records say. deadline: seconds."""
    causes = Counter(record.cause for record in records if record.cause)
    alone = [r.own_seconds for r in records if r.cause in ("breaker_open", "unreachable")]
    own = [record.own_seconds for record in records]
    return {
        "requests": len(records),
        "lost": sum(record.lost for record in records),
        "waits": causes["deadline"],
        "delayed": sum(seconds > deadline + ALLOWANCE for seconds in own),
        "worst_ms": round(max(own, default=0.0) * 1000, 2),
        "worst_wall_ms": round(max((r.seconds for r in records), default=0.0) * 1000, 2),
        "alone_us": round(median(alone) * 1e6, 1) if alone else None,
        "remote": sum(record.boot != 0 for record in records),
        "causes": dict(causes),
    }


def growth(before: Weight, after: Weight) -> tuple[float, int]:
    """MiB and descriptors."""
    mib = round((after.rss - before.rss) / 2**20, 2)
    return mib, after.descriptors - before.descriptors
