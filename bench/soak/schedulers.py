"""The schedulers of a soak: eight ranks with the hook's own reporters, in one process.

A rank holds HELD[r] requests that never end, so that its load is not zero when all else is done.
"""

import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from bench.replace import RANKS
from bench.soak.shared import Options, Wire
from sglang_hook.reporter import Reporter, Sample, Tokens
from sidecar import wire as messages

STEP = 0.02
"""Seconds: a decode step of a busy rank."""
SERVICE = 0.2
"""Seconds that a request runs: 400 at a time at 2,000 a second, 50 a rank."""
HELD = [2 + rank for rank in range(RANKS)]
CAPACITY = 1 << 20
"""Tokens of a rank's cache."""
INTERVAL, HEARTBEAT = 0.005, 0.25  # sglang_hook.settings
LOADING_NS = 61 * 10**9
"""A scheduler that restarts loads its model for a minute first; here its epoch only says so."""


class Rank:
    """One scheduler. `taken`: requests on the wire that it, or one before it, has seen."""

    def __init__(self, rank: int, wire: Wire, endpoint: str) -> None:
        self.rank, self.wire, self.endpoint = rank, wire, endpoint
        self.taken = self.taken_tokens = self.died = 0
        self.running: deque[tuple[float, int, int]] = deque()
        """End of service (monotonic seconds), requests, tokens."""
        self.up = self.holding = False
        self.failed = self.starts = 0
        self.start()

    def start(self) -> None:
        """A new process: what nobody took meanwhile is gone."""
        self.died += self.wire.requests[self.rank] - self.taken
        self.taken, self.taken_tokens = self.wire.requests[self.rank], self.wire.tokens[self.rank]
        reports = messages.report_endpoint(self.endpoint)
        self.reporter = Reporter(reports, "bench", self.rank, INTERVAL, HEARTBEAT)
        self.reporter.epoch += LOADING_NS * self.starts
        self.starts = 1
        self.up = True

    def kill(self) -> None:
        self.up = False
        self.running.clear()
        self.reporter.close()

    def step(self, now: float) -> None:
        """Take in what was sent, finish what is done, report if it is due."""
        if not self.up:
            return
        reporter = self.reporter
        if not self.holding:
            self.take_in(now)
        while self.running and self.running[0][0] <= now:
            self.running.popleft()
        state = self.load()
        if reporter.due(state):
            held = sum(tokens for _, _, tokens in self.running)
            reporter.tokens = Tokens(reporter.received_tokens, held, CAPACITY, 256, 0)
            taken = (reporter.received, 0, reporter.admitted_tokens, reporter.cached_tokens)
            self.failed += not reporter.push(state, Sample(state, 0, *taken))

    def take_in(self, now: float) -> None:
        """Read what is on the wire."""
        reporter = self.reporter
        requests = self.wire.requests[self.rank] - self.taken
        tokens = self.wire.tokens[self.rank] - self.taken_tokens
        if requests:
            self.taken += requests
            self.taken_tokens += tokens
            reporter.received += requests
            reporter.received_tokens += tokens
            reporter.admit(tokens, tokens // 2)
            self.running.append((now + SERVICE, requests, tokens))

    def load(self) -> int:
        """Requests that it holds."""
        return HELD[self.rank] + sum(requests for _, requests, _ in self.running)

    def told(self) -> dict[str, Any]:
        return {
            "up": self.up,
            "received": self.reporter.received,
            "running": self.load(),
            "in_flight": self.wire.requests[self.rank] - self.taken if self.up else 0,
            "died": self.died,
            "reports_failed": self.failed,
        }


def serve(pipe: Connection, wire: Wire, options: Options) -> None:
    """Steps, until the pipe closes. ("kill", rank), ("start", rank): one rank. ("hold",),
    ("release",): take in nothing, and on again. ("tell",): of each rank."""
    ranks = [Rank(rank, wire, options.endpoint) for rank in range(RANKS)]
    due = time.monotonic()
    while True:
        for rank in ranks:
            rank.step(time.monotonic())
        while pipe.poll(max(0.0, due - time.monotonic())):
            word, *more = pipe.recv()
            if word == "tell":
                told = [rank.told() for rank in ranks]
                pipe.send({"ranks": told, "blocks": sys.getallocatedblocks()})
                continue
            if word in ("hold", "release"):
                for rank in ranks:
                    rank.holding = word == "hold"
            else:
                getattr(ranks[more[0]], word)()
            pipe.send(None)
        due = max(due + STEP, time.monotonic())
