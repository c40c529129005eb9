"""The scheduler side: load reports, pushed without ever blocking a step."""

import time
from collections.abc import Callable
from typing import NamedTuple

import zmq

from sglang_hook.peer import Peer
from sidecar import wire

# A full queue means that the sidecar does not read; newer reports make older ones worthless.
SEND_QUEUE = 8


class Tokens(NamedTuple):
    """Token figures of SGLang's own load snapshot, which come less often than ours."""

    received_tokens: int = 0
    """Prompt tokens received by the time of that snapshot, and so part of its figures."""
    tokens: int = 0
    capacity_tokens: int = 0
    max_running: int = 0
    waiting_uncached_tokens: int = 0


class Reporter:
    """Reports of one DP rank, at most one an interval, at least one a heartbeat.

    interval, heartbeat: seconds; clock: monotonic seconds.
    """

    def __init__(
        self,
        endpoint: str,
        instance: str,
        rank: int,
        interval: float,
        heartbeat: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.instance = instance
        self.rank = rank
        self.interval = interval
        self.heartbeat = heartbeat
        self.clock = clock
        self.epoch = time.time_ns()
        self.received = 0
        self.received_tokens = 0
        self.tokens = Tokens()
        self._seq = 0
        self._sent_at = float("-inf")
        self._sent_state: object = None
        self._peer = Peer(zmq.PUSH, endpoint, {zmq.SNDHWM: SEND_QUEUE}, self.clock)

    def count(self, tokens: int) -> None:
        """Account a request that the scheduler has taken in."""
        self.received += 1
        self.received_tokens += tokens

    def due(self, state: object) -> bool:
        """Whether to sample now. `state`: anything cheap that changes when the queues change."""
        elapsed = self.clock() - self._sent_at
        if elapsed < self.interval:
            return False
        return elapsed >= self.heartbeat or (state, self.received) != self._sent_state

    def push(self, state: object, running: int, waiting: int, received: int) -> bool:
        """Send a report; False if nobody takes it, and the next `due` tries again.

        received: requests received by the time at which running and waiting were counted.
        """
        self._sent_at = self.clock()
        self._seq += 1
        report = wire.LoadReport(
            wire.VERSION,
            self.instance,
            self.rank,
            self.epoch,
            self._seq,
            received,
            self.tokens.received_tokens,
            running,
            waiting,
            *self.tokens[1:],
        )
        try:
            self._peer.socket().send(wire.encode(report), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._peer.failed(error)
            self._sent_state = None
            return False
        self._peer.worked()
        self._sent_state = (state, self.received)
        return True

    def close(self) -> None:
        """Drop the socket; the next report makes another."""
        self._peer.close()
