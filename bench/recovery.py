"""How long after the start of a new sidecar does it decide, and does it know the load by then?

`python -m bench.recovery [--restarts 12] [--rate 200] [--json]` ends the sidecar under load, again
and again, and starts another at once. It is asked as by the controller, through the hook's own
Chooser and client, with eight reporters beside it. Times are from the start of the process (before
Python itself has started) to the first request that it decided. What it knew then is read from its
decision log: of how many ranks it had a report, and by how many requests its view was off from the
truth. To reach: under 300 ms, and off by none.
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench import report
from bench.replace import RANKS, SETTLE, Traffic, drive, moved, start
from sidecar.journal.decoder import Decision, Report
from sidecar.journal.reader import Reader

HELD = 3
"""Requests that each rank holds all the time."""


def recover(traffic: Traffic, endpoint: str, log: Path, rate: float) -> dict[str, Any]:
    """Start a sidecar beside the load, and see it decide."""
    seen = len(traffic.decisions)
    begun = time.monotonic()
    serving = start(endpoint, f"--decision-log-directory={log}")
    try:
        deadline = begun + 30
        while not any(d.boot is not None for d in traffic.decisions[seen:]):
            if time.monotonic() > deadline:
                raise SystemExit("no decision within 30 s")
            drive(traffic, rate, time.monotonic() + 0.005)
        first = next(d for d in traffic.decisions[seen:] if d.boot is not None)
        drive(traffic, rate, time.monotonic() + SETTLE)
    finally:
        serving.terminate()  # for the log's end: the next is as little prepared as after a kill
        serving.wait()
    return {"seconds": first.at - begun, **known_at_first(log)}


def known_at_first(log: Path) -> dict[str, int]:
    """Ranks of which it had a report when it first decided, and by how much it was off."""
    running: dict[int, int] = {}
    for event in Reader([str(log)]).events():
        if isinstance(event, Report):
            running[event.report.rank] = event.report.running + event.report.waiting
        elif isinstance(event, Decision) and event.query.requests:
            off = sum(abs(HELD - running.get(rank, 0)) for rank in event.query.ranks)
            return {"reported": len(running), "off": off}
    raise SystemExit(f"{log}: no decision in it")


def run(restarts: int, rate: float) -> dict[str, Any]:
    """Restart it that often."""
    with tempfile.TemporaryDirectory(prefix="dps-") as folder:
        endpoint = f"ipc://{Path(folder, 'q')}"
        traffic = Traffic(endpoint, held=HELD)
        try:
            found = [
                recover(traffic, endpoint, Path(folder, f"log{i}"), rate)
                for i in range(restarts + 1)
            ][1:]  # the first brings Python's files into memory
        finally:
            traffic.close()
    times = [one["seconds"] * 1000 for one in found]
    return {
        "restarts": restarts,
        "first_decision_ms": report.spread(times),
        "under_300_ms": sum(ms < 300 for ms in times),
        "ranks_reported_by_then_min": min(one["reported"] for one in found),
        "ranks": RANKS,
        "requests_off_by_then_max": max(one["off"] for one in found),
        "requests_off_by_then_median": median(one["off"] for one in found),
        "sessions_moved": moved(traffic.decisions),
        "without_rank": sum(d.rank is None for d in traffic.decisions),
    }


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--restarts", type=int, default=12, help="how often (default: 12)")
    parser.add_argument("--rate", type=float, default=200, help="requests a second (default)")
    options = parser.parse_args()
    result = run(options.restarts, options.rate)
    report.show(
        result, [[name, str(value)] for name, value in result.items()], as_json=options.json
    )


if __name__ == "__main__":
    main()
