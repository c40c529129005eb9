"""What one run of one arm gave: rows of requests, and what describes the server meanwhile.

Every driver (virtual time, simulated ranks in real time, a live server) gives an `Outcome`; every
table, interval and picture is made from it alone.
"""

from typing import Any

import msgspec

KINDS = ("virtual", "simulated", "live")
"""The model in virtual time; simulated ranks in the real server; whatever runs at a target."""


class Row(msgspec.Struct, array_like=True):
    """One request; times in seconds of the run, durations in milliseconds."""

    id: int
    session: int
    turn: int
    at: float
    """When it was sent, in seconds since the run began."""
    rank: int
    """DP rank that served it; -1: unknown."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were in the rank's cache; -1: unknown."""
    output_tokens: int
    ttft_ms: float
    e2e_ms: float
    reason: str = ""
    """Why that rank; empty where the arm gives no reason (stock methods) or none is known."""
    preferred: int = -1
    """The preferred rank of its affinity key; -1: none or unknown."""
    error: str = ""
    """Why it failed; its other figures then mean nothing."""


class Sample(msgspec.Struct, array_like=True):
    """The load at one moment."""

    at: float
    requests: list[int]
    """Running + waiting requests of each rank, shape (ranks,)."""


class Outcome(msgspec.Struct):
    """One arm on one workload with one seed."""

    workload: str
    arm: str
    seed: int
    kind: str
    """One of KINDS."""
    ranks: int
    rows: list[Row]
    seconds: float
    """From the first request sent to the last answer, in time of the (simulated) server."""
    samples: list[Sample] = []
    idle_share: float | None = None
    """Share of rank-seconds in which some rank worked and this one did not; None: unknown."""
    spills: int | None = None
    """Requests that did not go to the preferred rank of their affinity key; None: unknown."""
    fallbacks: int | None = None
    """Requests without an affinity key that a load-aware method placed; None: unknown."""
    bypasses: int | None = None
    """Requests that the hook placed without the sidecar; None: unknown."""
    more: dict[str, Any] = {}
    """What only one driver knows, as name -> JSON value."""


def percentiles(values: list[float]) -> dict[str, float]:
    """mean, p50, p90, p99 (linear interpolation, as numpy's default); values: not empty."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    mean = sum(ordered) / len(ordered)
    return {"mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def summarize(outcome: Outcome, ttft_bound_ms: float = 2000.0) -> dict[str, Any]:
    """The figures of one run; durations in ms, null where nothing is known.

    goodput_per_s counts answers whose first token came within `ttft_bound_ms`.
    """
    good = [row for row in outcome.rows if not row.error]
    seconds = outcome.seconds or None
    known = [row for row in good if row.cached_tokens >= 0]
    prompt = sum(row.prompt_tokens for row in known)
    cached = sum(row.cached_tokens for row in known)
    requests, uncached = _by_rank(outcome, good)
    streams = [
        (row.e2e_ms - row.ttft_ms) / (row.output_tokens - 1)
        for row in good
        if row.output_tokens > 1
    ]
    in_time = sum(row.ttft_ms <= ttft_bound_ms for row in good)
    return {
        "requests": len(outcome.rows),
        "failed": len(outcome.rows) - len(good),
        "req_per_s": len(good) / seconds if seconds else None,
        "goodput_per_s": in_time / seconds if seconds else None,
        "ttft_ms": percentiles([row.ttft_ms for row in good]) if good else None,
        "e2e_ms": percentiles([row.e2e_ms for row in good]) if good else None,
        "tpot_ms": percentiles(streams) if streams else None,
        "reuse": cached / prompt if prompt else None,
        "uncached_max_over_mean": (
            max(uncached) * len(uncached) / sum(uncached) if sum(uncached) else None
        ),
        "requests_by_rank": requests,
        "uncached_by_rank": uncached,
        "idle_by_rank": _idle_by_rank(outcome.samples),
        "idle_share": outcome.idle_share,
        "spills": outcome.spills,
        "fallbacks": outcome.fallbacks,
        "bypasses": outcome.bypasses,
    }


def _by_rank(outcome: Outcome, rows: list[Row]) -> tuple[list[int], list[int]]:
    """Requests and uncached prompt tokens of each rank, as far as they are known."""
    # A live server may have grown since its ranks were counted.
    size = max([outcome.ranks, *(row.rank + 1 for row in rows)])
    requests, uncached = [0] * size, [0] * size
    for row in rows:
        if row.rank >= 0:
            requests[row.rank] += 1
            if row.cached_tokens >= 0:
                uncached[row.rank] += row.prompt_tokens - row.cached_tokens
    return requests, uncached


def _idle_by_rank(samples: list[Sample]) -> list[float] | None:
    """Share of the load samples with some request in which this rank had none; None: no sample."""
    busy = [sample.requests for sample in samples if any(sample.requests)]
    if not busy:
        return None
    # Ranks that came later are in some samples only, and left out.
    return [sum(load == 0 for load in loads) / len(busy) for loads in zip(*busy, strict=False)]
