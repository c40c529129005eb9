"""Load accounting: what each rank of each SGLang instance has to do, right now.

load of a rank = running + waiting (from its last report) + in flight (sent - received). `sent`
comes with every query and `received` with every report, both counted since their process started:
while both are of one start of the server nothing is guessed, nothing expires, and a new sidecar
knows the truth one message after its start.
"""

import copy
from collections.abc import Callable
from itertools import pairwise

from sidecar.errors import PeerError
from sidecar.hashing import rank_bytes
from sidecar.loads import LoadView, RankState, is_published
from sidecar.wire import MAX_RANKS, LoadReport, Query

# An instance that was silent this long may be forgotten when a new one needs its place.
IDLE_INSTANCE_SECONDS = 60.0
PROMPT_SECONDS = 0.001
"""The shortest deadline of a hook."""


class Instance:
    """One SGLang server: its ranks, counters and load view."""

    def __init__(self, name: str, stale_seconds: float) -> None:
        self.name = name
        self.stale_seconds = stale_seconds
        self.epoch: int | None = None
        self.last_heard = 0.0
        self._last_query = 0.0
        self.states: dict[int, RankState] = {}
        self.view = LoadView()
        self._live: list[RankState] = []
        self._sent: list[int] = []
        self._sent_tokens: list[int] = []
        self._assumed: list[bool] = []
        self._unsure: set[int] = set()
        """Ranks with unsure origins that have reported since these were looked at."""
        self._asked_at = float("-inf")
        """When the last query with requests came; it was none: long ago."""
        self._next_refresh = 0.0
        self._reported_at = self._reporting_since = float("-inf")
        """When any rank reported last, and since when one or other does so without a pause."""

    def apply_report(self, report: LoadReport, now: float) -> None:
        """Take in a load report. Raises PeerError (`stale_report`) if it is not the newest."""
        self.last_heard = now
        state = self._state(report.rank, now)
        last = state.report
        if last is not None and report.epoch == last.epoch and report.seq <= last.seq:
            raise PeerError("stale_report", f"rank {report.rank}: report {report.seq} is not new")
        # Taken before the rank is stale: sessions must not leave a new process whose clock was
        # stepped back.
        lately = now - state.reported_at <= self.stale_seconds / 2
        if last is not None and report.epoch < last.epoch and lately:
            raise PeerError("stale_report", f"rank {report.rank}: report of an older process")
        spoke_at = state.reported_at
        state.report, state.reported_at = report, now
        if now - self._reported_at > self.stale_seconds / 2:
            self._reporting_since = now
        self._reported_at = now
        if self.epoch is not None and (last is None or report.epoch != last.epoch):
            self.sync()
            if report.rank in self.view.position:
                state.reconcile(self.epoch, now, spoke_at)
        if is_published(report):
            state.sent_origin = state.sent_tokens_origin = 0
        elif state.unsure:
            self._unsure.add(report.rank)
        self._update(report.rank, state, now, first=last is None)

    def apply_query(self, query: Query, now: float) -> LoadView:
        """Take in the counters and live ranks of a query; return the view to decide on.

        Raises PeerError (`older_controller`) for the lesser of two controllers of one name.
        """
        same_ranks = query.ranks == self.view.ranks
        if query.epoch == self.epoch and same_ranks:
            if query.sent != self._sent or query.sent_tokens != self._sent_tokens:
                self._retract(query.sent)
                self._set_sent(query)
        else:
            self._check_controller(query, now)
            self._meet(query, now, same_ranks=same_ranks)
        self.last_heard = self._last_query = self.view.now = now
        if self._unsure:
            # Such a query was sent after the answer to the one before, which is so young that its
            # hook waits for us yet: it has sent nothing since, and no report is newer than it.
            newest = bool(query.requests) and now - self._asked_at <= PROMPT_SECONDS
            self._narrow(now, newest=newest)
        self._asked_at = now if query.requests else float("-inf")
        if now >= self._next_refresh:
            self.refresh(now)
        return self.view

    def counters(self) -> tuple[list[int], list[int]]:
        """Requests and prompt tokens sent to each of `view.ranks`, our placements included."""
        return self._sent, self._sent_tokens

    def hook_reports(self, rank: int, now: float) -> bool:
        """Whether the last report of the rank is the hook's, and not stale."""
        state = self.states.get(rank)
        return state is not None and state.source == "hook" and not self._silent(state, now)

    def renew_view(self) -> None:
        """Make the view anew with the next query: a policy from outside may have changed it."""
        self.sync()
        self.view = LoadView(now=self.view.now)
        self._live, self._sent, self._sent_tokens, self._assumed = [], [], [], []

    def twin(self) -> "Instance":
        """A copy that changes on its own, without the policy's memory."""
        # Not deepcopy: that takes 15 ms for 320 ranks, and queries wait meanwhile.
        twin = copy.copy(self)
        twin.states = {rank: copy.copy(state) for rank, state in self.states.items()}
        twin._live = [twin.states[rank] for rank in self.view.ranks]
        twin.view = self.view.twin()
        twin._sent, twin._sent_tokens = list(self._sent), list(self._sent_tokens)
        twin._assumed, twin._unsure = list(self._assumed), set(self._unsure)
        return twin

    def assign(self, position: int, tokens: int) -> None:
        """Account a decision at once; the next query confirms it."""
        self._sent[position] += 1
        self._sent_tokens[position] += tokens
        view = self.view
        view.requests[position] += 1
        view.queued[position] += 1
        view.in_flight[position] += 1
        view.tokens[position] += tokens
        view.changed.add(position)
        if view.counted[position]:
            view.total += 1

    def sync(self) -> None:
        """Bring `states` up to what was sent; the hot path only counts in two lists."""
        for state, sent, tokens in zip(self._live, self._sent, self._sent_tokens, strict=True):
            state.sent, state.sent_tokens = sent, tokens

    def refresh(self, now: float) -> None:
        """Recompute the whole view: loads, staleness, which ranks count."""
        view = self.view
        # A tenth of the limit is how late a rank may be called stale.
        self._next_refresh = now + self.stale_seconds / 10
        self.sync()
        fresh = [state.report is not None and not self._silent(state, now) for state in self._live]
        never = [state.report is None for state in self._live]
        young = [
            n and now - state.first_seen <= self.stale_seconds
            for n, state in zip(never, self._live, strict=True)
        ]
        # Before the first report of any rank, what was sent is all the load there is.
        view.counted = young if all(never) else fresh
        view.known = sum(view.counted)
        # A rank that never reported (its hook is off, its node cannot reach us) is not stuck.
        view.usable = [f or n for f, n in zip(fresh, never, strict=True)]
        # Ranks that fall silent together, as in step, are not stuck: nor are those that come later
        # of them when they go on, nor any while it was this process that stood still.
        pause = self.stale_seconds / 2
        going = now - self._reported_at <= pause < now - self._reporting_since
        if not going or not any(fresh):
            view.usable = [True] * len(view.ranks)
        for position, state in enumerate(self._live):
            self._fill(position, state)
        view.total = sum(n for n, c in zip(view.requests, view.counted, strict=True) if c)
        self._assumed = [
            bool(view.known) and n and not y for n, y in zip(never, young, strict=True)
        ]
        if any(self._assumed):
            self._assume()

    def _assume(self) -> None:
        """Take ranks of which nothing will be known for as loaded as the others are on average."""
        view = self.view
        tokens = sum(t for t, c in zip(view.tokens, view.counted, strict=True) if c) // view.known
        queued = sum(q for q, c in zip(view.queued, view.counted, strict=True) if c) // view.known
        for position, assumed in enumerate(self._assumed):
            if assumed:
                view.requests[position] = view.total // view.known
                view.queued[position] = queued
                view.tokens[position] = tokens

    def _silent(self, state: RankState, now: float) -> bool:
        return now - state.reported_at > self.stale_seconds

    def _state(self, rank: int, now: float) -> RankState:
        state = self.states.get(rank)
        if state is None:
            if len(self.states) >= MAX_RANKS:
                raise PeerError("field", f"{self.name}: more than {MAX_RANKS} ranks")
            state = self.states[rank] = RankState(first_seen=now)
        return state

    def _update(self, rank: int, state: RankState, now: float, *, first: bool) -> None:
        """Bring one rank's entry of the view up to date."""
        position = self.view.position.get(rank)
        if position is None:
            return
        view = self.view
        if first or not view.counted[position]:
            self.refresh(now)
            return
        self._place(position)

    def _place(self, position: int) -> None:
        """Recompute one entry of the view, if anything is known of it."""
        if self._assumed[position]:
            return
        view = self.view
        state = self._live[position]
        state.sent, state.sent_tokens = self._sent[position], self._sent_tokens[position]
        before = view.requests[position]
        self._fill(position, state)
        if view.counted[position]:
            view.total += view.requests[position] - before

    def _fill(self, position: int, state: RankState) -> None:
        """One entry of the view, from what was reported and what is in flight."""
        view, report = self.view, state.report
        queued, tokens = state.in_flight()
        view.in_flight[position] = queued
        running = 0
        if report is not None:
            running, queued = report.running, queued + report.waiting
            tokens += report.tokens
            view.prefilling[position] = report.prefilling_tokens
        view.changed.add(position)
        view.requests[position], view.queued[position] = running + queued, queued
        view.tokens[position] = tokens

    def _narrow(self, now: float, *, newest: bool) -> None:
        """Look at the origins of ranks that have reported before this query."""
        for rank in self._unsure:
            position = self.view.position.get(rank)
            if position is not None:
                state = self._live[position]
                state.sent, state.sent_tokens = self._sent[position], self._sent_tokens[position]
                if state.narrow(now, newest=newest):
                    self._place(position)
        self._unsure.clear()

    def _check_controller(self, query: Query, now: float) -> None:
        if any(a >= b for a, b in pairwise(query.ranks)):
            raise PeerError("field", "ranks: must ascend without repetition")
        silent = now - self._last_query > self.stale_seconds
        if self.epoch is not None and query.epoch < self.epoch and not silent:
            raise PeerError(
                "older_controller",
                f"{self.name}: a younger controller of that name is connected; "
                "give each server its own DP_SIDECAR_INSTANCE",
            )

    def _meet(self, query: Query, now: float, *, same_ranks: bool) -> None:
        """Another controller, or other live ranks."""
        if not same_ranks:
            self._set_ranks(query.ranks, now)
        self.epoch = query.epoch
        self._set_sent(query)
        self.sync()
        for state in self._live:
            state.reconcile(query.epoch, now, self._last_query)
        self._next_refresh = now

    def _set_ranks(self, ranks: list[int], now: float) -> None:
        self.sync()
        if len(self.states.keys() | set(ranks)) > MAX_RANKS:
            # Reports of ranks that no controller calls live must not keep live ones out.
            self.states = {rank: self.states[rank] for rank in ranks if rank in self.states}
        self._live = [self._state(rank, now) for rank in ranks]
        self.view.position = {rank: position for position, rank in enumerate(ranks)}
        size = len(ranks)
        self.view.ranks = list(ranks)
        self.view.changed = set(range(size))
        self.view.retracted = {}
        self.view.rank_bytes = rank_bytes(ranks)
        self.view.requests, self.view.tokens = [0] * size, [0] * size
        self.view.queued, self.view.prefilling = [0] * size, [0] * size
        self.view.in_flight = [0] * size
        self.view.usable, self.view.counted = [True] * size, [False] * size
        self.view.total = self.view.known = 0
        self._assumed = [False] * size
        self._sent = [state.sent for state in self._live]
        self._sent_tokens = [state.sent_tokens for state in self._live]

    def _retract(self, sent: list[int]) -> None:
        """Note assignments that never happened, as an answer of ours came too late."""
        retracted = self.view.retracted
        for position, (ours, theirs) in enumerate(zip(self._sent, sent, strict=True)):
            if theirs < ours:
                retracted[position] = retracted.get(position, 0) + ours - theirs

    def _set_sent(self, query: Query) -> None:
        """Take the hook's word for what was sent, where ours differs."""
        before = zip(self._sent, self._sent_tokens, strict=True)
        self._sent, self._sent_tokens = list(query.sent), list(query.sent_tokens)
        after = zip(self._sent, self._sent_tokens, strict=True)
        for position, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                self._place(position)


class Budget:
    """The load budget of all instances."""

    def __init__(self, stale_seconds: float, max_instances: int) -> None:
        self.stale_seconds = stale_seconds
        self.max_instances = max_instances
        self.instances: dict[str, Instance] = {}
        self.on_forget: Callable[[str], None] = lambda name: None

    def instance(self, name: str, now: float) -> Instance:
        """The instance of that name, made if new. Raises PeerError (`too_many_instances`)."""
        instance = self.instances.get(name)
        if instance is None:
            if len(self.instances) >= self.max_instances:
                self._forget_idle(now)
            instance = self.instances[name] = Instance(name, self.stale_seconds)
            instance.last_heard = now
        return instance

    def twin(self) -> "Budget":
        """A budget that knows the same loads, for another policy; without any memory."""
        twin = Budget(self.stale_seconds, self.max_instances)
        twin.instances = {name: one.twin() for name, one in self.instances.items()}
        return twin

    def _forget_idle(self, now: float) -> None:
        oldest = min(self.instances.values(), key=lambda instance: instance.last_heard)
        if now - oldest.last_heard < IDLE_INSTANCE_SECONDS:
            raise PeerError(
                "too_many_instances",
                f"{self.max_instances} instances are connected; max_instances sets the bound",
            )
        self.forget(oldest.name)

    def forget(self, name: str) -> None:
        """Drop all that is known of an instance."""
        del self.instances[name]
        self.on_forget(name)
