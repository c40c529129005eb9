"""Load accounting: what each rank of each SGLang instance has to do, right now.

load of a rank = running + waiting (from its last report) + in flight (sent - received). `sent`
comes with every query and `received` with every report, both counted since their process started:
nothing is guessed, nothing expires, a new sidecar knows the truth one message after its start.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from sidecar.errors import PeerError
from sidecar.hashing import rank_bytes
from sidecar.wire import MAX_RANKS, LoadReport, Query

# An instance that was silent this long may be forgotten when a new one needs its place.
IDLE_INSTANCE_SECONDS = 60.0


@dataclass(slots=True)
class RankState:
    """What is known of one rank; kept while it is down, so that it returns with its history."""

    first_seen: float
    report: LoadReport | None = None
    reported_at: float = 0.0
    sent: int = 0
    sent_tokens: int = 0
    # `sent` is compared with `received` from these origins. They are 0 while controller and
    # scheduler started together; a new incarnation of one alone moves them.
    sent_origin: int = 0
    sent_tokens_origin: int = 0
    new_scheduler: bool = False
    """The scheduler is a new incarnation under the same controller."""
    new_controller: bool = False
    """The controller is a new incarnation over the same scheduler."""

    def in_flight(self) -> tuple[int, int]:
        """Requests and prompt tokens sent and not yet received."""
        received = self.report.received if self.report else 0
        received_tokens = self.report.received_tokens if self.report else 0
        return (
            max(0, self.sent - self.sent_origin - received),
            max(0, self.sent_tokens - self.sent_tokens_origin - received_tokens),
        )

    def controller_renewed(self) -> None:
        """The first query of another controller process has come."""
        if self.new_scheduler or self.report is None:
            self._start_together()
        else:
            self._settle()
            self.new_controller = True

    def scheduler_renewed(self) -> None:
        """The first report of another scheduler process has come."""
        if self.new_controller:
            self._start_together()
        else:
            self._settle()
            self.new_scheduler = True

    def _start_together(self) -> None:
        self.sent_origin = self.sent_tokens_origin = 0
        self.new_scheduler = self.new_controller = False

    def _settle(self) -> None:
        """Count from here: what was in flight towards the earlier incarnation is gone."""
        report = self.report
        self.sent_origin = self.sent - (report.received if report else 0)
        self.sent_tokens_origin = self.sent_tokens - (report.received_tokens if report else 0)


@dataclass(slots=True)
class LoadView:
    """What a policy sees of one instance; position i is the same rank in every list, length n."""

    ranks: list[int] = field(default_factory=list)
    """Stable ids of the live ranks, ascending."""
    rank_bytes: list[bytes] = field(default_factory=list)
    """Their ids as hash input."""
    requests: list[int] = field(default_factory=list)
    """Running + waiting + in flight."""
    tokens: list[int] = field(default_factory=list)
    """KV tokens in use + waiting + in flight."""
    usable: list[bool] = field(default_factory=list)
    """False: the reports of this rank are stale while those of others are not."""
    counted: list[bool] = field(default_factory=list)
    """Whether the rank's load is known and part of the average."""
    total: int = 0
    """Sum of `requests` over the counted ranks."""
    known: int = 0
    """Number of counted ranks; 0: no load is known and the guard is off."""
    cursor: int = -1
    """Rank that a load-aware method chose last: ties go to the next one."""

    def average(self) -> float:
        """Mean requests of the counted ranks; 0.0 if there is none."""
        return self.total / self.known if self.known else 0.0

    def add(self, position: int, tokens: int) -> None:
        """Account a request that is being sent to the rank at `position`."""
        self.requests[position] += 1
        self.tokens[position] += tokens
        if self.counted[position]:
            self.total += 1


class Instance:
    """One SGLang server: its ranks, counters and load view."""

    def __init__(self, name: str, stale_seconds: float) -> None:
        self.name = name
        self.stale_seconds = stale_seconds
        self.epoch: int | None = None
        self.last_heard = 0.0
        self.states: dict[int, RankState] = {}
        self.view = LoadView()
        self._position: dict[int, int] = {}
        self._live: list[RankState] = []
        self._sent: list[int] = []
        self._sent_tokens: list[int] = []
        self._next_refresh = 0.0

    def apply_report(self, report: LoadReport, now: float) -> None:
        """Take in a load report. Raises PeerError (`stale_report`) if it is not the newest."""
        self.last_heard = now
        state = self._state(report.rank, now)
        last = state.report
        if last is not None and report.epoch == last.epoch and report.seq <= last.seq:
            raise PeerError("stale_report", f"rank {report.rank}: report {report.seq} is not new")
        if last is not None and report.epoch < last.epoch and not self._silent(state, now):
            raise PeerError("stale_report", f"rank {report.rank}: report of an older process")
        state.report, state.reported_at = report, now
        if last is None:
            state.sent_origin = state.sent_tokens_origin = 0
        elif report.epoch != last.epoch:
            state.scheduler_renewed()
        self._update(report.rank, state, now, first=last is None)

    def apply_query(self, query: Query, now: float) -> LoadView:
        """Take in the counters and live ranks of a query; return the view to decide on."""
        self.last_heard = now
        view = self.view
        if query.ranks != view.ranks:
            self._set_ranks(query.ranks, now)
        if query.epoch != self.epoch:
            self._new_controller(query, now)
        elif query.sent != self._sent or query.sent_tokens != self._sent_tokens:
            self._set_sent(query, now)
        if now >= self._next_refresh:
            self.refresh(now)
        return view

    def assign(self, position: int, tokens: int) -> None:
        """Account a decision at once; the next query confirms it."""
        state = self._live[position]
        state.sent += 1
        state.sent_tokens += tokens
        self._sent[position] += 1
        self._sent_tokens[position] += tokens
        self.view.add(position, tokens)

    def refresh(self, now: float) -> None:
        """Recompute the whole view: loads, staleness, which ranks count."""
        view = self.view
        # A tenth of the limit is how late a rank may be called stale.
        self._next_refresh = now + self.stale_seconds / 10
        fresh = [state.report is not None and not self._silent(state, now) for state in self._live]
        young = [
            state.report is None and now - state.first_seen <= self.stale_seconds
            for state in self._live
        ]
        # Before the first report of any rank, what was sent is all the load there is.
        cold = not any(state.report is not None for state in self._live)
        view.counted = young if cold else fresh
        view.known = sum(view.counted)
        view.usable = [f or y for f, y in zip(fresh, young, strict=True)]
        if not any(fresh):
            view.usable = [True] * len(view.ranks)
        for position, state in enumerate(self._live):
            view.requests[position], view.tokens[position] = _load(state)
        view.total = sum(n for n, c in zip(view.requests, view.counted, strict=True) if c)

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
        position = self._position.get(rank)
        if position is None:
            return
        view = self.view
        if first or not view.counted[position]:
            self.refresh(now)
            return
        before = view.requests[position]
        view.requests[position], view.tokens[position] = _load(state)
        view.total += view.requests[position] - before

    def _set_ranks(self, ranks: list[int], now: float) -> None:
        if any(a >= b for a, b in pairwise(ranks)):
            raise PeerError("field", "ranks must ascend without repetition")
        self._live = [self._state(rank, now) for rank in ranks]
        self._position = {rank: position for position, rank in enumerate(ranks)}
        size = len(ranks)
        self.view.ranks = list(ranks)
        self.view.rank_bytes = rank_bytes(ranks)
        self.view.requests, self.view.tokens = [0] * size, [0] * size
        self.view.usable, self.view.counted = [True] * size, [False] * size
        self.view.total = self.view.known = 0
        self._sent = [state.sent for state in self._live]
        self._sent_tokens = [state.sent_tokens for state in self._live]
        self._next_refresh = now

    def _set_sent(self, query: Query, now: float) -> None:
        self._sent, self._sent_tokens = list(query.sent), list(query.sent_tokens)
        for state, sent, tokens in zip(self._live, query.sent, query.sent_tokens, strict=True):
            state.sent, state.sent_tokens = sent, tokens
        self._next_refresh = now

    def _new_controller(self, query: Query, now: float) -> None:
        """First query of a controller process; `sent` may start anywhere."""
        replaced = self.epoch is not None
        self.epoch = query.epoch
        self._set_sent(query, now)
        for state in self.states.values():
            if replaced:
                state.controller_renewed()
            elif state.report is None:
                # This sidecar is younger than the counters: what was sent before it is no load.
                state.sent_origin, state.sent_tokens_origin = state.sent, state.sent_tokens


def _load(state: RankState) -> tuple[int, int]:
    requests, tokens = state.in_flight()
    report = state.report
    if report is None:
        return requests, tokens
    return report.running + report.waiting + requests, report.tokens + tokens


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

    def _forget_idle(self, now: float) -> None:
        oldest = min(self.instances.values(), key=lambda instance: instance.last_heard)
        if now - oldest.last_heard < IDLE_INSTANCE_SECONDS:
            raise PeerError(
                "too_many_instances",
                f"{self.max_instances} instances are connected; max_instances sets the bound",
            )
        del self.instances[oldest.name]
        self.on_forget(oldest.name)
