"""What `make bench` runs: which workloads, arms and seeds, and roughly how long each takes."""

from pathlib import Path

from bench.cells import Cell
from bench.model.server import ServerSpec
from bench.workloads import MissingTraces, make_workload

BASELINE = "round_robin"
PR = "prefix_affinity:min_load_gap=0"
"""The policy as SGLang PR 31170 has it: the relative guard alone."""

MAIN_ARMS = (
    BASELINE,
    "total_requests",
    "total_tokens",
    "key_mod",
    PR,
    "prefix_affinity",
    "kv_affinity",
    "chbl",
    "lmetric",
    "least_waiting_uncached",
    "oracle",
)
FULL_ARMS = (
    *MAIN_ARMS,
    "first_tokens_mod",
    "prefix_affinity:min_load_gap=2",
    "prefix_affinity:min_load_gap=8",
    "prefix_affinity:max_load_skew=1000000",
    "prefix_affinity_token_guard",
    "sidecar_total_requests",
    "sidecar_total_tokens",
)

QUICK_WORKLOADS = (
    "published-16x32",
    "published-64x8",
    "agentic",
    "agentic-trace-64",
    "mooncake",
    "hot-key",
    "short-chats",
    "random",
)
FULL_WORKLOADS = (
    *QUICK_WORKLOADS,
    "agentic-trace-32",
    "agentic-trace-128",
    "agentic-trace-256",
    "published-16x32:rate=12",
    "agentic:rate=0.6",
    "mooncake:rate=3.4",
    "short-chats:rate=1.5",
    "random:rate=8",
)

SKEWS = (1.0, 1.25, 1.5, 2.0, 3.0)
GAPS = (0, 1, 2, 4, 8)

# Tenths of a second of one cell on one core, by workload, on the machine of docs/results.md; whole
# numbers, since they add up to a progress bar.
_WEIGHTS = {"agentic-trace": 45, "mooncake": 20}


def weight(cell: Cell) -> int:
    """Roughly how long a cell takes, compared with others."""
    name = cell.workload.partition(":")[0].rstrip("0123456789").rstrip("-")
    return _WEIGHTS.get(name, 3)


def sweep_arm(skew: float, gap: float) -> str:
    return f"prefix_affinity:max_load_skew={skew:g}:min_load_gap={gap:g}"


def available(workloads: tuple[str, ...], traces: Path) -> tuple[list[str], list[str]]:
    """Those that can be made, and a sentence for each that lacks its traces."""
    found, notes = [], []
    for spec in workloads:
        lacking = _lacking(spec, traces)
        if lacking:
            notes.append(f"{spec} skipped: {lacking}")
        else:
            found.append(spec)
    return found, notes


def _lacking(spec: str, traces: Path) -> str:
    try:
        make_workload(spec, traces)
    except MissingTraces as error:
        return str(error)
    return ""


def cells(workloads: list[str], seeds: int, *, full: bool) -> list[Cell]:
    """Every cell, all arms of a seed side by side, so that an early end leaves whole pairs."""
    arms = FULL_ARMS if full else MAIN_ARMS
    server = ServerSpec()
    plan = [
        Cell(workload, arm, seed, server)
        for seed in range(seeds)
        for workload in workloads
        for arm in arms
    ]
    if full:
        plan += [
            Cell(workload, sweep_arm(skew, gap), seed, server)
            for seed in range(min(seeds, 3))
            for workload in workloads
            for skew in SKEWS
            for gap in GAPS
        ]
    return plan
