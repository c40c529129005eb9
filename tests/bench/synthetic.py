"""Outcomes that look like a bench's, drawn from a seed: for the report's tests and for the eye.

`python -m tests.bench.synthetic FOLDER [workloads] [arms] [seeds] [requests]` writes a report.
"""

import random
import sys
import zlib
from pathlib import Path
from typing import Any

from bench.html import text_table, write_report
from bench.outcome import Outcome, Row, Sample
from bench.statistics import compare

ARMS = (
    "total_tokens",
    "round_robin",
    "prefix_affinity",
    "prefix_affinity:min_load_gap=2",
    "prefix_affinity:min_load_gap=8",
    "consistent_hashing:bound=1.25",
    "lmetric",
    "oracle",
    "total_requests",
    "key_modulo",
    "least_uncached",
    "prefix_affinity:guard=tokens",
)
RANKS = 8


def outcome(
    workload: str, arm: str, seed: int, requests: int = 300, kind: str = "virtual"
) -> Outcome:
    """Affine arms keep a session on its rank and answer sooner; the others wander."""
    luck = random.Random(f"{workload}/{seed}")
    own = random.Random(f"{workload}/{seed}/{arm}")
    affine = "affin" in arm or "hash" in arm or arm in ("oracle", "key_modulo")
    speed = (0.45 if affine else 1.0) * (1 + 0.15 * (zlib.crc32(arm.encode()) % 100) / 100)
    rows = []
    for i in range(requests):
        session = i % 40
        preferred = session * 5 % RANKS
        stays = affine and own.random() > 0.07
        rank = preferred if stays else own.randrange(RANKS)
        prompt = 500 + 120 * (i // 40)
        cached = int(prompt * (0.9 if stays else 0.35) * min(1.0, i / requests * 4))
        ttft = speed * luck.lognormvariate(6, 0.7) * own.lognormvariate(0, 0.2)
        at = i * 0.25 * (0.8 if affine else 1.0)
        row = Row(i, session, i // 40, at, rank, prompt, cached, 128, ttft, ttft + 127 * 12 * speed)
        if affine:
            row.preferred, row.reason = preferred, "hit" if stays else "spill"
        rows.append(row)
    end = max((row.at + row.e2e_ms / 1000 for row in rows), default=0.0)
    samples = [
        Sample(
            i * end / 400, [max(0, int(own.gauss(12, 2 if affine else 5))) for _ in range(RANKS)]
        )
        for i in range(400 if requests else 0)
    ]
    spills = sum(row.rank != row.preferred for row in rows) if affine else None
    idle = own.gauss(0.2, 0.01) if kind != "live" else None
    return Outcome(workload, arm, seed, kind, RANKS, rows, end, samples, idle, spills, 0, 0)


def small(arm: str, seed: int = 0, **changes: Any) -> Outcome:
    found = outcome("w", arm, seed, requests=60)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def sweep(workload: str, seed: int) -> list[Outcome]:
    """Arms of a sweep over skew and gap, with the sooner answers in its middle."""
    found = []
    for skew in (1.0, 1.25, 1.5, 2.0, 3.0):
        for gap in (0, 2, 4, 8):
            name = f"prefix_affinity:max_load_skew={skew}:min_load_gap={gap}"
            each = outcome(workload, name, seed, requests=80)
            for row in each.rows:
                row.ttft_ms *= 1 + abs(skew - 1.5) / 2 + abs(gap - 4) / 10
            found.append(each)
    return found


def main() -> None:
    folder, *numbers = sys.argv[1:]
    workloads, arms, seeds, requests = [*map(int, numbers), *(3, 8, 5, 1000)[len(numbers) :]]
    outcomes = (
        outcome(f"workload-{w}", ARMS[a], seed, requests)
        for w in range(workloads)
        for a in range(arms)
        for seed in range(seeds)
    )
    kept = [*outcomes, *(each for seed in range(3) for each in sweep("workload-0", seed))]
    about = {
        "machine": {"cpu": "synthetic", "cores": 2},
        "versions": {"python": "3.11", "sglang": "0.5.23", "sidecar": "0"},
        "command": "python -m tests.bench.synthetic",
        "time": "2000-01-01 00:00",
        "baseline": "total_tokens",
        "workloads": {"workload-0": "Every number is drawn; none was measured."},
    }
    notes = ["mooncake was skipped: no trace at ../shared/traces."]
    print(write_report(Path(folder), kept, about, notes))
    print(text_table(compare(kept, "total_tokens")))


if __name__ == "__main__":
    main()
