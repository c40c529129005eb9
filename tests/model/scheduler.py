"""The schedulers in the model: what they hold, and the real reporter."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_hook.reporter import Reporter, Sample, Tokens
from tests.model.network import Peer, PushSocket
from tests.support import INSTANCE

CAPACITY = 200_000


class Clock:
    """Monotonic seconds and a wall clock, which may be set."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.wall = 1_700_000_000 * 10**9

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.wall += round(seconds * 1e9)


class Job(NamedTuple):
    """A request on its way to a rank or there. controller: which one sent it."""

    tokens: int
    controller: int


@dataclass
class Scheduler:
    """One rank's process: what lies in its socket, what it holds, and the real reporter."""

    rank: int
    clock: Clock
    reports: list[bytes]
    pipe: deque[Job] = field(default_factory=deque)
    waiting: deque[Job] = field(default_factory=deque)
    running: deque[Job] = field(default_factory=deque)
    received: Counter[int] = field(default_factory=Counter)
    """By the controller that sent it."""

    def __post_init__(self) -> None:
        self.reporter = Reporter("ipc:///r", INSTANCE, self.rank, 0.005, 0.25, self.clock)
        self.reporter.epoch = self.clock.wall
        self.socket = PushSocket(self.reports)
        self.reporter._peer = Peer(self.socket)  # type: ignore[assignment]

    @property
    def epoch(self) -> int:
        return self.reporter.epoch

    def take_in(self, count: int) -> None:
        """Receive what lies in the socket."""
        for _ in range(min(count, len(self.pipe))):
            job = self.pipe.popleft()
            self.received[job.controller] += 1
            self.reporter.count(job.tokens)
            self.waiting.append(job)

    def prefill(self, count: int, cached: float) -> None:
        """Begin with requests that wait; of each prompt this share is cached."""
        for _ in range(min(count, len(self.waiting))):
            job = self.waiting.popleft()
            self.reporter.admit(job.tokens, int(job.tokens * cached))
            self.running.append(job)

    def finish(self, count: int) -> None:
        for _ in range(min(count, len(self.running))):
            self.running.popleft()

    def snapshot(self) -> None:
        """SGLang writes its token figures, which come less often than reports."""
        held = sum(job.tokens for job in (*self.running, *self.waiting))
        total = self.reporter.received_tokens
        self.reporter.tokens = Tokens(total, held, CAPACITY, 256, 0)

    def report(self) -> None:
        """A step in which a report is made if one is due."""
        state, maker = (len(self.waiting), len(self.running)), self.reporter
        if maker.due(state):
            counts = (0, maker.admitted_tokens, maker.cached_tokens)
            sample = Sample(len(self.running), len(self.waiting), maker.received, *counts)
            maker.push(state, sample)
