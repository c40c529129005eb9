"""What a log covers: counted while its events pass by."""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, TextIO

from sidecar.journal.decoder import Began, Decision, Event, Missing, Report
from sidecar.journal.reader import Reader
from sidecar.journal.record import Head, LogError

PROGRESS_SECONDS = 2.0


def name_of(decision: Decision, index: int = 0) -> str:
    """What a request is called: start of its sidecar in seconds since 1970, and its number."""
    return f"{decision.boot // 10**9}-{decision.number + index}"


def utc(seconds: float) -> str:
    """A moment, in seconds since 1970, for people."""
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d} UTC"


class Account:
    """Passes the events of a log on and counts them."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.head: Head | None = None
        """Of the file that is read."""
        self.files = self.starts = self.decisions = self.queries = self.reports = 0
        self.gaps: Counter[str] = Counter()
        """Cause -> decisions that are missing."""
        self.sealed = False
        self.whole = True
        """Whether the log begins with the start of a sidecar and lacks nothing."""
        self.begins_whole = True
        self._times: list[float] = []
        self._boot = 0
        self._next = 0

    def events(self) -> Iterator[Event]:
        """Every event. Raises LogError if there is none."""
        for event in self._reader.events():
            if isinstance(event, Began):
                self._begin(event)
            elif isinstance(event, Decision):
                self.queries += 1
                self.decisions += len(event.query.requests)
                self._next = event.number + len(event.query.requests)
                self._at(event.now)
            elif isinstance(event, Report):
                self.reports += 1
                self._at(event.now)
            elif isinstance(event, Missing):
                self.whole = False
                self.gaps[event.cause] += event.requests
                self._next += event.requests
            yield event
        if self.head is None:
            raise LogError("the log holds nothing that can be read")

    def wall(self, now: float) -> float:
        """Seconds since 1970 of a moment in the file that is read."""
        return now if self.head is None else self.head.wall + now - self.head.now

    def told(self) -> dict[str, Any]:
        """As it is shown."""
        first, last = (self._times[0], self._times[-1]) if self._times else (0.0, 0.0)
        return {
            "files": self.files,
            "begins": utc(first),
            "ends": utc(last),
            "seconds": round(last - first, 3),
            "starts": self.starts,
            "queries": self.queries,
            "decisions": self.decisions,
            "load_reports": self.reports,
            "missing": dict(self.gaps),
            "whole": self.whole,
        }

    def _begin(self, event: Began) -> None:
        head = event.head
        self.files += 1
        self.sealed |= event.sealed
        if head.boot != self._boot:
            self.starts += 1
            if not head.whole:
                self.whole = False
                self.begins_whole = self.begins_whole and self.files > 1
        elif head.first != self._next:
            self.whole = False
            self.gaps["between files"] += max(0, head.first - self._next)
        self.head, self._boot, self._next = head, head.boot, head.first

    def _at(self, now: float) -> None:
        self._times = [*self._times[:1], self.wall(now)]


class Progress:
    """A line on a terminal, or now and then in a file, while a long log is read."""

    def __init__(self, verb: str, stream: TextIO = sys.stderr) -> None:
        self._verb = verb
        self._stream = stream
        self._next = time.monotonic() + PROGRESS_SECONDS
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        terminal = self._stream.isatty()
        self._next = now + (PROGRESS_SECONDS if terminal else 5 * PROGRESS_SECONDS)
        text = f"{self._verb}: {done >> 20} of {total >> 20} MiB read"
        self._stream.write(f"\r{text}" if terminal else f"{text}\n")
        self._stream.flush()
        self._shown = terminal

    def end(self) -> None:
        """Leave the line, if one was begun."""
        if self._shown:
            self._stream.write("\n")
