"""Walks a Source in real time: sends what is due, and tells it what is done."""

import asyncio
import heapq
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from bench.live.client import Result, clock
from bench.workloads.base import Call, Source

MAX_FAILURES = 20
"""Failures one after another that mean that the server, not a request, is at fault."""


class DriveError(RuntimeError):
    """Too many requests failed; the message is for the person who started the run."""


class Done(msgspec.Struct):
    """A call and what became of it."""

    call: Call
    result: Result


class Drive:
    """One run of a source.

    ask: sends a call. scale: real seconds for one second of the workload; 0: nothing waits, calls
    are sent in the order of their times. on_done: called after each.
    """

    def __init__(
        self,
        source: Source,
        ask: Callable[[Call], Awaitable[Result]],
        scale: float = 1.0,
        on_done: Callable[[Done], None] = lambda done: None,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        self.source, self.ask, self.scale = source, ask, scale
        self.on_done, self.max_failures = on_done, max_failures
        self.begun = 0.0
        self.done: list[Done] = []
        self._starts: Iterator[tuple[float, Call]] = iter(())
        self._start: tuple[float, Call] | None = None
        self._heap: list[tuple[float, int, Call]] = []
        self._order = 0
        self._reached = 0.0
        """Greatest time of a call sent: the clock where the scale is 0."""
        self._open = 0
        """Calls sent and not yet taken from `_ended`."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: deque[Done | BaseException] = deque()
        self._wake = asyncio.Event()
        self._failures = 0

    async def run(self) -> list[Done]:
        """Every call, in the order of their ends. Raises DriveError."""
        self.begun = clock()
        self._starts = self.source.start()
        self._start = next(self._starts, None)
        try:
            while True:
                self._send_due()
                at = self._next_time()
                if at is None and not self._open:
                    return self.done
                await self._wait(at)
                while self._ended:
                    self._finish(self._ended.popleft())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def now(self) -> float:
        """Seconds of the workload."""
        return (clock() - self.begun) / self.scale if self.scale else self._reached

    def seconds(self) -> float:
        """Real ones, from the first request sent to the last answer."""
        results = [done.result for done in self.done]
        if not results:
            return 0.0
        return max(each.ended for each in results) - min(each.sent for each in results)

    def _next_time(self) -> float | None:
        times = [self._start[0]] if self._start else []
        times += [self._heap[0][0]] if self._heap else []
        return min(times, default=None)

    def _pop(self) -> tuple[float, Call]:
        start = self._start
        if start is not None and (not self._heap or start[0] <= self._heap[0][0]):
            self._start = next(self._starts, None)
            return start
        at, _, call = heapq.heappop(self._heap)
        return at, call

    def _send_due(self) -> None:
        while (at := self._next_time()) is not None and (not self.scale or at <= self.now()):
            at, call = self._pop()
            self._reached = max(self._reached, at)
            self._open += 1
            task = asyncio.create_task(self._one(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _one(self, call: Call) -> None:
        try:
            self._ended.append(Done(call, await self.ask(call)))
        except Exception as error:  # noqa: BLE001 - raised again by `run`
            self._ended.append(error)
        finally:
            self._wake.set()

    async def _wait(self, at: float | None) -> None:
        """Until a call ends or the next one is due."""
        timeout = None if at is None else max(0.0, (at - self.now()) * self.scale)
        try:
            await asyncio.wait_for(self._wake.wait(), timeout)
        except asyncio.TimeoutError:
            return
        self._wake.clear()

    def _finish(self, ended: Done | BaseException) -> None:
        self._open -= 1
        if isinstance(ended, BaseException):
            raise ended
        self.done.append(ended)
        self.on_done(ended)
        self._failures = self._failures + 1 if ended.result.error else 0
        if self._failures >= self.max_failures:
            raise DriveError(
                f"{self._failures} requests failed one after another; "
                f"the last: {ended.result.error}"
            )
        for at, call in self.source.done(ended.call, self.now()):
            self._order += 1
            heapq.heappush(self._heap, (at, self._order, call))
