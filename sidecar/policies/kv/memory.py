"""What `kv_affinity` knows of one SGLang instance; every part can be told again after a restart."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice

from sidecar.loads import LoadView
from sidecar.policies.kv.clock import SpanClock
from sidecar.policies.kv.costs import Costs
from sidecar.policies.kv.engine import Engine, PrefillRate
from sidecar.policies.kv.footprint import Footprint
from sidecar.policies.kv.index import NODE_WEIGHT, PrefixIndex
from sidecar.policies.kv.queue import LATE_SECONDS, PrefillQueue, Sent
from sidecar.wire import MAX_RANKS, LoadReport, RequestFacts

MAX_WEIGHT = 1 << 22
"""Bound of the index (see there), in hashes of 8 bytes: 32 MiB."""
LATE_REFRESH_SECONDS = 0.02
LATE_AT_ONCE = 32
"""How often, and for how many ranks at a time, what late reports leave open is guessed anew: all of
320 ranks would take longer than a hook waits."""
SPAN_SECONDS = 1.0
"""How finely the times of uses are told apart; a cache evicts by them. A rank prefills some ten
thousand tokens in that time, one percent of its cache."""


class RankMemory:
    """What is known of one rank."""

    __slots__ = ("emptied_at", "engine", "footprint", "queue")

    def __init__(self, footprint: Footprint) -> None:
        self.footprint = footprint
        self.queue = PrefillQueue()
        self.engine = Engine()
        self.emptied_at = float("-inf")
        """When its cache was seen to be emptied last, monotonic seconds."""

    def waiting(self, view: LoadView, position: int, rate: float) -> float:
        """Tokens that wait for prefill on it, the rest of a chunked prompt included."""
        unknown = self.queue.shrink(view.queued[position])
        base = view.prefilling[position] + unknown * self.engine.typical_uncached
        in_flight = view.in_flight[position]
        return self.queue.drained(base, in_flight, rate, self.engine.credit, view.now)

    @property
    def recent_uncached(self) -> int:
        """Prompt tokens that it computed lately, as the engine says."""
        report = self.engine.report
        return report.recent_uncached_tokens if report is not None else 0


class Memory:
    """Ranks, and the index over their caches.

    ends: tokens up to the end of each prefix block. recent_seconds: how long what was used is
    taken for active.
    """

    def __init__(self, ends: Sequence[int], recent_seconds: float, costs: Costs) -> None:
        self.clock = SpanClock(SPAN_SECONDS)
        self._recent_seconds = recent_seconds
        self._since = 0
        """The span with which the recent past begins."""
        self.ranks: dict[int, RankMemory] = {}
        self._footprints: dict[int, Footprint] = {}
        self.index = PrefixIndex(ends, self._footprints, MAX_WEIGHT)
        self.rate = PrefillRate()
        self.costs = costs
        self._dirty: set[int] = set()
        """Ranks whose costs have changed."""
        self._flying: dict[int, None] = {}
        """Ranks with requests in flight: their costs change with time once these are late. The one
        updated last is last."""
        self._late_from = float("inf")
        """When they are updated next."""
        self.late_refresh = LATE_REFRESH_SECONDS
        self._last: tuple[RequestFacts | None, dict[int, int]] = (None, {})
        """What was looked up last."""

    def rank(self, rank: int) -> RankMemory:
        """What is known of a rank; made if new."""
        found = self.ranks.get(rank)
        if found is None:
            footprint = self._footprints[rank] = Footprint(0, 0, self._since)
            found = self.ranks[rank] = RankMemory(footprint)
        return found

    def taken_apart(self) -> Iterator[None]:
        """Free it piece by piece: all of it at once takes longer than a hook waits."""
        return self.index.taken_apart()

    def look(self, view: LoadView) -> None:
        """Bring the costs up to date for a decision on `view`."""
        self.catch_up(view)
        late = view.now >= self._late_from
        if late:
            self._late_from = float("inf")
            for rank_id in list(islice(self._flying, LATE_AT_ONCE)):
                del self._flying[rank_id]
                self._dirty.add(rank_id)
            if self._flying:
                self._late_from = view.now
        if not self._dirty and not view.changed:
            return
        ranks, rate, position = view.ranks, self.rate.value, view.position
        stale = view.changed | {position[r] for r in self._dirty if r in position}
        if len(self.costs.serving) != len(ranks):
            self.costs.resize(len(ranks))
            stale = set(range(len(ranks)))
        view.changed.clear()
        self._dirty.clear()
        for at in stale:
            rank = self.ranks.get(ranks[at]) or self.rank(ranks[at])
            self.costs.update(at, rank, view, rate)
            self._flying.pop(ranks[at], None)
            if view.in_flight[at]:
                self._flying[ranks[at]] = None
                since = rank.queue.since(view.in_flight[at])
                self._late_from = min(self._late_from, since + LATE_SECONDS)
        if late:
            self._late_from = max(self._late_from, view.now + self.late_refresh)

    def catch_up(self, view: LoadView) -> None:
        """Note the time, and what was retracted: before anything new is noted."""
        self._advance(view.now)
        if view.retracted:
            self._retract(view)

    def _retract(self, view: LoadView) -> None:
        """What we sent to a rank and the hook did not: it had decided by itself meanwhile."""
        for position, requests in view.retracted.items():
            self.rank(view.ranks[position]).queue.retract(requests)
            self._dirty.add(view.ranks[position])
        view.retracted.clear()

    def held(self, facts: RequestFacts) -> dict[int, float]:
        """Rank id -> leading prompt tokens that it is expected to find in its cache; no zeros."""
        ranks = self.ranks
        found = self.index.held(self._blocks(facts), facts.tokens)
        self._last = (facts, found)
        return {rank: tokens * ranks[rank].engine.credit for rank, tokens in found.items()}

    def expected(self, facts: RequestFacts, view: LoadView) -> dict[int, float]:
        """As `held`; of what was looked up last without looking again."""
        last, found = self._last
        if last is not facts:
            self.look(view)  # another policy has decided
            return self.held(facts)
        ranks = self.ranks
        return {rank: tokens * ranks[rank].engine.credit for rank, tokens in found.items()}

    def goes_on(self, facts: RequestFacts) -> bool:
        """Whether a prompt goes on where one earlier prompt ended (PrefixIndex.goes_on)."""
        return self.index.goes_on(self._blocks(facts))

    def _blocks(self, facts: RequestFacts) -> list[int]:
        """A prompt has no more blocks than tokens for them, whatever its sender says."""
        blocks = facts.block_hashes
        whole = bisect_right(self.index.ends, facts.tokens)
        return blocks if len(blocks) <= whole else blocks[:whole]

    def emptied_since(self, facts: RequestFacts, now: float) -> bool:
        """Whether the cache of a key's last rank was emptied after the key was there last."""
        return now - facts.last_age_ms / 1000 < self.rank(facts.last_rank).emptied_at

    def told(self, facts: RequestFacts, rank: int, at: float, view: LoadView) -> None:
        """A request went to a rank at time `at`, in the past; the newest are told first."""
        # What is older than what fills the index would only push that out.
        self._advance(view.now)
        full = self.index.weight + len(facts.block_hashes) + NODE_WEIGHT > self.index.limit
        if rank in view.position and not full:
            self._use(facts, rank, at)

    def _use(self, facts: RequestFacts, rank: int, at: float) -> None:
        self.rank(rank)
        self._dirty.add(rank)
        self._dirty |= self.index.use(self._blocks(facts), facts.tokens, rank, self.clock.at(at))

    def sent(self, facts: RequestFacts, rank: int, now: float) -> None:
        """A request goes to a rank now, and waits there."""
        tokens = facts.tokens
        last, found = self._last
        if last is not facts:
            found = self.index.held(self._blocks(facts), tokens)
        self._last = (None, {})
        cached = found.get(rank, 0)
        # The last token is always computed: its output is the first of the answer.
        cached = min(cached, tokens - 1) if tokens else 0
        self.rank(rank).queue.add(Sent(cached, tokens - cached, now))
        self._use(facts, rank, now)

    def heard(self, report: LoadReport, view: LoadView, now: float) -> None:
        """Take in the engine's word."""
        known = report.rank in self.ranks or report.rank in view.position
        if not known and len(self.ranks) >= MAX_RANKS:
            return  # a rank that no controller calls live must not take the memory of those
        rank = self.rank(report.rank)
        self._dirty.add(report.rank)
        position = view.position.get(report.rank)
        if position is not None:
            rank.queue.shrink(view.queued[position])
        self._advance(now)
        if rank.engine.emptied(report):
            self.clock.cut(now)
            self._age(now)
            rank.footprint.clear(self.clock.span)
            rank.emptied_at = rank.engine.emptied_at(report, now)
        rank.footprint.capacity = report.capacity_tokens
        rank.engine.heard(report, rank.queue.left, now, self.rate)
        rank.queue.left = 0
        if isinstance(view.witness, Memory):
            rank.engine.credit = view.witness.rank(report.rank).engine.credit

    def _advance(self, now: float) -> None:
        first = self.clock.span == 0
        if first:
            self.clock.begin(now)
        if self.clock.advance(now) or first:
            self._age(now)

    def _age(self, now: float) -> None:
        since = self.clock.at(now - self._recent_seconds)
        if since == self._since:
            return
        self._since = since
        for footprint in self._footprints.values():
            footprint.age(self._since)
        self._dirty.update(self.ranks)
