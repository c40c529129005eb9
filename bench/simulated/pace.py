"""How long a step of a simulated rank takes, and that ranks under DP attention take it together.

A rank says what it does next and learns that the step is over; it sleeps in between. `Alone` is a
rank of plain DP; `Member` is one of a group, which `bench.simulated.coordinator` keeps in step.
"""

import select
import socket
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

from bench.model.steps import StepTimes, Work

# A step is due where the one before was due, however late the ranks speak, so that the work between
# steps is hidden behind them, as SGLang hides it behind the GPU. What a busy machine loses beyond
# this is lost: steps that rush to catch up would tell nothing.
MAX_LAG_SECONDS = 0.05
# A rank looks after so long without a verdict whether it is to stop. Steps are shorter, unless
# another rank hangs or time is scaled up.
OVERDUE_SECONDS = 1.0


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First word of a rank."""

    rank: int
    ranks: int
    """How many there are."""


class Doing(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank is ready for the next step."""

    work: Work | None
    """None: it has nothing to do."""


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step is over; ranks without work took part in it as idle."""

    number: int
    """Counts from 1."""
    seconds: float
    """Duration by the model, not scaled."""
    late: float
    """Seconds on the clock by which it began too late and that were given up."""


class Idle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No rank has anything to do: there is no step until a rank has."""


class Wake(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Some rank has work again: say what you do."""


Verdict: TypeAlias = Step | Idle | Wake
_read_verdict = msgspec.msgpack.Decoder(Verdict).decode
encode = msgspec.msgpack.encode


class Pace(Protocol):
    """Takes the steps of one rank."""

    def step(self, work: Work | None, overdue: Callable[[], bool]) -> Step | None:
        """Take a step; returns when it is over. None: no rank has anything to do.

        overdue: asked now and then while there is no verdict; true gives up and returns None.
        """
        ...

    def fileno(self) -> int | None:
        """Readable when an idle rank should call `step`, if there is such a thing."""
        ...

    def close(self) -> None: ...


class Timeline:
    """When steps end."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.ends: float | None = None

    def begin(self, seconds: float, now: float) -> float:
        """The next step begins; sets `ends` and returns how late it is, beyond what is made up."""
        if self.ends is None:
            self.ends = now
        late = max(0.0, now - self.ends - MAX_LAG_SECONDS)
        self.ends += late + seconds * self.scale
        return late

    def pause(self) -> None:
        """No step follows this one at once."""
        self.ends = None


class Alone:
    """Steps of a rank that waits for no other."""

    def __init__(self, times: StepTimes, scale: float) -> None:
        self._times, self._timeline, self._steps = times, Timeline(scale), 0

    def step(self, work: Work | None, overdue: Callable[[], bool]) -> Step | None:
        if work is None:
            self._timeline.pause()
            return None
        seconds = self._times.seconds([work])
        late = self._timeline.begin(seconds, time.monotonic())
        assert self._timeline.ends is not None
        time.sleep(max(0.0, self._timeline.ends - time.monotonic()))
        self._steps += 1
        return Step(self._steps, seconds, late)

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        """Nothing is open."""


class Member:
    """Steps of a rank in a group. Raises ConnectionError when the coordinator is gone."""

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._idle = False
        self._socket.send(encode(Hello(rank, ranks)))

    def step(self, work: Work | None, overdue: Callable[[], bool]) -> Step | None:
        # An idle rank is silent: nobody waits for it before it is woken.
        if self._idle and work is None and self._hear(0.0) is None:
            return None
        self._idle = False
        self._socket.send(encode(Doing(work)))
        while True:
            verdict = self._hear(OVERDUE_SECONDS)
            if isinstance(verdict, Step):
                return verdict
            if isinstance(verdict, Idle):
                self._idle = True
                return None
            # Waking a rank that has just spoken by itself says nothing new.
            if verdict is None and overdue():
                return None

    def _hear(self, seconds: float) -> Verdict | None:
        """The next word of the coordinator; None if there is none for so long."""
        if not self._poll.poll(seconds * 1e3):
            return None
        data = self._socket.recv(256)
        if not data:
            raise ConnectionError("the coordinator that keeps the simulated ranks in step is gone")
        return _read_verdict(data)

    def fileno(self) -> int | None:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class StepCounts(msgspec.Struct):
    """Steps that a rank took part in; seconds are the model's, not scaled."""

    steps: int = 0
    seconds: float = 0.0
    prefill: int = 0
    decode: int = 0
    """The others it was idle in."""
    worked_seconds: float = 0.0
    """In which it was not idle."""
    decode_seconds: float = 0.0
    slowest_decode: float = 0.0
    late_seconds: float = 0.0
    """By the clock: what this machine took longer than the model, beyond what was made up."""

    def add(self, work: Work | None, step: Step) -> None:
        self.steps += 1
        self.seconds += step.seconds
        self.late_seconds += step.late
        if work is None:
            return
        self.worked_seconds += step.seconds
        if work.prefill:
            self.prefill += 1
        else:
            self.decode += 1
            self.decode_seconds += step.seconds
            self.slowest_decode = max(self.slowest_decode, step.seconds)
