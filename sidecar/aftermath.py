"""What is done with a decision once its reply is on its way: shadow, decision log, paths.

It waits in a bounded queue and is worked off in slices between queries. What does not fit is left
out and counted: nobody who only looks on may make a request wait.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from sidecar.dispatcher import Dispatcher
from sidecar.wire import LoadReport, Query, Reply

SLICE_NS = 100_000
"""Time for looking on before queries are looked for again: a fiftieth of the hook's deadline."""
MAX_REQUESTS = 16_384
MAX_BYTES = 32 << 20
"""What may wait: some seconds of a busy server."""


class Observer(Protocol):
    """Somebody who looks on."""

    def follow(self, query: Query, reply: Reply, now: float) -> Iterator[None]:
        """Take in a decision made at `now`, monotonic seconds; yields every 0.2 ms or so."""
        ...

    def report(self, report: LoadReport, now: float) -> None:
        """Take in a load report that came at `now`."""
        ...


class _Decided(NamedTuple):
    query: Query
    reply: Reply
    now: float
    size: int


Act = Callable[[], Iterator[None] | None]
_Item = _Decided | tuple[LoadReport, float] | Act


class Aftermath:
    """The queue, and who is told. on_error: told of each fault of an observer; on_skip:
    of requests that nobody will look at, as too much waits."""

    def __init__(
        self, on_error: Callable[[str, Exception], None], on_skip: Callable[[int], None]
    ) -> None:
        self.on_error = on_error
        self.on_skip = on_skip
        self.observers: dict[str, Observer] = {}
        self._waiting: deque[_Item] = deque()
        self._requests = self._bytes = 0
        self._work: Iterator[None] | None = None
        self._scheduled = False

    def decided(self, query: Query, reply: Reply, now: float, size: int) -> None:
        """A query was answered, maybe one without requests. size: its bytes."""
        if not self.observers:
            return
        requests = len(query.requests)
        if self._requests + requests > MAX_REQUESTS or self._bytes + size > MAX_BYTES:
            self.on_skip(requests)
            return
        self._requests += requests
        self._bytes += size
        self._waiting.append(_Decided(query, reply, now, size))
        self._soon()

    def reported(self, report: LoadReport, now: float) -> None:
        """A load report was taken in; in its turn, as a view is of the moment of a decision."""
        if not self.observers:
            return
        if len(self._waiting) < 4 * MAX_REQUESTS:
            self._waiting.append((report, now))
            self._soon()
        else:
            self.on_skip(0)

    def later(self, act: Act) -> None:
        """Do something in its turn: once all that was decided so far has been looked at.

        What takes long gives an iterator, and is done piece by piece.
        """
        self._waiting.append(act)
        self._soon()

    def drain(self) -> None:
        """Work everything off at once: for the end of the process."""
        while self._step():
            pass

    def _soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._slice)

    def _slice(self) -> None:
        until = time.perf_counter_ns() + SLICE_NS
        self._scheduled = False
        while self._step():
            if time.perf_counter_ns() >= until:
                self._soon()
                return

    def _step(self) -> bool:
        """Do a little; False if there is nothing left to do."""
        if self._work is None:
            if not self._waiting:
                return False
            self._work = self._all_of(self._waiting.popleft())
        if next(self._work, self) is self:
            self._work = None
        return True

    def _all_of(self, item: "_Item") -> Iterator[None]:
        """One item, to everyone."""
        if callable(item):
            try:
                yield from item() or ()
            except Exception as error:  # noqa: BLE001 - as below
                self.on_error("decision log", error)
            return
        if isinstance(item, _Decided):
            self._requests -= len(item.query.requests)
            self._bytes -= item.size
        for name, observer in list(self.observers.items()):
            try:
                if isinstance(item, _Decided):
                    yield from observer.follow(item.query, item.reply, item.now)
                else:
                    observer.report(*item)
            except Exception as error:  # noqa: BLE001 - one that fails must not stop the others
                self.on_error(name, error)
            yield


class ShadowSeat:
    """Lets the shadow follow, whichever it is at the time."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    def follow(self, query: Query, reply: Reply, now: float) -> Iterator[None]:
        """See Observer."""
        shadow = self.dispatcher.shadow
        return iter(()) if shadow is None else shadow.follow(query, reply, now)

    def report(self, report: LoadReport, now: float) -> None:
        """See Observer."""
        if self.dispatcher.shadow is not None:
            self.dispatcher.shadow.report(report, now)
