"""Every arm against the baseline on every workload, over seeds.

The unit is the seed: a seed fixes keys, lengths and order for every arm, so an arm and the baseline
are compared seed by seed and only the variation of the difference counts. Requests of one run share
its caches and queues and are no independent samples: an interval over requests would be far too
narrow. Runs of one (workload, arm, seed) are averaged first; a repeat is no further seed.
"""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from bench.intervals import Difference, paired
from bench.outcome import Outcome, summarize

__all__ = ["COUNTS", "METRICS", "Comparison", "Difference", "Figure", "Metric", "Run"]
__all__ += ["compare", "compare_runs", "paired"]


class Metric(msgspec.Struct, frozen=True):
    """A figure of `summarize`."""

    name: str
    label: str
    unit: str
    more_is_better: bool | None
    """None: neither; it explains the others."""

    def of(self, summary: dict[str, Any]) -> float | None:
        """Its value; None where nothing is known. `ttft_ms_p50` is `ttft_ms`, `p50`."""
        if self.name in summary:
            value = summary[self.name]
        else:
            group, _, part = self.name.rpartition("_")
            value = (summary.get(group) or {}).get(part)
        return float(value) if value is not None and math.isfinite(value) else None


METRICS = (
    Metric("req_per_s", "throughput", "req/s", True),
    Metric("goodput_per_s", "goodput", "req/s", True),
    Metric("ttft_ms_mean", "TTFT mean", "ms", False),
    Metric("ttft_ms_p50", "TTFT p50", "ms", False),
    Metric("ttft_ms_p90", "TTFT p90", "ms", False),
    Metric("ttft_ms_p99", "TTFT p99", "ms", False),
    Metric("e2e_ms_mean", "E2E mean", "ms", False),
    Metric("e2e_ms_p50", "E2E p50", "ms", False),
    Metric("e2e_ms_p90", "E2E p90", "ms", False),
    Metric("e2e_ms_p99", "E2E p99", "ms", False),
    Metric("tpot_ms_mean", "TPOT mean", "ms", False),
    Metric("reuse", "reuse", "", True),
    Metric("uncached_max_over_mean", "uncached max/mean", "", None),
    Metric("idle_share", "idle share", "", None),
)
COUNTS = ("requests", "failed", "spills", "fallbacks", "bypasses")


class Figure(msgspec.Struct, frozen=True):
    """One metric of one arm."""

    seeds: int
    mean: float
    sd: float | None
    """Standard deviation between seeds; None with one seed."""
    low: float
    """The smallest seed's."""
    high: float
    difference: Difference | None = None
    """None: it is the baseline, or no seed has both."""


class Comparison(msgspec.Struct, frozen=True):
    """One arm on one workload, over all its seeds."""

    workload: str
    kind: str
    arm: str
    baseline: str
    seeds: list[int]
    counts: dict[str, float | None]
    """Mean a run, name of COUNTS -> count; None: unknown."""
    figures: dict[str, Figure | None]
    """Name of METRICS -> figure; None: no seed has it."""


class Run(msgspec.Struct, frozen=True):
    """An outcome without its rows."""

    workload: str
    arm: str
    seed: int
    kind: str
    ranks: int
    seconds: float
    summary: dict[str, Any]
    more: dict[str, Any] = {}

    @classmethod
    def of(cls, outcome: Outcome, ttft_bound_ms: float = 2000.0) -> "Run":
        o = outcome
        summary = summarize(o, ttft_bound_ms)
        return cls(o.workload, o.arm, o.seed, o.kind, o.ranks, o.seconds, summary, o.more)


def compare(outcomes: Iterable[Outcome], baseline: str) -> list[Comparison]:
    """Every arm against `baseline`, workload by workload, in the order in which they come."""
    return compare_runs([Run.of(outcome) for outcome in outcomes], baseline)


def compare_runs(runs: Iterable[Run], baseline: str) -> list[Comparison]:
    """As `compare`; kinds are never compared with each other.

    Where SGLang's own method was not run (one warm server, its policy swapped), the sidecar's of
    the same name stands in as the baseline, and each comparison says so.
    """
    groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        groups.setdefault((run.workload, run.kind), {}).setdefault(run.arm, []).append(run)
    found = []
    for (workload, kind), arms in groups.items():
        basis = baseline if baseline in arms else f"sidecar_{baseline}"
        basis = basis if basis in arms else baseline
        base = {metric.name: _by_seed(arms.get(basis, []), metric) for metric in METRICS}
        for arm, mine in arms.items():
            figures = {
                metric.name: _figure(_by_seed(mine, metric), base[metric.name], arm == basis)
                for metric in METRICS
            }
            seeds = sorted({run.seed for run in mine})
            found.append(Comparison(workload, kind, arm, basis, seeds, _counts(mine), figures))
    return found


def _by_seed(runs: list[Run], metric: Metric) -> dict[int, float]:
    values: dict[int, list[float]] = {}
    for run in runs:
        value = metric.of(run.summary)
        if value is not None:
            values.setdefault(run.seed, []).append(value)
    return {seed: math.fsum(each) / len(each) for seed, each in sorted(values.items())}


def _figure(mine: dict[int, float], base: dict[int, float], is_base: bool) -> Figure | None:
    if not mine:
        return None
    values = list(mine.values())
    mean = math.fsum(values) / len(values)
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    both = [seed for seed in mine if seed in base]
    difference = None
    if both and not is_base:
        difference = paired([mine[seed] for seed in both], [base[seed] for seed in both])
    return Figure(len(values), mean, sd, min(values), max(values), difference)


def _counts(runs: list[Run]) -> dict[str, float | None]:
    counts: dict[str, float | None] = {}
    for name in COUNTS:
        known = [run.summary[name] for run in runs if run.summary.get(name) is not None]
        counts[name] = math.fsum(known) / len(known) if known else None
    return counts
