"""Keeps the decision log beside a running sidecar: encodes in slices, writes in a thread.

Nothing here may hold up a decision: what the disk cannot take in time, or at all, is left out,
counted, and marked in the log, so that whoever replays it knows.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sidecar import __version__
from sidecar.canary import takes
from sidecar.config import Config
from sidecar.dispatcher import Dispatcher
from sidecar.journal.disk import Chunk, Disk, prepare
from sidecar.journal.encoder import Encoder
from sidecar.journal.outbox import Outbox
from sidecar.journal.record import (
    CHUNK_BYTES,
    LENGTH,
    PART,
    Changed,
    Decided,
    Forget,
    Gap,
    Head,
    Part,
    State,
    encode,
)
from sidecar.journal.seal import Seal
from sidecar.journal.state import Origin, state_of
from sidecar.logs import RateLimit
from sidecar.metrics import Health
from sidecar.wire import LoadReport, Past, Query, Reply, RequestFacts

FLUSH_SECONDS = 1.0
"""Longest time that a record waits for others before it is written."""
MAX_RANKS = 4096
"""Ranks whose last report is kept for the head of the next file."""


def journal_of(
    config: Config, dispatcher: Dispatcher, health: Health, limit: RateLimit
) -> "Journal":
    """The decision log that the settings ask for. Raises ConfigError."""
    secret = prepare(config.decision_log.directory)
    serve = config.serve
    origin = Origin(dispatcher.boot, serve.stale_seconds, serve.max_instances)
    max_bytes = config.decision_log.max_megabytes << 20
    disk = Disk(config.decision_log.directory, dispatcher.boot, max_bytes)
    return Journal(disk, Seal(secret), origin, state_of(dispatcher), health, limit)


class Journal:
    """An observer (`aftermath.Observer`) that writes what it sees."""

    state_of = staticmethod(state_of)

    def __init__(
        self,
        disk: Disk,
        seal: Seal,
        origin: Origin,
        state: State,
        health: Health,
        limit: RateLimit,
    ) -> None:
        self.seal = seal
        self.health = health
        self.outbox = Outbox(disk, health, limit, self._written, self._given_up)
        self._origin = origin
        self._state = state
        self._heard: dict[tuple[str, int], tuple[float, LoadReport]] = {}
        self._encoder: Encoder | None = None
        """Of the file that is written; None: the next record begins one."""
        self._file = 0
        self._rotate = False
        self._number = 0
        """Of the next decision."""
        self._lost: dict[str, int] = {}
        """Cause -> decisions that are to be marked as missing."""
        self._buffer = bytearray()
        self._buffered = 0
        """Decisions in it."""
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, query: Query, reply: Reply, now: float) -> Iterator[None]:
        """See Observer."""
        encoder = self._ready(now, len(query.requests))
        if encoder is None:
            return
        history, requests = query.history, query.requests
        while len(history) + len(requests) > PART:
            part = Part([], [])
            room = max(0, PART - len(history))
            yield from self._say(encoder, part, history[:PART], requests[:room])
            history, requests = history[PART:], requests[room:]
            if not self._put(encoder, part):
                self._lose("disk", len(query.requests))
                return
            self._forget(encoder)
        canary = self._by_canary(query.requests)
        last = Part([], [])
        yield from self._say(encoder, last, history, requests)
        if self._encoder is not encoder:
            self._lose("disk", len(query.requests))
            return
        decided: Decided = encoder.decided(query, reply, now, canary)
        decided.history, decided.requests = last.history, last.requests
        self._number += len(query.requests)
        self._buffered += len(query.requests)
        self._put(encoder, decided)
        self._forget(encoder)

    def report(self, report: LoadReport, now: float) -> None:
        """See Observer."""
        encoder = self._ready(now, 0)
        if encoder is not None:
            self._put(encoder, encoder.reported(report, now))
        slot = report.instance, report.rank
        self._heard.pop(slot, None)
        self._heard[slot] = now, report
        if len(self._heard) > MAX_RANKS:
            del self._heard[next(iter(self._heard))]

    def changed(self, what: str, state: State, now: float) -> None:
        """The policies changed, in its turn among the decisions."""
        self._state = state
        encoder = self._ready(now, 0)
        if encoder is not None:
            self._put(encoder, Changed(encoder.at(now), what, state))

    def skipped(self, requests: int) -> None:
        """So many decisions never came here, as too much waited; 0: a report did not."""
        self._lose("lagging", requests)

    async def close(self) -> None:
        """Write what is there, and let go of the directory; the next record takes it again."""
        self._flush()
        await self.outbox.close()
        self._encoder = None

    def _ready(self, now: float, requests: int) -> Encoder | None:
        """Whom to encode with; None: so many decisions are left out."""
        if self.outbox.closed_to:
            self._lose(self.outbox.closed_to, requests)
            return None
        if self._rotate:
            self._rotate = False
            self._flush()
            self._encoder = None
        encoder = self._encoder
        if encoder is None:
            encoder = self._begin(now)
        if self._lost:
            for cause, lost in self._lost.items():
                self._number += lost
                self._put(encoder, Gap(encoder.at(now), lost, cause))
            self._lost = {}
        return encoder

    def _begin(self, now: float) -> Encoder:
        self._file += 1
        encoder = self._encoder = Encoder(self.seal)
        origin = self._origin
        whole = self._file == 1 and not (self._number or self._lost or self._heard)
        head = Head(
            __version__,
            origin.boot,
            origin.stale_seconds,
            origin.max_instances,
            self.seal.name,
            time.time() - (time.monotonic() - now),
            now,
            self._number,
            whole,
            self._state,
            list(self._heard.values()),
        )
        self._put(encoder, head)
        return encoder

    def _say(
        self,
        encoder: Encoder,
        part: Part,
        history: Sequence[Past],
        requests: Sequence[RequestFacts],
    ) -> Iterator[None]:
        for past in history:
            part.history.append(encoder.told(past))
            yield  # 128 blocks that are new take 0.15 ms
        for facts in requests:
            part.requests.append(encoder.said(facts))
            yield

    def _by_canary(self, requests: Sequence[RequestFacts]) -> list[int]:
        share = self._state.share if self._state.canary else 0.0
        return [n for n, facts in enumerate(requests) if share and takes(facts, share)]

    def _forget(self, encoder: Encoder) -> None:
        if encoder.full:
            encoder.forget()
            self._put(encoder, Forget())

    def _put(self, encoder: Encoder, record: Any) -> bool:
        """Add a record; False if its file has been given up meanwhile."""
        if self._encoder is not encoder:
            return False
        data = encode(record)
        self._buffer += LENGTH.pack(len(data)) + data
        if len(self._buffer) >= CHUNK_BYTES:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)
        return True

    def _flush(self) -> None:
        """Hand over what there is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._buffer:
            chunk = Chunk(self._file, bytes(self._buffer), self._buffered)
            self._buffer, self._buffered = bytearray(), 0
            self.outbox.put(chunk)

    def _written(self, chunk: Chunk, size: int) -> None:
        if chunk.file == self._file and size >= self.outbox.disk.file_bytes:
            self._rotate = True

    def _given_up(self, cause: str, lost: int) -> None:
        """Give up the file too: what would follow in it makes no sense."""
        lost += self._buffered
        self._buffer, self._buffered = bytearray(), 0
        self._encoder = None
        self._number -= lost
        self._lose(cause, lost)

    def _lose(self, cause: str, requests: int) -> None:
        self._lost[cause] = self._lost.get(cause, 0) + requests
        self.health.log_dropped[cause] += requests
