"""From what the client saw and a simulated server noted to the rows of an outcome."""

from pathlib import Path

from bench.live.drive import Done, Drive
from bench.outcome import Row, Sample
from sidecar.hashing import key_hash, normalize_key, preferred

_MIN_SAMPLES = 20
"""Of busy moments; fewer say nothing about a share."""


def make_rows(
    drive: Drive, unit: float, journal: dict[str, tuple[int, int]], homes: int
) -> list[Row]:
    """In the order of sending.

    unit: real seconds for one of the server's. homes: ranks over which keys have a preferred rank;
    0: the policy prefers none.
    """
    ordered = sorted(drive.done, key=lambda done: done.result.sent)
    return [_row(done, drive.begun, unit, journal, homes) for done in ordered]


def _row(
    done: Done, begun: float, unit: float, journal: dict[str, tuple[int, int]], homes: int
) -> Row:
    call, result, answer = done.call, done.result, done.result.answer
    rank, cached = journal.get(answer.request_id, (-1, -1))
    key = normalize_key(call.key) if homes else b""
    return Row(
        id=call.id,
        session=call.session,
        turn=call.turn,
        at=(result.sent - begun) / unit,
        rank=answer.rank if answer.rank >= 0 else rank,
        prompt_tokens=call.prompt_tokens if answer.error else answer.prompt_tokens,
        cached_tokens=answer.cached_tokens if answer.cached_tokens >= 0 else cached,
        output_tokens=max(0, answer.output_tokens),
        ttft_ms=max(0.0, result.first - result.sent) * 1e3 / unit,
        e2e_ms=(result.ended - result.sent) * 1e3 / unit,
        preferred=preferred(key_hash(key), range(homes)) if key else -1,
        error=answer.error,
    )


class Journal:
    """The part of a simulated server's journal that is written from now on."""

    def __init__(self, path: str) -> None:
        self.path = Path(path) if path else None
        self._from = self.path.stat().st_size if self.path and self.path.exists() else 0

    def read(self) -> dict[str, tuple[int, int]]:
        """Request id -> rank and cached tokens (-1: it does not say)."""
        found: dict[str, tuple[int, int]] = {}
        if self.path is None or not self.path.exists():
            return found
        with self.path.open(encoding="utf-8") as lines:
            lines.seek(self._from)
            for line in lines:
                request_id, rank, *rest = line.rstrip("\n").split("\t")
                found[request_id] = int(rank), int(rest[0]) if rest else -1
        return found


def idle_share(samples: list[Sample]) -> float | None:
    """Share of looked-at rank moments in which some rank held requests and this one did not."""
    busy = [sample.requests for sample in samples if any(sample.requests)]
    if len(busy) < _MIN_SAMPLES:
        return None
    return sum(loads.count(0) for loads in busy) / sum(map(len, busy))
