"""Keeps the simulated ranks of a server in step, as DP attention does.

A step begins when every rank has said what it does, and lasts as long as the model says for all of
them together. It is a thread of the supervisor, which outlives the ranks. A rank that is gone is
waited for no more: its connection ends with its process, however that ends.
"""

import logging
import selectors
import socket
import threading
import time
from contextlib import suppress

import msgspec

from bench.model.steps import StepTimes, Work
from bench.simulated.pace import Doing, Hello, Idle, Step, Timeline, Verdict, Wake, encode

logger = logging.getLogger(__name__)

_read_word = msgspec.msgpack.Decoder(Hello | Doing).decode


class Round:
    """What the ranks have said of the next step; pure."""

    def __init__(self, times: StepTimes, scale: float) -> None:
        self.timeline = Timeline(scale)
        self._times = times
        self._ranks = 0
        self._joined = 0
        self._members: set[int] = set()
        self._works: dict[int, Work | None] = {}
        self._idle = False
        self._steps = 0

    def join(self, hello: Hello) -> None:
        self._ranks = hello.ranks
        self._joined += 1
        self._members.add(hello.rank)

    def leave(self, rank: int) -> None:
        self._members.discard(rank)
        self._works.pop(rank, None)

    def say(self, rank: int, work: Work | None) -> set[int]:
        """Returns the ranks to wake: the first word after all were idle concerns all."""
        self._works[rank] = work
        if not self._idle:
            return set()
        self._idle = False
        return self._members - self._works.keys()

    @property
    def complete(self) -> bool:
        """Whether every rank has come, and all that are left have spoken."""
        return (
            bool(self._members)
            and self._joined >= self._ranks
            and self._members <= self._works.keys()
        )

    def close(self, now: float) -> Step | Idle:
        """The verdict on a complete round; `timeline.ends` is when a step ends."""
        works = [self._works.get(rank) for rank in range(self._ranks)]
        self._works.clear()
        if not any(works):
            self._idle = True
            self.timeline.pause()
            return Idle()
        self._steps += 1
        seconds = self._times.seconds(works)
        return Step(self._steps, seconds, self.timeline.begin(seconds, now))


class Coordinator:
    """Listens at `path` from its making on; as a context manager it is started and stopped."""

    def __init__(self, path: str, times: StepTimes, scale: float) -> None:
        self._round = Round(times, scale)
        self._ranks: dict[int, socket.socket] = {}
        self._step: Step | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(128)
        self._stopped, self._stop = socket.socketpair()
        # select() waits with microseconds; epoll would add up to one millisecond to each step.
        self._selector = selectors.SelectSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def __enter__(self) -> "Coordinator":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._serve():
                self._advance(time.monotonic())
        except Exception:
            logger.exception("the simulated ranks are no longer kept in step")
        finally:
            # Ranks that wait learn from it that there is nobody to wait for.
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _serve(self) -> bool:
        """Hear the ranks until a step is over or some have spoken; False: stop."""
        wait = None
        if self._step is not None:
            assert self._round.timeline.ends is not None
            wait = max(0.0, self._round.timeline.ends - time.monotonic())
        for key, _ in self._selector.select(wait):
            if key.fileobj is self._stopped:
                return False
            if key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                self._selector.register(connection, selectors.EVENT_READ)
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._hear(key.fileobj, key.data)
        return True

    def _hear(self, connection: socket.socket, rank: int | None) -> None:
        data = b""
        with suppress(OSError):
            data = connection.recv(256)
        if not data:
            self._lose(connection, rank)
            return
        word = _read_word(data)
        if isinstance(word, Hello):
            self._selector.modify(connection, selectors.EVENT_READ, word.rank)
            self._ranks[word.rank] = connection
            self._round.join(word)
        elif rank is not None:
            self._tell(self._round.say(rank, word.work), Wake())

    def _advance(self, now: float) -> None:
        """End the step under way if it is time, then begin the next if all are ready."""
        ends = self._round.timeline.ends
        if self._step is not None and ends is not None and now >= ends:
            step, self._step = self._step, None
            self._tell(set(self._ranks), step)
        if self._step is None and self._round.complete:
            verdict = self._round.close(now)
            if isinstance(verdict, Step):
                self._step = verdict
            else:
                self._tell(set(self._ranks), verdict)

    def _tell(self, ranks: set[int], verdict: Verdict) -> None:
        data = encode(verdict)
        for rank in sorted(ranks):
            # A rank that has died is found when its connection is read.
            with suppress(OSError):
                self._ranks[rank].send(data)

    def _lose(self, connection: socket.socket, rank: int | None) -> None:
        self._selector.unregister(connection)
        connection.close()
        if rank is not None and self._ranks.get(rank) is connection:
            del self._ranks[rank]
            self._round.leave(rank)
