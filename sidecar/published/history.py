"""What a controller had sent to each rank a moment ago."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sidecar.wire import Query

SLOTS = 8
"""How finely the grace is divided: a request stays in flight for an eighth too long at most."""


class _Record(NamedTuple):
    """All that was sent by a moment, position by position."""

    at: float
    sent: list[int]
    tokens: list[int]


class SentHistory:
    """Counts of one controller over the last `grace` seconds; at most 2 * SLOTS + 3 records."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self._slot = grace / SLOTS
        self._epoch: int | None = None
        self._position: dict[int, int] = {}
        self._ranks: list[int] = []
        self._records: deque[_Record] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def note(self, query: Query, sent: Sequence[int], tokens: Sequence[int], now: float) -> None:
        """A query was answered at `now`; sent, tokens: with what it asked for."""
        if query.epoch != self._epoch or query.ranks != self._ranks:
            self._meet(query)
        records = self._records
        if records[-1].sent == sent:
            return
        if len(records) > 1 and now - records[-2].at < self._slot:
            records.pop()
        records.append(_Record(now, list(sent), list(tokens)))
        while len(records) > 1 and records[1].at <= now - self.grace:
            records.popleft()

    def before(self, rank: int, now: float) -> tuple[int, int] | None:
        """Requests and prompt tokens sent to the rank more than the grace before `now`.

        None: no controller has called the rank live.
        """
        at = self._position.get(rank)
        if at is None:
            return None
        records, until = self._records, now - self.grace
        then = next((record for record in reversed(records) if record.at <= until), records[0])
        latest = records[-1]
        # An answer that came too late was counted here and then sent elsewhere.
        return min(then.sent[at], latest.sent[at]), min(then.tokens[at], latest.tokens[at])

    def _meet(self, query: Query) -> None:
        """Another controller, of which all that it had sent is taken as received; or other ranks,
        which concerns those that are new."""
        same = query.epoch == self._epoch
        before = self._records if same else ()
        told = _Record(float("-inf"), list(query.sent), list(query.sent_tokens))
        old = [self._position.get(rank) if same else None for rank in query.ranks]
        self._records = deque(_reseated(record, old, told) for record in before) or deque([told])
        self._epoch, self._ranks = query.epoch, list(query.ranks)
        self._position = {rank: position for position, rank in enumerate(query.ranks)}


def _reseated(record: _Record, old: Sequence[int | None], told: _Record) -> _Record:
    """The record with its counts at other positions; old: where each was."""
    pick = zip(old, told.sent, told.tokens, strict=True)
    sent, tokens = [], []
    for at, now_sent, now_tokens in pick:
        sent.append(now_sent if at is None else record.sent[at])
        tokens.append(now_tokens if at is None else record.tokens[at])
    return _Record(record.at, sent, tokens)
