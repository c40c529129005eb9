"""A dispatcher that notes what happens to it, and logs made of that."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidecar.budget import Budget
from sidecar.dispatcher import Dispatcher
from sidecar.journal.disk import Disk, prepare
from sidecar.journal.playback import Maker, Playback
from sidecar.journal.reader import Reader
from sidecar.journal.record import State
from sidecar.journal.seal import Seal
from sidecar.journal.state import Origin, state_of
from sidecar.journal.writer import Journal
from sidecar.logs import RateLimit
from sidecar.metrics import Health
from sidecar.policies import make_policy
from sidecar.wire import LoadReport, Query, Reply
from tests.support import BOOT, STALE_SECONDS

MAX_INSTANCES = 4
MEGABYTE = 1 << 20
Act = Callable[[Journal], Any]


class Noted(Dispatcher):
    """Notes every event in the order in which it happens."""

    def __init__(self, policy: str = "kv_affinity", boot: int = BOOT, **params: Any) -> None:
        budget = Budget(STALE_SECONDS, MAX_INSTANCES)
        super().__init__(make_policy(policy, params), budget, boot)
        self.first = state_of(self)
        self.now = 0.0
        self.acts: list[Act] = []
        self.replies: list[Reply] = []

    def handle(self, query: Query, now: float) -> Reply:
        reply = super().handle(query, now)
        self.now = now
        self.replies.append(reply)
        self.acts.append(lambda journal: list(journal.follow(query, reply, now)))
        return reply

    def report(self, report: LoadReport, now: float) -> None:
        super().report(report, now)
        self.now = now
        self.acts.append(lambda journal: journal.report(report, now))

    def note(self, what: str) -> None:
        """The policies have just changed."""
        state, now = state_of(self), self.now
        self.acts.append(lambda journal: journal.changed(what, state, now))


def journal_in(
    directory: Path, first: State, *, boot: int = BOOT, max_bytes: int = MEGABYTE
) -> Journal:
    secret = prepare(str(directory))
    disk = Disk(str(directory), boot, max_bytes)
    origin = Origin(boot, STALE_SECONDS, MAX_INSTANCES)
    return Journal(disk, Seal(secret), origin, first, Health(), RateLimit())


def write(directory: Path, noted: Noted, *, boot: int = BOOT, max_bytes: int = MEGABYTE) -> Journal:
    """Write what was noted; the journal is closed."""

    async def all_of_it() -> Journal:
        journal = journal_in(directory, noted.first, boot=boot, max_bytes=max_bytes)
        await feed(journal, noted.acts)
        await journal.close()
        return journal

    return asyncio.run(all_of_it())


async def feed(journal: Journal, acts: Iterable[Act]) -> None:
    for act in acts:
        act(journal)
        if journal.outbox.writing is not None:
            await asyncio.wait([journal.outbox.writing])
            await asyncio.sleep(0)


@dataclass
class Replayed:
    """What a playback of a log said."""

    ranks: list[list[int]] = field(default_factory=list)
    reasons: list[list[str]] = field(default_factory=list)
    logged: list[list[int]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)


def replay(directory: Path) -> Replayed:
    found = Replayed()
    reader = Reader([str(directory)], warn=found.warnings.append)
    playback = Playback(Maker(reader.seal), found.errors.append)
    for event in reader.events():
        reply = playback.play(event)
        if reply is not None:
            found.ranks.append(reply.ranks)
            found.reasons.append(reply.reasons)
            found.logged.append(event.ranks)  # type: ignore[union-attr]
    return found
