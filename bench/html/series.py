"""What the plots need of an outcome, as arrays: its rows need not stay in memory."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bench.outcome import Outcome
from bench.statistics import Run

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
BINS = 120
"""Moments of the load that are drawn."""


class Series(msgspec.Struct):
    """The answered requests of one run, one item a request, in the order of sending."""

    run: Run
    at: Floats
    ttft_ms: Floats
    prompt: Ints
    cached: Ints
    rank: Ints
    preferred: Ints
    session: Ints
    load_at: Floats
    """Moments, seconds."""
    load: Floats
    """Requests at them, shape (moments, ranks); (0, ranks): unknown."""

    @classmethod
    def of(cls, outcome: Outcome, run: Run) -> "Series":
        rows = sorted((row for row in outcome.rows if not row.error), key=lambda row: row.at)
        at = np.array([row.at for row in rows], dtype=float)
        e2e = np.array([row.e2e_ms for row in rows], dtype=float) / 1000
        rank = _ints([row.rank for row in rows])
        moments, load = _sampled(outcome) if outcome.samples else _in_flight(at, e2e, rank, outcome)
        return cls(
            run,
            at,
            np.array([row.ttft_ms for row in rows], dtype=float),
            _ints([row.prompt_tokens for row in rows]),
            _ints([row.cached_tokens for row in rows]),
            rank,
            _ints([row.preferred for row in rows]),
            _ints([row.session for row in rows]),
            moments,
            load,
        )


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _sampled(outcome: Outcome) -> tuple[Floats, Floats]:
    """Means of the samples in each bin; a bin without any keeps the value before it."""
    samples = sorted(outcome.samples, key=lambda sample: sample.at)
    at = np.array([sample.at for sample in samples])
    requests = np.array([sample.requests for sample in samples], dtype=float)
    edges = np.linspace(at[0], at[-1], min(BINS, len(at)) + 1)
    place = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(edges) - 2)
    filled = np.unique(place)
    starts = np.searchsorted(place, filled)
    sums = np.add.reduceat(requests, starts, axis=0)
    means = sums / np.diff(np.append(starts, len(at)))[:, None]
    last = np.searchsorted(filled, np.arange(len(edges) - 1), side="right") - 1
    return (edges[:-1] + edges[1:]) / 2, means[last]


def _in_flight(at: Floats, e2e: Floats, rank: Ints, outcome: Outcome) -> tuple[Floats, Floats]:
    """Without samples: the requests sent to a rank and not yet answered, as the client saw them."""
    known = rank >= 0
    if not known.any():
        return np.zeros(0), np.zeros((0, outcome.ranks))
    moments = np.linspace(0.0, float((at + e2e).max()), BINS)
    load = np.zeros((BINS, outcome.ranks))
    for each in range(outcome.ranks):
        mine = rank == each
        sent = np.searchsorted(np.sort(at[mine]), moments, side="right")
        load[:, each] = sent - np.searchsorted(np.sort((at + e2e)[mine]), moments, side="right")
    return moments, load


def cached_share(series: list[Series], bins: int = 40) -> tuple[Floats, Floats]:
    """Share of the prompt tokens that were cached, by the time at which requests were sent.

    Runs are pooled. Empty bins are left out, so that the line goes on between its neighbours.
    """
    known = [each.cached >= 0 for each in series]
    at = np.concatenate([each.at[k] for each, k in zip(series, known, strict=True)])
    if not len(at):
        return np.zeros(0), np.zeros(0)
    prompt = np.concatenate([each.prompt[k] for each, k in zip(series, known, strict=True)])
    cached = np.concatenate([each.cached[k] for each, k in zip(series, known, strict=True)])
    edges = np.linspace(0.0, float(at.max()) or 1.0, bins + 1)
    asked, _ = np.histogram(at, edges, weights=prompt)
    hit, _ = np.histogram(at, edges, weights=cached)
    some = asked > 0
    return ((edges[:-1] + edges[1:]) / 2)[some], hit[some] / asked[some]


def spill_matrix(series: list[Series]) -> Ints:
    """Requests by preferred rank (rows) and chosen rank (columns), over all runs; (0, 0): none."""
    ranks = max((each.run.ranks for each in series), default=0)
    matrix = np.zeros((ranks, ranks), dtype=np.int64)
    for each in series:
        both = (each.preferred >= 0) & (each.rank >= 0)
        both &= (each.preferred < ranks) & (each.rank < ranks)
        np.add.at(matrix, (each.preferred[both], each.rank[both]), 1)
    return matrix if matrix.any() else np.zeros((0, 0), dtype=np.int64)


def sessions(series: Series, most: int, points: int) -> dict[str, Any]:
    """Every request of some sessions of at least two: as many, evenly spread, as fit.

    Gives `at`, `line` (0: the session that begins first), `rank`, `shown` and `all` (sessions).
    """
    ids, first, count = np.unique(series.session, return_index=True, return_counts=True)
    long = np.flatnonzero(count > 1)
    long = long[np.argsort(first[long], kind="stable")]
    many = min(most, len(long), max(1, int(points / count[long].mean()))) if len(long) else 0
    kept = long[np.linspace(0, len(long) - 1, many).astype(int)]
    line = np.full(len(ids), -1)
    line[kept] = np.arange(len(kept))
    lines = line[np.searchsorted(ids, series.session)]
    wanted = np.flatnonzero((lines >= 0) & (series.rank >= 0))
    if len(wanted) > 2 * points:  # a session of thousands; a stride would meet the same ranks again
        wanted = np.sort(np.random.default_rng(0).choice(wanted, points, replace=False))
    return {
        "at": series.at[wanted],
        "line": lines[wanted],
        "rank": series.rank[wanted],
        "shown": len(kept),
        "all": len(ids),
    }
