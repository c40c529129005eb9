"""What does the decision log cost? The agentic workload on 8 ranks, decided by kv_affinity.

`python -m bench.journal [--json]` runs the workload in the model, keeps the queries, replies and
load reports, and feeds them to the log. It prints microseconds that the event loop spends for each
decision (its share of the load reports included), the longest slice between two pauses, those that
the thread spends compressing and writing, bytes for each decision on the disk, and how fast
`replay` decides them again.
"""

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from bench import report
from bench.cells import Cell, run_cell, server_from
from bench.workloads import TRACES
from sidecar import wire
from sidecar.budget import Budget
from sidecar.dispatcher import Dispatcher
from sidecar.journal.disk import Chunk, Disk, prepare
from sidecar.journal.reader import Reader
from sidecar.journal.seal import Seal
from sidecar.journal.state import Origin, state_of
from sidecar.journal.verify import Verification
from sidecar.journal.writer import Journal
from sidecar.logs import RateLimit
from sidecar.metrics import Health
from sidecar.policies import make_policy
from sidecar.wire import LoadReport, Query, Reply

Follow = Callable[[Journal], Iterator[None]]
STALE_SECONDS = 1e9  # as in bench.arms.sidecar
NEVER = 1 << 40
BATCH = 50
"""Events between two looks at the clock, which costs as much as one."""


class Timed(Disk):
    """Measures its own CPU time."""

    nanoseconds = 0

    def write(self, chunk: Chunk) -> int:
        before = time.thread_time_ns()
        size = super().write(chunk)
        self.nanoseconds += time.thread_time_ns() - before
        return size


def traffic() -> tuple[list[Follow], int, int]:
    """What happens to the dispatcher in one run; decisions, load reports."""
    events: list[Follow] = []
    counts = [0, 0]
    handle, hear = Dispatcher.handle, Dispatcher.report

    def handled(self: Dispatcher, query: Query, now: float) -> Reply:
        reply = handle(self, query, now)
        counts[0] += len(query.requests)
        # The model goes on with its own lists; over a socket they would be copies.
        copy = wire.decode_query(wire.encode(query))
        events.append(lambda journal: journal.follow(copy, reply, now))
        return reply

    def heard(self: Dispatcher, said: LoadReport, now: float) -> None:
        hear(self, said, now)
        counts[1] += 1

        def one(journal: Journal) -> Iterator[None]:
            journal.report(said, now)
            yield

        events.append(one)

    patched = mock.patch.multiple(Dispatcher, handle=handled, report=heard)
    with patched:
        run_cell(Cell("agentic", "kv_affinity", 0, server_from([])), TRACES)
    return events, counts[0], counts[1]


def _slices(work: Iterator[None]) -> Iterator[int]:
    """CPU time between two pauses, nanoseconds."""
    more = True
    while more:
        before = time.thread_time_ns()
        more = next(work, work) is None
        yield time.thread_time_ns() - before


async def write(directory: str, events: list[Follow], *, slices: bool) -> dict[str, Any]:
    """CPU times of writing them all, nanoseconds. slices: find the longest too, which costs."""
    disk = Timed(directory, 1, NEVER)
    dispatcher = Dispatcher(make_policy("kv_affinity"), Budget(STALE_SECONDS, 1), 1)
    origin, seal = Origin(1, STALE_SECONDS, 1), Seal(prepare(directory))
    journal = Journal(disk, seal, origin, state_of(dispatcher), Health(), RateLimit())
    spent = longest = 0
    for first in range(0, len(events), BATCH):
        before = time.thread_time_ns()
        for event in events[first : first + BATCH]:
            if slices:
                longest = max(longest, *_slices(event(journal)))
            else:
                deque(event(journal), maxlen=0)
        spent += time.thread_time_ns() - before
        await asyncio.sleep(0)
    await journal.close()
    assert not journal.health.log_dropped
    return {"loop": spent, "longest": longest, "thread": disk.nanoseconds, "bytes": disk.written}


def measure() -> dict[str, Any]:
    """One row."""
    events, decisions, reports = traffic()
    with tempfile.TemporaryDirectory() as base:
        directory = str(Path(base) / "log")
        spent = asyncio.run(write(directory, events, slices=False))
        sliced = asyncio.run(write(str(Path(base) / "sliced"), events, slices=True))
        before = time.perf_counter()
        told = Verification(Reader([directory])).run()
        seconds = time.perf_counter() - before
    return {
        "decisions": decisions,
        "reports_per_decision": reports / decisions,
        "loop_us": spent["loop"] / decisions / 1e3,
        "longest_slice_us": sliced["longest"] / 1e3,
        "thread_us": spent["thread"] / decisions / 1e3,
        "bytes": spent["bytes"] / decisions,
        "replayed_per_second": decisions / seconds,
        "differ": told["differ"],
    }


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    row = measure()
    rows = [["", ""], *([name.replace("_", " "), f"{value:,.1f}"] for name, value in row.items())]
    report.show({"journal": row}, rows, as_json=options.json)


if __name__ == "__main__":
    main()
