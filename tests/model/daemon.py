"""The sidecar in the model: the real dispatcher, every input on record, every decision checked."""

from collections import Counter
from typing import Any

from sidecar import wire
from sidecar.budget import Budget, Instance
from sidecar.dispatcher import Dispatcher
from sidecar.errors import PeerError
from sidecar.policies import REASONS, SPILLS, make_policy
from sidecar.seat import alike
from sidecar.wire import LoadReport, Query, Reply
from tests.model.reasons import Decision, check
from tests.support import INSTANCE, STALE_SECONDS

NEVER = float("-inf")


def decide(dispatcher: Dispatcher, payload: bytes, now: float) -> Reply | wire.Refusal:
    """What `sidecar.pump` does with a query, bugs not contained."""
    seq = 0
    try:
        query = wire.decode_query(payload)
        seq = query.seq
        return dispatcher.handle(query, now)
    except PeerError as error:
        return wire.Refusal(wire.VERSION, seq, error.cause, str(error)[:256])


class Daemon:
    """One sidecar process. boot: its start, ns since 1970."""

    def __init__(self, policy: str, boot: int) -> None:
        self.first, self.boot = policy, boot
        self.dispatcher = self._new()
        self.inputs: list[tuple[str, Any, float]] = []
        self.outputs: list[bytes] = []
        self.decided: Counter[tuple[str, str]] = Counter()
        self.controller: int | None = None
        """Epoch of the controller that was heard last."""
        self.asked_at = NEVER
        self.controllers: set[int] = set()
        self.came_back = False
        """Whether a late query of another controller was taken amid those of one, whose counts it
        replaced: no hook tells them again before they change."""
        self.told: Counter[int] = Counter()
        """Rank -> requests sent there, as the last query and the decisions since tell it."""
        self.ranks: list[int] = []
        self.reports: dict[int, LoadReport] = {}
        self.reported_at: dict[int, float] = {}
        self.reporting = (NEVER, NEVER)
        """Since when one rank or other has been reporting without a pause, and until when."""
        self.any_reported_at = self.reporting_since = NEVER
        """When any rank reported last, and since when one or other does without a pause."""
        self.remembered: dict[int, tuple[LoadReport, float]] = {}
        """What the policy knows of each rank's reports, and since when."""
        self.emptied_at: dict[int, float] = {}
        """When the policy saw that a rank's cache was emptied."""

    def _new(self) -> Dispatcher:
        def fault(error: BaseException) -> None:
            raise AssertionError("a policy failed") from error

        return Dispatcher(make_policy(self.first), Budget(STALE_SECONDS, 4), self.boot, fault)

    @property
    def instance(self) -> Instance | None:
        return self.dispatcher.budget.instances.get(INSTANCE)

    def query(self, payload: bytes, now: float) -> bytes:
        """Answer, and check what was decided."""
        answer = decide(self.dispatcher, payload, now)
        data = wire.encode(answer)
        self.inputs.append(("query", payload, now))
        self.outputs.append(data)
        if isinstance(answer, Reply):
            self._heard(wire.decode_query(payload), answer, now)
        else:
            assert answer.cause == "older_controller" or not wire.decode_query(payload).ranks
        return data

    def _heard(self, query: Query, reply: Reply, now: float) -> None:
        assert (reply.seq, reply.boot) == (query.seq, self.boot)
        assert len(reply.ranks) == len(reply.reasons) == len(query.requests), "each once"
        assert set(reply.ranks) <= set(query.ranks), "the answer is a live rank"
        assert set(reply.reasons) <= REASONS
        older = self.controller is not None and query.epoch < self.controller
        assert not older or now - self.asked_at > STALE_SECONDS, "one controller at a time"
        self.came_back |= query.epoch != self.controller and query.epoch in self.controllers
        self.controllers.add(query.epoch)
        self.controller, self.ranks, self.asked_at = query.epoch, query.ranks, now
        self.told.update(dict.fromkeys(query.ranks, 0))
        for rank, sent in zip(query.ranks, query.sent, strict=True):
            self.told[rank] = sent
        policy = self.dispatcher.policy.name
        first: dict[bytes, int] = {}
        for facts, rank, reason in zip(query.requests, reply.ranks, reply.reasons, strict=True):
            self.told[rank] += 1
            self.decided[policy, reason] += 1
            check(Decision(self, query, facts, rank, reason, now, first))
            first.setdefault(facts.routing_key, rank)
        self._check_counted(reply)

    def _check_counted(self, reply: Reply) -> None:
        assert self.instance is not None
        view = self.instance.view
        for rank, placed in Counter(reply.ranks).items():
            assert view.in_flight[view.position[rank]] >= placed, "none is received already"
        tally = self.dispatcher.tallies[INSTANCE]
        counted = {(p, r): n for p, rs in tally.decisions.items() for r, n in rs.items() if n}
        assert counted == dict(self.decided), "each decision is counted with its reason"
        spills = sum(n for (_, reason), n in self.decided.items() if reason in SPILLS)
        assert tally.spills.total() == spills

    def report(self, payload: bytes, now: float) -> bool:
        """Take in a load report; False if it is refused."""
        self.inputs.append(("report", payload, now))
        report = wire.decode_report(payload)
        before = self.reports.get(report.rank)
        known = before is not None and report.epoch == before.epoch and report.seq <= before.seq
        older = before is not None and report.epoch < before.epoch
        lately = self.silent(report.rank, now) <= STALE_SECONDS / 2
        try:
            self.dispatcher.report(report, now)
        except PeerError as error:
            assert error.cause == "stale_report" and (known or (older and lately))
            return False
        assert not known, "a report is taken once"
        assert not (older and lately), "none of an older process, while the younger one speaks"
        if now - self.any_reported_at > STALE_SECONDS / 2:
            self.reporting_since = now
        self.any_reported_at = now
        since, until = self.reporting
        self.reporting = (now if now - until > STALE_SECONDS / 2 else since, now)
        last, at = self.remembered.get(report.rank, (report, now))
        if last.epoch != report.epoch:
            self.emptied_at[report.rank] = at  # since when its cache may have been filled again
        elif last.flushes != report.flushes:
            self.emptied_at[report.rank] = now
        self.remembered[report.rank] = report, now
        self.reports[report.rank], self.reported_at[report.rank] = report, now
        return True

    def swap(self, policy: str) -> None:
        """Put another policy in force."""
        self.inputs.append(("swap", policy, 0.0))
        made = make_policy(policy)
        if not alike(made, self.dispatcher.policy):
            self._begin_anew()
        self.dispatcher.swap_policy(made)

    def _begin_anew(self) -> None:
        """The new policy knows the last reports, but those of ranks that are silent."""
        newest = max(self.reported_at.values(), default=0.0)
        self.emptied_at = {}
        self.remembered = {
            rank: (report, self.reported_at[rank])
            for rank, report in self.reports.items()
            if newest - self.reported_at[rank] <= STALE_SECONDS
        }

    def silent(self, rank: int, now: float) -> float:
        """Seconds since a rank's last report."""
        return now - self.reported_at.get(rank, NEVER)

    def check_view(self) -> None:
        """The loads are sound at any time."""
        instance = self.instance
        if instance is None:
            return
        view = instance.view
        size = len(view.ranks)
        for name in ("requests", "queued", "in_flight", "prefilling", "tokens"):
            numbers = getattr(view, name)
            assert len(numbers) == size and min(numbers, default=0) >= 0, f"{name}: {numbers}"
        assert len(view.usable) == len(view.counted) == len(view.rank_bytes) == size
        assert view.total == sum(n for n, c in zip(view.requests, view.counted, strict=True) if c)
        assert view.known == sum(view.counted)
        for rank, requests, flying, counted in zip(
            view.ranks, view.requests, view.in_flight, view.counted, strict=True
        ):
            report = self.reports.get(rank)
            if report is not None:
                assert requests == report.running + report.waiting + flying
            elif counted:
                assert requests == flying
        self._check_memory(view.memory)

    def _check_memory(self, memory: Any) -> None:
        """What `kv_affinity` keeps adds up."""
        for rank in getattr(memory, "ranks", {}).values():
            footprint, queue = rank.footprint, rank.queue
            assert footprint.total == sum(footprint._spans.values()) >= footprint.active >= 0
            assert queue._cached == sum(sent.cached for sent in queue._sent)
            assert queue._uncached == sum(sent.uncached for sent in queue._sent)

    def check_replay(self) -> None:
        """Equal inputs, equal decisions: another dispatcher answers byte for byte the same."""
        again, answers = self._new(), iter(self.outputs)
        for kind, what, now in self.inputs:
            if kind == "query":
                assert wire.encode(decide(again, what, now)) == next(answers)
            elif kind == "swap":
                again.swap_policy(make_policy(what))
            else:
                try:
                    again.report(wire.decode_report(what), now)
                except PeerError:
                    continue
