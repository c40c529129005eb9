"""The REQ socket: an answer within the deadline or the cause of its absence; never an exception.

After a miss the breaker is open: nothing is waited for until the sidecar gives a sign of life. That
is the late answer itself or the answer to a probe, both looked for without blocking. A sidecar that
lives but answers too late again and again is tried less and less often.
"""

import errno
import os
import time

# Not `signal`'s own, which makes an enumeration of every signal: that takes 100 microseconds.
from _signal import pthread_sigmask  # type: ignore[import-not-found]
from collections.abc import Callable
from functools import partial
from signal import SIG_BLOCK, SIG_SETMASK
from time import monotonic_ns
from typing import TypeVar

import zmq

from sglang_hook.peer import Peer
from sglang_hook.telemetry import Meter
from sidecar import wire
from sidecar.curve import ClientKeys
from sidecar.errors import PeerError

# Queries and probes that may wait for a silent sidecar before they are dropped at once.
SEND_QUEUE = 64
# A sidecar that misses again before it has answered this many queries is held off for twice as long
# as before, up to LONGEST_HOLD_OFF seconds: a deadline spent in five seconds is 0.1%.
RECOVERED_AFTER = 10
# Bytes of an answer: one to wire.MAX_BATCH requests takes 300,000 if each has a reason of 64.
MAX_ANSWER_BYTES = 512 << 10
LONGEST_HOLD_OFF = 5.0
# pyzmq's enumerations cost a microsecond at each use.
_NOBLOCK, _EVENTS = int(zmq.NOBLOCK), int(zmq.EVENTS)
_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
# But those that tell of a fault of this very thread, and real-time ones.
_SIGNALS = tuple(n for n in range(1, 32) if n not in (4, 6, 7, 8, 9, 11, 19))

T = TypeVar("T")


class SidecarClient:
    """One query at a time, from one thread (the controller's loop).

    deadline_ms: longest wait; misses: consecutive unanswered queries that open the breaker;
    probe: builds an empty query; clock: monotonic seconds.
    """

    def __init__(
        self,
        endpoint: str,
        deadline_ms: int,
        misses: int,
        probe_interval: float,
        probe: Callable[[], bytes],
        clock: Callable[[], float] = time.monotonic,
        keys: ClientKeys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.misses_to_open = misses
        self.probe_interval = probe_interval
        self.probe = probe
        self.clock = clock
        self.open = True
        """Whether the breaker is open; it starts so: nobody waits for a sidecar never heard of."""
        self.heard: Callable[[wire.Reply], None] = lambda reply: None
        self.meter = Meter()
        self._silence = "unreachable"
        """Cause while the breaker is open: is nobody there, or somebody who does not answer?"""
        self._misses = 0
        self._next_probe = 0.0
        self._hold_off = 0.0
        self._answered = RECOVERED_AFTER
        """Queries answered since the breaker closed."""
        self._trial_at = 0.0
        """The breaker stays open until then, whatever sign of life there is."""
        self._boot: int | None = None
        """Of the sidecar that answered last."""
        # RELAXED: a lost answer does not block the next query; CORRELATE: a late answer is dropped
        # by its id.
        options: dict[int, int] = {
            zmq.REQ_RELAXED: 1,
            zmq.REQ_CORRELATE: 1,
            zmq.SNDHWM: SEND_QUEUE,
            # Nobody has more to answer; the rest waits where it comes from.
            zmq.RCVHWM: SEND_QUEUE,
            zmq.MAXMSGSIZE: MAX_ANSWER_BYTES,
            zmq.RCVTIMEO: deadline_ms,
        }
        self._peer = Peer(zmq.REQ, endpoint, options, self.clock, keys=keys, watch=True)

    def ask(self, payload: bytes, seq: int) -> wire.Reply | str:
        """Send an encoded query; return the reply, or why there is none (a bypass cause)."""
        if self.open and not self._alive():
            return self._silence
        begun = monotonic_ns()
        try:
            socket = self._peer.socket()
            socket.send(payload, _NOBLOCK)
            self._peer.may_break = True
        except zmq.ZMQError as error:
            return self._unreachable(error)
        try:
            data = _undisturbed(socket.recv)
        except zmq.Again:
            self.meter.waited(begun, monotonic_ns())
            return self._missed()
        except zmq.ZMQError as error:
            return self._unreachable(error)
        self.meter.waited(begun, monotonic_ns())
        return self._read(data, seq)

    def greet(self, patience_ms: int = 250) -> None:
        """Meet the sidecar before the first request; waits, so only for the start of a process."""
        try:
            socket = self._peer.socket()
            wait = partial(_undisturbed, socket.poll, patience_ms)
            if wait(_POLLOUT) and not self._alive():
                wait(_POLLIN)
                self._alive()
        except zmq.ZMQError as error:
            self._unreachable(error)

    def standing(self) -> str:
        """For the line in the log of who has greeted: why no sidecar was heard; empty: one was."""
        if self._boot is not None:
            return ""
        path = self.endpoint.removeprefix("ipc://")
        try:
            if path != self.endpoint:
                os.stat(path)
                if not os.access(path, os.W_OK):
                    return f" (out of reach: {os.strerror(errno.EACCES)})"
        except FileNotFoundError:
            pass  # it may come
        except OSError as error:
            return f" (out of reach: {error.strerror})"
        return " (no answer yet)"

    def close(self) -> None:
        """Drop the socket; the next query makes another."""
        self._peer.close()

    def _turn(self, *, is_open: bool) -> None:
        """Open or close the breaker."""
        self.open = is_open
        self.meter.breaker(is_open=is_open)

    def _unreachable(self, error: zmq.ZMQError) -> str:
        """Nobody is connected, the queue to a silent sidecar is full, or the socket is broken."""
        self._turn(is_open=True)
        # Before `failed`, which may drop the socket that knows.
        self._silence = "handshake" if self._peer.refused() else "unreachable"
        self._peer.failed(error)
        return self._silence

    def _missed(self) -> str:
        """Nothing came within the deadline."""
        self._misses += 1
        if self._misses >= self.misses_to_open:
            self._turn(is_open=True)
            self._silence = "breaker_open"
            now = self.clock()
            self._next_probe = now + self.probe_interval
            if self._answered < RECOVERED_AFTER:
                longer = max(2 * self._hold_off, self.probe_interval)
                self._hold_off = min(longer, LONGEST_HOLD_OFF)
            else:
                self._hold_off = 0.0
            self._trial_at = now + self._hold_off
            self._answered = 0
        return "deadline"

    def _read(self, data: bytes, seq: int) -> wire.Reply | str:
        self._misses = 0
        self._answered += 1
        self._peer.worked()
        try:
            answer = wire.decode_answer(data)
        except PeerError as error:
            return "version" if error.cause == "version" else "malformed"
        if isinstance(answer, wire.Refusal):
            return "refused"
        if answer.seq != seq:
            return "mismatched"
        self._boot = answer.boot
        self.heard(answer)
        return answer

    def _alive(self) -> bool:
        """Look for a sign of life without waiting; probe if it is time to. Closes the breaker."""
        try:
            socket = self._peer.socket()
            events = int(socket.get(_EVENTS))
            if events & _POLLIN and self._listen(socket):
                return True
            # Somebody is there now who was not: that is not to be found out an interval later.
            found = events & _POLLOUT and self._silence != "breaker_open"
            if found or self.clock() >= self._next_probe:
                self._next_probe = self.clock() + self.probe_interval
                socket.send(self.probe(), zmq.NOBLOCK)
                self._peer.may_break = True
                self._silence = "breaker_open"
        except zmq.ZMQError as error:
            self._unreachable(error)
        return False

    def _listen(self, socket: "zmq.Socket[bytes]") -> bool:
        """Take what has come; False if it was an answer to a query long given up."""
        try:
            data = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._misses = 0
        self._peer.worked()
        self._note(data)
        self._turn(is_open=self.clock() < self._trial_at)
        return not self.open

    def _note(self, data: bytes) -> None:
        """Learn what the active policy wants from a probe's answer."""
        try:
            answer = wire.decode_answer(data)
        except PeerError:
            return
        if isinstance(answer, wire.Reply):
            if answer.boot != self._boot:
                # A new process: that the one before it was slow says nothing about this one.
                self._hold_off = self._trial_at = 0.0
            self._boot = answer.boot
            self.heard(answer)


def _undisturbed(wait: Callable[..., T], *args: int) -> T:
    """The result of a wait of pyzmq's, which no signal interrupts.

    It would wait anew, and as long, after each signal that there is a handler for: a profiler that
    sends them faster than the deadline would make it endless. They are handled right after it.
    """
    before = pthread_sigmask(SIG_BLOCK, ())
    try:
        # Within: a signal that came just now is handled by this very call, and may raise.
        pthread_sigmask(SIG_BLOCK, _SIGNALS)
        return wait(*args)
    finally:
        pthread_sigmask(SIG_SETMASK, before)
