"""What do requests see while the sidecar process is replaced, again and again?

`python -m bench.replace [--replacements 12] [--rate 1000] [--json]` asks as the controller does,
through the hook's own Chooser and client, with eight reporters beside it as the schedulers are, and
has `serve --take-over` take the place of the running process. A gap is the time from the last
decision of one sidecar to the first of its successor in which the hook decided alone. To reach: no
request without a rank, no session on another rank, no gap of a second or more.
"""

import os
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench import report
from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser, Dispatch
from sglang_hook.reporter import Reporter, Sample
from sidecar import wire

RANKS = 8
SESSIONS = 50
DEADLINE_MS = 5
SETTLE = 1.0
"""Seconds between a replacement and the next."""
PROMPTS = [array("q", range(i, i + 2048)) for i in range(SESSIONS)]


class Decision(NamedTuple):
    at: float
    """Monotonic seconds."""
    seconds: float
    boot: int | None
    """Start of the sidecar that decided; None: the hook decided alone."""
    session: int
    rank: int | None


class Traffic:
    """A controller and its schedulers, in this thread. endpoint: of the sidecar.

    held: requests that each rank holds and never finishes; `decisions` grows with every request.
    """

    def __init__(self, endpoint: str, held: int = 0, deadline_ms: int = DEADLINE_MS) -> None:
        self.chooser = Chooser("bench", time.time_ns(), {}, lambda: list(range(RANKS)), 1 << 17)
        self.client = SidecarClient(endpoint, deadline_ms, 1, 0.05, self.chooser.probe)
        self.chooser.ask, self.client.heard = self._ask, self._heard
        reports = wire.report_endpoint(endpoint)
        # Reports come at once: then no load gives a session a reason to move, only we might.
        self.reporters = [Reporter(reports, "bench", r, 0.0, 0.25) for r in range(RANKS)]
        self.held = held
        self.decisions: list[Decision] = []
        self.boot: int | None = None
        self._decided_by: int | None = None
        self._count = 0

    def meet(self) -> None:
        """Wait until the sidecar knows us."""
        deadline = time.monotonic() + 10
        while self.boot is None:
            self.client.greet()
            if time.monotonic() > deadline:
                raise SystemExit("no sidecar answers within 10 s")

    def request(self) -> None:
        """One request of the next session."""
        session = self._count % SESSIONS
        self._count += 1
        self._decided_by = None
        begun = time.monotonic()
        rank = self.chooser.choose_one(
            Dispatch(f"session-{session}", PROMPTS[session], (None, None, None))
        )
        spent = time.monotonic() - begun
        self.decisions.append(Decision(begun, spent, self._decided_by, session, rank))
        if rank is not None:
            self.chooser.sent.count(rank, len(PROMPTS[session]))

    def report(self) -> None:
        """Every rank has taken in what it was sent, and finished all but `held` of it."""
        sent, _ = self.chooser.sent.of(range(RANKS))
        for reporter, received in zip(self.reporters, sent, strict=True):
            reporter.received = received
            if reporter.due(received):
                reporter.push(received, Sample(running=self.held, received=received))

    def close(self) -> None:
        self.client.close()
        for reporter in self.reporters:
            reporter.close()

    def _heard(self, reply: wire.Reply) -> None:
        self.boot = reply.boot
        self.chooser.heard(reply)

    def _ask(self, query: bytes, seq: int) -> wire.Reply | str:
        answer = self.client.ask(query, seq)
        self._decided_by = None if isinstance(answer, str) else answer.boot
        return answer


def drive(traffic: Traffic, rate: float, until: float) -> None:
    """Requests at `rate` a second and the reports, until then (monotonic seconds)."""
    due = time.monotonic()
    while due < until:
        traffic.request()
        traffic.report()
        due += 1 / rate
        # A stall is not made up for: requests that nobody sent cannot have failed.
        due = max(due, time.monotonic() - 0.05)
        time.sleep(max(0.0, due - time.monotonic()))


def gaps(decisions: list[Decision]) -> list[tuple[float, int]]:
    """Of each change of sidecars: seconds in which the hook decided alone, and how many it did."""
    found = []
    alone: list[Decision] = []
    before: Decision | None = None
    for decision in decisions:
        if decision.boot is None:
            alone.append(decision)
            continue
        if before is not None and decision.boot != before.boot:
            found.append((decision.at - before.at, len(alone)))
        alone, before = [], decision
    return found


def moved(decisions: list[Decision]) -> int:
    """Requests that went to another rank than the one before of their session."""
    last: dict[int, int | None] = {}
    count = 0
    for decision in decisions:
        count += last.get(decision.session, decision.rank) != decision.rank
        last[decision.session] = decision.rank
    return count


def start(endpoint: str, *more: str) -> "subprocess.Popen[bytes]":
    """A sidecar process."""
    command = [sys.executable, "-m", "sidecar", "serve", f"--endpoint={endpoint}", *more]
    return subprocess.Popen([*command, "--admin-port=0", "--log-level=warning"])


def run(replacements: int, rate: float) -> dict[str, Any]:
    """Replace the sidecar under load that often."""
    with tempfile.TemporaryDirectory(prefix="dps-") as folder:
        endpoint = f"ipc://{Path(folder, 'q')}"
        serving = start(endpoint)
        traffic = Traffic(endpoint)
        codes = []
        try:
            traffic.meet()
            drive(traffic, rate, time.monotonic() + SETTLE)
            for _ in range(replacements):
                successor = start(endpoint, "--take-over")
                while serving.poll() is None:
                    drive(traffic, rate, time.monotonic() + 0.1)
                codes.append(serving.returncode)
                serving = successor
                drive(traffic, rate, time.monotonic() + SETTLE)
        finally:
            serving.terminate()
            serving.wait()
            traffic.close()
    return figures(traffic, codes)


def figures(traffic: Traffic, codes: list[int]) -> dict[str, Any]:
    decisions = traffic.decisions
    changes = gaps(decisions)
    span = decisions[-1].at - decisions[0].at
    times = sorted(decision.seconds for decision in decisions)
    return {
        "replacements": len(changes),
        "exit_codes": sorted(set(codes)),
        "requests": len(decisions),
        "requests_per_second": round(len(decisions) / span),
        "without_rank": sum(decision.rank is None for decision in decisions),
        "sessions_moved": moved(decisions),
        "gap_p50_ms": round(median(seconds for seconds, _ in changes) * 1000, 1),
        "gap_max_ms": round(max(seconds for seconds, _ in changes) * 1000, 1),
        "alone_in_a_gap_max": max(count for _, count in changes),
        "alone_in_all": sum(decision.boot is None for decision in decisions),
        "alone_by_cause": dict(traffic.chooser.bypassed),
        "decision_p50_us": round(median(times) * 1e6),
        "decision_p99_us": round(times[int(len(times) * 0.99)] * 1e6),
        "decision_max_ms": round(times[-1] * 1000, 2),
    }


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--replacements", type=int, default=12, help="how often (default: 12)")
    parser.add_argument("--rate", type=float, default=1000, help="requests a second (default)")
    options = parser.parse_args()
    os.environ.pop("NOTIFY_SOCKET", None)
    result = run(options.replacements, options.rate)
    report.show(
        result, [[name, str(value)] for name, value in result.items()], as_json=options.json
    )


if __name__ == "__main__":
    main()
