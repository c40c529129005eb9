"""All ranks of one server in virtual time: who dispatches sees what SGLang's controller would.

Ranks step together under DP attention (one group), each on its own in plain DP (a group a rank).
Steps in which nothing changes (the same requests decode, a long prompt goes on in chunks) are taken
in one jump, which an arrival cuts short.
"""

import heapq
from collections.abc import Callable
from typing import Any

from bench.model.radix import RadixCache
from bench.model.rank import Rank
from bench.model.request import Load, Request
from bench.model.server import Chooser, Group, Seen, ServerSpec, Snapshot
from bench.model.steps import StepTimes, Work
from bench.outcome import Row, Sample
from bench.workloads.base import Call, Source

# Decode steps between two load snapshots (SGLang's --load-snapshot-publish-interval).
SNAPSHOT_STEPS = 15
# Load samples kept for pictures; beyond twice as many every second one goes.
SAMPLES = 400


class Cluster:
    """Runs one source of calls against one chooser; `run` once."""

    def __init__(self, spec: ServerSpec, *, shared_cache: bool = False) -> None:
        self.spec = spec
        self.times = StepTimes(spec.steps)
        cache, self._shared = None, shared_cache
        if shared_cache:
            cache = RadixCache(spec.ranks * spec.rank.cache_tokens // spec.rank.page_tokens)
        self.ranks = [Rank(spec.rank, cache) for _ in range(spec.ranks)]
        self.snapshots = [Snapshot(-1.0, Load(0, 0, 0, 0))] * spec.ranks
        self.seen = [Seen(0, 0, 0)] * spec.ranks
        self.received = [0] * spec.ranks
        self.received_tokens = [0] * spec.ranks
        """Requests and prompt tokens that each scheduler has taken in."""
        self._counts = [0] * spec.ranks
        every = list(range(spec.ranks))
        self.groups = [Group(every)] if spec.lockstep else [Group([rank]) for rank in every]
        self._group_of = {rank: group for group in self.groups for rank in group.ids}
        self._inbox: list[list[Request]] = [[] for _ in every]
        self._events: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._order = 0
        self.rows: list[Row] = []
        self._open: dict[int, Row] = {}
        self.samples: list[Sample] = []
        self._sample_gap, self._sample_at = 0.05, 0.0
        self.worked = 0.0
        """Rank-seconds in which a rank worked."""
        self.busy = 0.0
        """Seconds in which some rank worked."""
        self._busy_groups, self._busy_since = 0, 0.0

    def run(self, source: Source, chooser: Chooser) -> float:
        """Serve every call; returns the time of the last answer in seconds."""
        self.source, self.chooser = source, chooser
        self._first = iter(source.start())
        self._feed()
        now = 0.0
        while self._events:
            now, _, act, what = heapq.heappop(self._events)
            act(what, now)
        return now

    def _at(self, when: float, act: Callable[[Any, float], None], what: object) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, act, what))

    def _feed(self) -> None:
        """Take the next of the first calls; one at a time, as there may be very many."""
        first = next(self._first, None)
        if first is not None:
            self._at(first[0], self._arrive_first, first[1])

    def _arrive_first(self, call: Call, now: float) -> None:
        self._feed()
        self._arrive(call, now)

    def _arrive(self, call: Call, now: float) -> None:
        tokens = (call.prompt_tokens, 0, call.output_tokens)
        row = Row(call.id, call.session, call.turn, now, -1, *tokens, 0.0, 0.0)
        self.rows.append(row)
        self._open[call.id] = row
        if call.prompt_tokens + call.output_tokens > self.spec.rank.whole_pages:
            row.error = "longer than the KV cache of a rank"
            self._answer(call, now)
            return
        for group in self.groups:
            if group.steps > 1:
                self._catch_up(group, now)
        rank, row.reason, row.preferred = self.chooser.choose(call, now)
        row.rank = rank
        request = Request(call.pages, call.prompt_tokens, call.output_tokens, call)
        self._inbox[rank].append(request)
        group = self._group_of[rank]
        if now < self.spec.stall_seconds:
            if not group.stalled:
                group.stalled = True
                self._at(self.spec.stall_seconds, self._wake, group)
        elif not group.steps:
            self._begin(group, now)
        elif group.steps > 1:
            # The scheduler looks for requests when the step under way is over.
            group.steps = 1
            self._schedule(group)

    # Steps

    def _wake(self, group: Group, now: float) -> None:
        if not group.steps:
            self._begin(group, now)

    def _begin(self, group: Group, now: float) -> None:
        """Start the next step of a group, or leave it idle."""
        was_busy = group.steps > 0
        for rank in group.ids:
            self._receive(rank)
        self._plan(group, now)
        self._look(group, now)
        group.steps = 0
        if any(work is not None for work in group.works):
            group.steps = self._jump(group)
            self._schedule(group)
        else:
            for rank in group.ids:
                self._publish(rank, now)
        self._mark_busy(was_busy, group.steps > 0, now)

    def _plan(self, group: Group, now: float) -> None:
        """Plan the step that begins now."""
        group.works = [self.ranks[rank].plan() for rank in group.ids]
        group.begun = now
        group.each = self.times.seconds(group.works)
        group.longer, group.most = self.times.growth(group.works)
        for rank in group.told:
            self._publish(rank, now)
        group.told.clear()

    def _receive(self, rank: int) -> None:
        for request in self._inbox[rank]:
            self.ranks[rank].add(request)
            self.received[rank] += 1
            self.received_tokens[rank] += request.prompt_tokens
        self._inbox[rank].clear()

    def _look(self, group: Group, now: float) -> None:
        """Note what our hook reports and what pictures show."""
        for rank in group.ids:
            state = self.ranks[rank]
            rest = 0 if state.chunked is None else state.chunked.uncached
            counts = (rest, state.prompt_tokens, state.cached_tokens)
            self.seen[rank] = Seen(self.received[rank], state.active, len(state.waiting), *counts)
        if now >= self._sample_at:
            self._sample_at = now + self._sample_gap
            self.samples.append(Sample(now, [rank.requests for rank in self.ranks]))
            if len(self.samples) > 2 * SAMPLES:
                del self.samples[::2]
                self._sample_gap *= 2

    def _jump(self, group: Group) -> int:
        if self._shared:
            # What one rank stores the others find: never later than with the next step.
            return 1
        alike = (
            self.ranks[rank].alike(work.prefill)
            for rank, work in zip(group.ids, group.works, strict=True)
            if work is not None
        )
        return min(group.most, *alike)

    def _schedule(self, group: Group) -> None:
        group.version += 1
        self._at(group.begun + group.span(group.steps), self._end, (group, group.version))

    def _catch_up(self, group: Group, now: float) -> None:
        """Account the steps of a jump that are over by `now`."""
        over = min(group.steps - 1, int((now - group.begun) / group.each))
        while over and group.begun + group.span(over) > now:
            over -= 1
        if over:
            end = group.begun + group.span(over)
            self._account(group, over, end)
            group.steps -= over
            self._plan(group, end)
            self._schedule(group)

    def _end(self, which: tuple[Group, int], now: float) -> None:
        group, version = which
        if version == group.version:
            self._account(group, group.steps, now)
            self._begin(group, now)
            if self._shared:
                self._wake_waiting(now)

    def _wake_waiting(self, now: float) -> None:
        """Ranks of their own step that had no memory may have some now."""
        for group in self.groups:
            if not group.steps and any(self.ranks[rank].waiting for rank in group.ids):
                self._begin(group, now)

    def _account(self, group: Group, steps: int, now: float) -> None:
        """`steps` steps of a group are over at `now`."""
        seconds = now - group.begun
        ended: list[Request] = []
        for rank, work in zip(group.ids, group.works, strict=True):
            self._snapshot(rank, work, steps, group, now)
            if work is None:
                continue
            self.worked += seconds
            firsts, done = self.ranks[rank].finish(work.prefill, steps)
            for request in firsts:
                row = self._open[request.call.id]  # type: ignore[attr-defined]
                row.ttft_ms = (now - row.at) * 1e3
                row.cached_tokens = request.cached
            ended += done
        for request in ended:
            self._answer(request.call, now)  # type: ignore[arg-type]

    def _answer(self, call: Call, now: float) -> None:
        row = self._open.pop(call.id)
        row.e2e_ms = (now - row.at) * 1e3
        for at, following in self.source.done(call, now):
            self._at(at, self._arrive, following)

    # What the ranks tell

    def _snapshot(self, rank: int, work: Work | None, steps: int, group: Group, now: float) -> None:
        """Publish as SGLang's overlapped loop does: a prefill at once, when the next batch is
        planned and the prefill has joined those that run; else every 15th step, before the results
        of the step are processed, so that a request which just ended is still in it."""
        if work is not None and work.prefill:
            group.told.append(rank)
            return
        count = self._counts[rank] + steps
        if count >= SNAPSHOT_STEPS:
            since = count % SNAPSHOT_STEPS
            at = now - since * (now - group.begun) / steps
            self._publish(rank, at, decoded=steps - since)
            count = since
        self._counts[rank] = count

    def _publish(self, rank: int, at: float, decoded: int = 0) -> None:
        self._counts[rank] = 0
        load = self.ranks[rank].load(decoded)
        self.snapshots[rank] = Snapshot(at, load, self.received_tokens[rank])

    def _mark_busy(self, before: bool, after: bool, now: float) -> None:
        if before == after:
            return
        if not self._busy_groups:
            self._busy_since = now
        self._busy_groups += 1 if after else -1
        if not self._busy_groups:
            self.busy += now - self._busy_since

    # What bounds and other people's policies may look at

    def outstanding(self, rank: int) -> int:
        """Requests sent to a rank and not answered."""
        return self.ranks[rank].requests + len(self._inbox[rank])

    def to_prefill(self, rank: int) -> int:
        """Prompt tokens of those that the rank has still to compute."""
        state = self.ranks[rank]
        inbox = sum(state.uncached_of(r.pages, r.prompt_tokens) for r in self._inbox[rank])
        return state.to_prefill + inbox

    @property
    def idle_share(self) -> float | None:
        """Share of rank-seconds in which some rank worked and this one did not."""
        return 1 - self.worked / (self.spec.ranks * self.busy) if self.busy else None
