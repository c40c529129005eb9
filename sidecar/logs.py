"""Logging: one line an event, text or JSON; events that can repeat are rate-limited."""

import json
import logging
import os
import re
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

logger = logging.getLogger("sglang_dp_sidecar")


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class TextFormatter(logging.Formatter):
    """One line an event: what a peer sent cannot begin a line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """{"time", "level", "pid", "event"} in one line; "kind" and "held" (lines of that kind left out
    before it) where an event can repeat, "traceback" where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "pid": record.process,
            "event": record.getMessage(),
        }
        for field in ("kind", "held"):
            if hasattr(record, field):
                line[field] = getattr(record, field)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        # JSON itself escapes only what is below a blank: a terminal obeys others too.
        text = json.dumps(line, ensure_ascii=False)
        return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


if TYPE_CHECKING:
    _Stream = logging.StreamHandler[TextIO]
else:
    _Stream = logging.StreamHandler  # no type in brackets before Python 3.11


class StandardError(_Stream):
    """Waits for nobody: what has no room (a pipe that is not read, a terminal that was halted, a
    full disk) is left out, and the next line that has room says how many were."""

    def __init__(self) -> None:
        super().__init__()
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            descriptor = self.stream.fileno()
        except (AttributeError, ValueError, OSError):  # closed, or not a file: in memory
            super().emit(record)
            return
        left_out = self._left_out
        if left_out:
            told = f"{left_out} log lines left out: standard error could not be written"
            gap = logging.LogRecord(record.name, logging.WARNING, "", 0, told, None, None)
            self._left_out = 0 if _written(descriptor, self.format(gap)) else left_out
        if self._left_out or not _written(descriptor, self.format(record)):
            self._left_out += 1


def _written(descriptor: int, line: str) -> bool:
    """Write a line if and as far as that needs no waiting; whether all of it was written."""
    data = (line + "\n").encode(errors="backslashreplace")
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    try:
        while data:
            # Linux calls a pipe writable while it has room for PIPE_BUF bytes.
            if not poll.poll(0):
                return False
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]
    except OSError:
        return False
    return True


def configure(level: str, form: str) -> None:
    """Log to standard error; called again on reload."""
    handler = StandardError()
    handler.setFormatter(
        JsonFormatter()
        if form == "json"
        else TextFormatter("%(asctime)s %(levelname)s sglang-dp-sidecar: %(message)s")
    )
    logger.handlers[:] = [handler]
    logging.lastResort = handler  # of asyncio, which would wait
    logger.setLevel(level.upper())
    logger.propagate = False


class RateLimit:
    """At most one line a period for each kind of event; the next says how many were left out."""

    def __init__(self, period: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.period = period
        self.clock = clock
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def warning(self, kind: str, text: str) -> None:
        """Log `text`, unless an event of this kind was logged within the period."""
        now = self.clock()
        if now - self._last.get(kind, -self.period) < self.period:
            self._held[kind] = self._held.get(kind, 0) + 1
            return
        self._last[kind] = now
        held = self._held.pop(kind, 0)
        more = f" ({held} more like it not shown)" if held else ""
        logger.warning("%s%s", text, more, extra={"kind": kind, "held": held})
