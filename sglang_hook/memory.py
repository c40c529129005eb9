"""What the controller side of the hook remembers of its dispatches, each table bounded.

Nothing here asks anybody or decides anything. Times are monotonic seconds.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from msgspec import Struct

from sidecar.wire import Past, Reply, RequestFacts, Want

HISTORY_ENTRIES = 8192
"""Conversations whose last dispatch is kept; about 1.5 KB each with 128 block hashes."""
HISTORY_HASHES = HISTORY_ENTRIES * 128
"""Block hashes in all of these together, 8 bytes each: a sidecar may want 4,096 of each."""
# What one query tells of the past, so that it takes well under a millisecond to encode and the
# sidecar still answers within the deadline.
PART_ENTRIES = 128
HASHES_AN_ENTRY = 64


class LastRanks:
    """Least-recently-used table: affinity hash -> (rank, monotonic seconds), bounded."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._table: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def get(self, affinity: int) -> tuple[int, float] | None:
        return self._table.get(affinity)

    def put(self, affinity: int, rank: int, now: float) -> None:
        table = self._table
        table[affinity] = (rank, now)
        table.move_to_end(affinity)
        if len(table) > self.capacity:
            table.popitem(last=False)


class SentCounters:
    """Requests and prompt tokens sent to each rank by any path since the process started."""

    def __init__(self) -> None:
        self._requests: list[int] = []
        self._tokens: list[int] = []

    def count(self, rank: int, tokens: int) -> None:
        missing = rank + 1 - len(self._requests)
        if missing > 0:
            self._requests += [0] * missing
            self._tokens += [0] * missing
        self._requests[rank] += 1
        self._tokens[rank] += tokens

    def of(self, ranks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Requests and tokens of each of `ranks` (ascending ids); to be read, not kept."""
        if ranks and ranks[-1] >= len(self._requests):
            self._requests += [0] * (ranks[-1] + 1 - len(self._requests))
            self._tokens += [0] * (ranks[-1] + 1 - len(self._tokens))
        if len(ranks) == len(self._requests):
            return self._requests, self._tokens
        return [self._requests[rank] for rank in ranks], [self._tokens[rank] for rank in ranks]


class Entry(Struct, gc=False, eq=False):
    """The last dispatch of a conversation: the facts as they were, and where it went."""

    routing_key: bytes
    namespace: int
    tokens: int
    prefix_hash: int | None
    blocks: "array[int] | None"
    """Block hashes, typecode Q: a list of integers takes five times the memory."""
    want: Want
    """By which the hashes were made: those of another schedule would mean nothing."""
    rank: int
    at: float
    told: tuple[int, int] | None
    """Boot and policy version of the sidecar that knows of it; None: none does."""


class History:
    """Recent dispatches, one for each conversation, and which of them the sidecar must be told.

    Only a sidecar that answered the query before is told: a restarted one has then said what it
    wants, and a silent one costs nothing. An entry counts as told once the query that told it was
    answered by the sidecar and the policy that it was meant for.
    """

    def __init__(self, capacity: int = HISTORY_ENTRIES) -> None:
        self.capacity = capacity
        self.hashes = 0
        """Block hashes kept."""
        self._table: OrderedDict[int, Entry] = OrderedDict()
        self._untold: OrderedDict[int, None] = OrderedDict()
        """Conversations to tell, the newest last; at most as many as are wanted."""
        self._want = Want()
        self._peer: tuple[int, int] | None = None
        """Boot and policy version of the sidecar that answered last."""
        self._answering = False
        self._part = PART_ENTRIES
        """Most entries of a query: halved by each that is not answered in time."""
        self._telling: tuple[int, list[tuple[int, Entry]]] = (-1, [])
        """Sequence number of the last query that told something, and what."""

    def __len__(self) -> int:
        return len(self._table)

    def put(
        self,
        conversation: int,
        facts: RequestFacts,
        want: Want,
        rank: int,
        now: float,
        *,
        decided: bool,
    ) -> None:
        """Note a dispatch. want: what the facts were made by; decided: by the sidecar that
        answered last, which so knows of it."""
        blocks = array("Q", facts.block_hashes) if want.history else None
        entry = Entry(
            facts.routing_key,
            facts.namespace,
            facts.tokens,
            facts.prefix_hash,
            blocks,
            want,
            rank,
            now,
            self._peer if decided else None,
        )
        before = self._table.pop(conversation, None)
        self._table[conversation] = entry
        self.hashes += len(blocks or ()) - len((before and before.blocks) or ())
        if decided:
            self._untold.pop(conversation, None)
        else:
            self._owe(conversation)
        while len(self._table) > self.capacity or self.hashes > HISTORY_HASHES:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        conversation, entry = self._table.popitem(last=False)
        self.hashes -= len(entry.blocks or ())
        self._untold.pop(conversation, None)

    def part(self, seq: int, clock: Callable[[], float]) -> list[Past]:
        """What query `seq` tells of the past, the newest first."""
        if not self._untold or not self._answering:
            return []
        now = clock()
        told: list[Past] = []
        entries: list[tuple[int, Entry]] = []
        room = self._part * HASHES_AN_ENTRY
        for conversation in islice(reversed(self._untold), self._part):
            entry = self._table[conversation]
            past = self._past(entry, now)
            room -= len(past.facts.block_hashes)
            if room < 0 and told:
                break
            told.append(past)
            entries.append((conversation, entry))
        self._telling = (seq, entries)
        return told

    def withdraw(self) -> list[Past]:
        """The query under way had no room for it: it tells nothing."""
        self._telling = (-1, [])
        return []

    def heard(self, reply: Reply) -> None:
        """An answer came: to the query that told something, from a sidecar known or new."""
        seq, entries = self._telling
        peer = (reply.boot, reply.policy_version)
        if reply.seq == seq:
            self._telling = (-1, [])
            self._mark(entries)  # as told to the peer they were meant for, not to a new one
        wanted, self._want = self._want.history, reply.want
        if peer != self._peer or wanted != self._want.history:
            self._peer = peer
            self._owe_all()
        self._answering = True

    def missed(self) -> None:
        """A query was not answered. It may have told too much for the deadline."""
        if self._answering and self._telling[1]:
            self._part = max(1, self._part // 2)
        self._answering = False

    def _mark(self, entries: list[tuple[int, Entry]]) -> None:
        for conversation, entry in entries:
            # A later dispatch of the conversation is another entry, and not told by this.
            if self._table.get(conversation) is entry:
                entry.told = self._peer
                self._untold.pop(conversation, None)
        if self._answering:  # a late answer says nothing for a larger part
            self._part = min(PART_ENTRIES, 2 * self._part)

    def _owe(self, conversation: int) -> None:
        untold = self._untold
        untold[conversation] = None
        untold.move_to_end(conversation)
        if len(untold) > self._want.history:
            untold.popitem(last=False)

    def _owe_all(self) -> None:
        """A sidecar or policy that has not seen these: the newest, as many as it wants."""
        newest = (c for c, entry in reversed(self._table.items()) if entry.told != self._peer)
        wanted = list(islice(newest, self._want.history))
        self._untold = OrderedDict.fromkeys(reversed(wanted))

    def _past(self, entry: Entry, now: float) -> Past:
        want, then = self._want, entry.want
        prefix = entry.prefix_hash if then.prefix_tokens == want.prefix_tokens else None
        blocks: list[int] = []
        schedule = (want.block_tokens, want.block_growth)
        if entry.blocks and (then.block_tokens, then.block_growth) == schedule:
            blocks = entry.blocks[: want.max_blocks].tolist()
        facts = RequestFacts(entry.routing_key, entry.namespace, entry.tokens, prefix, blocks)
        return Past(facts, entry.rank, max(0, int((now - entry.at) * 1000)))
