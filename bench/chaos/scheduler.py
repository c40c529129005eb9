"""The process of one rank: takes requests in, runs each for a while, reports its load."""

import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import zmq

from bench.chaos.board import Board
from bench.chaos.controller import Cast, rank_address
from sglang_hook.reporter import Reporter, Sample
from sidecar import wire

INTERVAL, HEARTBEAT = 0.005, 0.25
"""Seconds; the hook's defaults."""
STEP_MS = 10
"""Longest step of an idle rank."""


class Scheduler:
    """One rank; `run` does not return."""

    def __init__(self, cast: Cast, rank: int) -> None:
        self.rank = rank
        self.board = Board(cast.folder / "board")
        reports = wire.report_endpoint(cast.endpoint)
        self.reporter = Reporter(reports, cast.instance, rank, INTERVAL, HEARTBEAT)
        self.reporter.epoch += int(cast.clock_step * 1e9)
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        address = rank_address(cast.folder, rank)
        with suppress(FileNotFoundError):
            Path(address.removeprefix("ipc://")).unlink()
        self._inbox.bind(address)
        self._running: deque[float] = deque()
        """When each request ends, ascending."""

    def run(self) -> None:
        while True:
            self.step()

    def step(self) -> None:
        """Take in what has come, let go of what has ended, report."""
        if self._inbox.poll(STEP_MS):
            self._take()
        now = time.monotonic()
        while self._running and self._running[0] <= now:
            self._running.popleft()
        running, received = len(self._running), self.reporter.received
        self.board.tell(self.rank, received, running)
        if self.reporter.due(running):
            self.reporter.push(running, Sample(running=running, received=received))

    def _take(self) -> None:
        ends = time.monotonic() + self.board.held_seconds
        with suppress(zmq.Again):
            while True:
                tokens = self._inbox.recv(zmq.NOBLOCK)
                self.reporter.count(int.from_bytes(tokens, "big"))
                self._running.append(ends)
