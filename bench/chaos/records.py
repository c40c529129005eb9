"""What a controller notes of each request; a file that others read while it grows."""

import os
import struct
from pathlib import Path
from typing import NamedTuple

_ROW = struct.Struct("<ddddqiiB")
CAUSES = (
    "",
    *("deadline", "breaker_open", "unreachable", "handshake", "mismatched", "malformed"),
    *("version", "refused", "invalid_rank", "no_live_rank", "oversized", "other", "exception"),
)
"""Why the hook decided alone; the first: it did not."""
KEYLESS = -1


class Record(NamedTuple):
    """One request."""

    at: float
    """Monotonic seconds, when its dispatch began."""
    seconds: float
    """Wall clock of the dispatch."""
    waited: float
    """Of these, seconds that the kernel kept a thread waiting that could run."""
    live: float
    """Bit r is set if rank r was live."""
    boot: int
    """Start of the sidecar that decided; 0: the hook decided alone."""
    session: int
    """KEYLESS: it had no routing key."""
    rank: int
    """-1: left to SGLang's own method."""
    cause: str

    @property
    def lost(self) -> bool:
        """Whether a rank was owed and not given, or dispatch raised."""
        owed = self.session != KEYLESS and self.live > 0
        return self.cause == "exception" or (owed and self.rank < 0)

    @property
    def own_seconds(self) -> float:
        """Of the dispatch, less what the kernel kept it waiting for a core."""
        return self.seconds - self.waited

    def pack(self) -> bytes:
        cause = self.cause if self.cause in CAUSES else "other"
        return _ROW.pack(*self[:-1], CAUSES.index(cause))


class Reader:
    """The records of a growing file, kept."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._offset = 0
        self.records: list[Record] = []

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self) -> list[Record]:
        """All records until now."""
        while data := os.pread(self._descriptor, _ROW.size * 4096, self._offset):
            whole = len(data) // _ROW.size * _ROW.size
            for row in _ROW.iter_unpack(data[:whole]):
                self.records.append(Record._make([*row[:-1], CAUSES[row[-1]]]))
            self._offset += whole
            if whole < len(data):
                break
        return self.records
