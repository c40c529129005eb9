"""What waits for the disk: one chunk at a time is written in a thread, the others wait, bounded."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sidecar.journal.disk import Chunk, Disk, LockedError, TooLargeError
from sidecar.logs import RateLimit
from sidecar.metrics import Health

RETRY_SECONDS = 10.0
"""Before the disk is tried again after an error."""
LOCKED_SECONDS = 0.25
"""Before the lock is tried again: a sidecar that is replaced lets go of it as it ends."""
CLOSE_SECONDS = 5.0
MAX_PENDING_BYTES = 8 << 20
"""Of records that wait: some ten seconds of a thousand decisions each."""


class Outbox:
    """Hands chunks to the disk. on_written: told of a chunk and the size of its file; on_lost:
    told why, and how many decisions were in what is given up."""

    def __init__(
        self,
        disk: Disk,
        health: Health,
        limit: RateLimit,
        on_written: Callable[[Chunk, int], None],
        on_lost: Callable[[str, int], None],
    ) -> None:
        self.disk = disk
        self.stuck = ""
        """Cause (`metrics.LOG_CAUSES`) while nothing can be written: `disk` or `locked`."""
        self.writing: asyncio.Future[int] | None = None
        self._health = health
        self._limit = limit
        self._on_written = on_written
        self._on_lost = on_lost
        self._waiting: deque[Chunk] = deque()
        self._bytes = 0
        self._retry: asyncio.TimerHandle | None = None
        self._pool = ThreadPoolExecutor(1, "decision-log")

    @property
    def closed_to(self) -> str:
        """Why nothing more is taken at present; "": it is."""
        if self.stuck == "disk" or self._bytes > MAX_PENDING_BYTES:
            return self.stuck or "slow"
        return ""

    def put(self, chunk: Chunk) -> None:
        """Take a chunk, to be written in its turn."""
        self._waiting.append(chunk)
        self._bytes += len(chunk.raw)
        self._next()

    async def close(self) -> None:
        """Write what waits, as far as the disk takes it, and let go of the directory."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while self.writing is not None and time.monotonic() < deadline:
            await asyncio.wait([self.writing], timeout=CLOSE_SECONDS)
            await asyncio.sleep(0)  # a callback looks after it, and begins the next
        if self._waiting:
            self._give_up(self.stuck or "slow", "")
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self.stuck = ""
        if self.writing is None:
            await asyncio.get_running_loop().run_in_executor(self._pool, self.disk.close)

    def _next(self) -> None:
        if self.stuck != "disk" and self.writing is None and self._waiting:
            loop = asyncio.get_running_loop()
            self.writing = loop.run_in_executor(self._pool, self.disk.write, self._waiting[0])
            self.writing.add_done_callback(self._done)

    def _done(self, done: "asyncio.Future[int]") -> None:
        self.writing = None
        error = done.exception()
        if isinstance(error, LockedError):
            self.stuck = "locked"
            self._warn(f"{error}; nothing is logged until it stops")
            self._again_in(LOCKED_SECONDS)
        elif error is not None:
            cause = "too_large" if isinstance(error, TooLargeError) else "disk"
            self._give_up(cause, getattr(error, "strerror", None) or str(error))
        else:
            self.stuck = ""
            chunk = self._waiting.popleft()
            self._bytes -= len(chunk.raw)
            self._health.log_records += chunk.requests
            self._health.log_bytes = self.disk.written
            self._on_written(chunk, done.result())
            self._next()

    def _give_up(self, cause: str, text: str) -> None:
        """Drop what waits. text: what happened; "": nothing that anybody needs to be told."""
        lost = sum(chunk.requests for chunk in self._waiting)
        self._waiting.clear()
        self._bytes = 0
        if cause == "disk":
            self.stuck = "disk"
            self._again_in(RETRY_SECONDS)
        self._on_lost(cause, lost)
        if text:
            again = f"; tried again in {RETRY_SECONDS:g} s" if cause == "disk" else ""
            self._warn(f"{text}: decisions are lost{again}")

    def _again_in(self, seconds: float) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(seconds, self._again)

    def _again(self) -> None:
        self._retry = None
        if self.stuck == "disk":
            self.stuck = ""
        self._next()

    def _warn(self, text: str) -> None:
        self._limit.warning("decision log", f"decision log in {self.disk.directory}: {text}")
