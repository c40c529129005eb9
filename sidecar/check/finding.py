"""One line of `check`."""

from typing import Any, Literal

import msgspec

Level = Literal["ok", "note", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """What was found. `problem`: it will not work; `warning`: it will, but read this; `note`: only
    to know."""

    level: Level
    what: str
    fix: str = ""
    """What to do; empty where there is nothing to do."""

    def __str__(self) -> str:
        line = f"{self.level:8} {self.what}" + (f" -> {self.fix}" if self.fix else "")
        # What a file or a variable holds must not begin a line of its own.
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"level": self.level, "what": self.what, "fix": self.fix}


def ok(what: str) -> Finding:
    return Finding("ok", what)


def note(what: str, fix: str = "") -> Finding:
    return Finding("note", what, fix)


def warning(what: str, fix: str) -> Finding:
    return Finding("warning", what, fix)


def problem(what: str, fix: str) -> Finding:
    return Finding("problem", what, fix)
