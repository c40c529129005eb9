"""The scheduler side: load reports, pushed without ever blocking a step."""

import time
from collections.abc import Callable
from typing import NamedTuple

import zmq

from sglang_hook.peer import Peer
from sglang_hook.recent import Recent
from sidecar import wire
from sidecar.curve import ClientKeys

# A full queue means that the sidecar does not read; newer reports make older ones worthless.
SEND_QUEUE = 8
# What comes back is the handshake's. Whoever says more is no sidecar: it would be kept for ever.
MAX_ANSWER_BYTES = 4096


class Tokens(NamedTuple):
    """Token figures of SGLang's own load snapshot, which come less often than ours."""

    received_tokens: int = 0
    """Prompt tokens received by the time of that snapshot, and so part of its figures."""
    tokens: int = 0
    capacity_tokens: int = 0
    max_running: int = 0
    waiting_uncached_tokens: int = 0


class Sample(NamedTuple):
    """What a scheduler holds at one moment, and what it has done since its start."""

    running: int = 0
    """Requests, a batch in prefill included."""
    waiting: int = 0
    """Requests."""
    received: int = 0
    """Requests taken in by that moment."""
    prefilling_tokens: int = 0
    """Tokens still to be computed of the prompt that is prefilled in chunks; the chunk under way
    counts as computed."""
    admitted_tokens: int = 0
    """Prompt tokens of all requests whose prefill began."""
    cached_tokens: int = 0
    """Of those, tokens that were found in the prefix cache."""


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
        keys: ClientKeys | None = None,
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
        self.admitted_tokens = 0
        self.cached_tokens = 0
        self.flushes = 0
        self.tokens = Tokens()
        self._recent = Recent(wire.RECENT_SECONDS)
        self._seq = 0
        self._sent_at = float("-inf")
        self._sent_state: object = None
        options: dict[int, int] = {
            zmq.SNDHWM: SEND_QUEUE,
            zmq.RCVHWM: 1,
            zmq.MAXMSGSIZE: MAX_ANSWER_BYTES,
        }
        self._peer = Peer(zmq.PUSH, endpoint, options, self.clock, keys=keys)

    def count(self, tokens: int) -> None:
        """Account a request that the scheduler has taken in."""
        self.received += 1
        self.received_tokens += tokens

    def admit(self, tokens: int, cached: int) -> None:
        """Account a request whose prefill has begun: its prompt tokens, and those found cached."""
        found = min(max(0, cached), tokens)
        # Only now, so that what is no number leaves both as they are.
        self.admitted_tokens += tokens
        self.cached_tokens += found
        self._recent.add(tokens - found, self.clock())

    def flush(self) -> None:
        """Account that the prefix cache was emptied; a report is due at once."""
        self.flushes += 1
        self._sent_at = float("-inf")

    def due(self, state: object) -> bool:
        """Whether to sample now. `state`: anything cheap that changes when the queues change."""
        elapsed = self.clock() - self._sent_at
        if elapsed < self.interval:
            return False
        return (
            elapsed >= self.heartbeat
            or (state, self.received) != self._sent_state
            or self._unheard()
        )

    def _unheard(self) -> bool:
        """Whether nobody takes reports now: who comes next has heard none, so one is due."""
        try:
            return not self._peer.reachable()
        except zmq.ZMQError:
            return True  # the push that follows deals with it

    def push(self, state: object, sample: Sample) -> bool:
        """Send a report; False if nobody takes it, and the next `due` tries again."""
        self._sent_at = self.clock()
        self._seq += 1
        report = wire.LoadReport(
            wire.VERSION,
            self.instance,
            self.rank,
            self.epoch,
            self._seq,
            sample.received,
            self.tokens.received_tokens,
            sample.running,
            sample.waiting,
            *self.tokens[1:],
            sample.prefilling_tokens,
            sample.admitted_tokens,
            sample.cached_tokens,
            # Not the sample's: a cache is emptied while no request holds any of it, so there is
            # no figure that a younger count could contradict, and the news must not wait.
            self.flushes,
            round(self._recent.value(self._sent_at)),
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
