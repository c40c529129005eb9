"""Logging: one line an event, text or JSON; events that can repeat are rate-limited."""

import json
import logging
import re
import time
from collections.abc import Callable

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
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, form: str) -> None:
    """Log to standard error; called again on reload."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if form == "json"
        else TextFormatter("%(asctime)s %(levelname)s sglang-dp-sidecar: %(message)s")
    )
    logger.handlers[:] = [handler]
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
