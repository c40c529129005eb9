"""The sidecar's own policies: the very code that serves, fed with what the hook would send."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from xxhash import xxh3_64_intdigest

from bench.model.cluster import Cluster
from bench.model.server import Placement
from bench.workloads.base import Call
from sglang_hook.controller import LastRanks, SentCounters
from sglang_hook.recent import Recent
from sidecar import hashing, wire
from sidecar.budget import Budget
from sidecar.dispatcher import Dispatcher
from sidecar.loads import LoadView
from sidecar.policies import Choice, Policy
from sidecar.wire import LoadReport, Query, RequestFacts, Want

_NAME = "model"
_EPOCH = 1
_LAST_RANK_KEYS = 131_072  # the hook's default


class SidecarChooser:
    """Query -> Dispatcher -> rank, without sockets; load reports as the hook pushes them."""

    def __init__(self, cluster: Cluster, policy: Policy) -> None:
        self._cluster = cluster
        self._live = list(range(len(cluster.ranks)))
        self._policy = _Recorder(policy)
        self.dispatcher = Dispatcher(
            self._policy, Budget(stale_seconds=1e9, max_instances=1), _EPOCH, _raise
        )
        self._sent = SentCounters()
        self._last = LastRanks(_LAST_RANK_KEYS)
        self._reported: list[object] = [None] * len(self._live)
        self._recent = [Recent(wire.RECENT_SECONDS) for _ in self._live]
        self._uncached = [0] * len(self._live)
        self._delay = cluster.spec.report_delay_seconds
        self._on_the_way: deque[tuple[float, LoadReport]] = deque()
        self._seq = 0

    def choose(self, call: Call, now: float) -> Placement:
        self._report(now)
        self._seq += 1
        facts, affinity = self._facts(call, now)
        sent, sent_tokens = self._sent.of(self._live)
        query = Query(
            wire.VERSION, self._seq, _NAME, _EPOCH, self._live, sent, sent_tokens, [facts]
        )
        reply = self.dispatcher.handle(query, now)
        rank = reply.ranks[0]
        self._sent.count(rank, call.prompt_tokens)
        if affinity is not None:
            self._last.put(affinity, rank, now)
        # Every rank lives: positions are ids.
        return Placement(rank, reply.reasons[0], self._policy.last.preferred)

    def _report(self, now: float) -> None:
        """Deliver what the schedulers saw since the last query; of several reports the last."""
        cluster = self._cluster
        for rank, seen in enumerate(cluster.seen):
            at, load, received_tokens = cluster.snapshots[rank]
            if self._reported[rank] == (seen, at):
                continue
            self._reported[rank] = (seen, at)
            self._seq += 1
            bounds = (cluster.spec.rank.cache_tokens, cluster.spec.rank.max_running)
            counts = (seen.received, received_tokens, seen.running, seen.waiting)
            truth = (seen.prefilling, seen.admitted_tokens, seen.cached_tokens, 0)
            recent = int(self._lately(rank, seen.admitted_tokens - seen.cached_tokens, now))
            head = (wire.VERSION, _NAME, rank, _EPOCH, self._seq)
            report = LoadReport(
                *head, *counts, load.tokens, *bounds, load.waiting_uncached, *truth, recent
            )
            if not cluster.spec.cache_figures:
                report = LoadReport(*head, *counts, load.tokens, *bounds, load.waiting_uncached)
            self._on_the_way.append((now + self._delay, report))
        while self._on_the_way and self._on_the_way[0][0] <= now:
            self.dispatcher.report(self._on_the_way.popleft()[1], now)

    def _lately(self, rank: int, uncached: int, now: float) -> float:
        """Tokens that a rank computed lately; uncached: all that it computed so far."""
        recent = self._recent[rank]
        recent.add(uncached - self._uncached[rank], now)
        self._uncached[rank] = uncached
        return recent.value(now)

    def _facts(self, call: Call, now: float) -> tuple[RequestFacts, int | None]:
        """The facts that the hook would state, with hashes of pages in the place of tokens."""
        want = self._policy.want
        key = hashing.normalize_key(call.key)
        affinity = hashing.key_hash(key) if key else None
        prefix = None
        if want.prefix_tokens and (want.prefix_with_key or not key):
            prefix = prefix_of(call, want.prefix_tokens, self._cluster.spec.rank.page_tokens)
        blocks = []
        if want.block_tokens:
            blocks = blocks_of(
                call,
                hashing.block_ends(want.block_tokens, want.max_blocks, want.block_growth),
                self._cluster.spec.rank.page_tokens,
            )
        if affinity is None:
            affinity = prefix
        last = None if affinity is None else self._last.get(affinity)
        rank, age = (-1, -1) if last is None else (last[0], int((now - last[1]) * 1000))
        return RequestFacts(key, 0, call.prompt_tokens, prefix, blocks, rank, age), affinity


class _Recorder:
    """A policy that remembers its last choice: a reply does not say which rank was preferred."""

    name: ClassVar[str] = ""
    Params: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name = policy.name  # type: ignore[misc]
        self.want: Want = policy.want
        self.params = policy.params
        self.last = Choice(0, "")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)  # what a policy that learns has beyond `choose`

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        self.last = self.policy.choose(facts, view)
        return self.last


def prefix_of(call: Call, tokens: int, page_tokens: int) -> int:
    """Hash of a prompt's first `tokens` tokens: equal for equal leading pages."""
    short = call.prompt_tokens <= tokens
    pages = call.pages if short else call.pages[: max(1, tokens // page_tokens)]
    data = array("q", pages).tobytes() + (call.prompt_tokens if short else 0).to_bytes(8, "little")
    return xxh3_64_intdigest(data, hashing.PREFIX_SEED)


def blocks_of(call: Call, ends: Sequence[int], page_tokens: int) -> list[int]:
    """Chained block hashes with hashes of pages in the place of tokens.

    A block that ends within a page is that page's and how far it goes: what two prompts share of
    pages that differ is unknown, and taken for nothing.
    """
    pages = memoryview(array("q", call.pages)).cast("B")
    chained: list[int] = []
    seed, first = hashing.BLOCK_SEED, 0
    for end in ends:
        if end > call.prompt_tokens:
            break
        last = -(-end // page_tokens)
        part = (
            pages[8 * first : 8 * last]
            if end % page_tokens == 0
            else bytes(pages[8 * first : 8 * last]) + end.to_bytes(8, "little")
        )
        seed = xxh3_64_intdigest(part, seed)
        chained.append(seed)
        first = end // page_tokens
    return chained


def _raise(error: Exception) -> None:
    """A policy that fails must fail the bench, not be replaced by its fallback."""
    raise error
