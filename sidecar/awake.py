"""Notices that this process did not run for a while: stopped, swapped out, without a core."""

import asyncio
import time
from collections.abc import Callable

TICK_SECONDS = 0.1
SLEPT_SECONDS = 0.3
"""What is read after such a time may be as old. Less, and a slow scrape would count as sleep."""


class Awake:
    """Ticks from `start` to `stop`. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._slept = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.slept()
        self._slept = False
        self._timer = loop.call_later(TICK_SECONDS, self._tick, loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def slept(self) -> bool:
        """Whether it did not run for SLEPT_SECONDS at a time since this was last asked."""
        self._look()
        slept, self._slept = self._slept, False
        return slept

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._look()
        self._timer = loop.call_later(TICK_SECONDS, self._tick, loop)

    def _look(self) -> None:
        now = self._clock()
        self._slept = self._slept or now - self._last > SLEPT_SECONDS
        self._last = now
