"""From a query to a reply: pure, the same code in the server, a replay and a simulator."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from sidecar import wire
from sidecar.budget import Budget, Instance
from sidecar.errors import PeerError
from sidecar.loads import LoadView
from sidecar.policies import REASONS, SPILLS, Choice, Learner, Policy, Reason
from sidecar.policies.least_loaded import fewest_requests

# Pairs of ranks whose spills are told apart: all of 64 ranks, the busiest of 320.
MAX_PAIRS = 4096


@dataclass(slots=True)
class Tally:
    """What was decided for one instance since the sidecar started; plain numbers for metrics."""

    decisions: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """policy -> reason -> requests."""
    spills: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(preferred rank, chosen rank) -> requests, whatever kept them off the preferred rank."""
    queries: int = 0
    unguarded: int = 0
    """Requests decided while no load was known."""
    bypassed: dict[str, int] = field(default_factory=dict)
    """Cause -> requests that the hook decided alone, since its controller started."""
    abstained: dict[str, int] = field(default_factory=dict)
    """Cause -> requests that the hook left to SGLang, since its controller started."""
    about: dict[str, str] = field(default_factory=dict)
    """Versions and settings that the hook told."""

    def count_spill(self, preferred: int, chosen: int) -> None:
        """Count a spill; pairs beyond MAX_PAIRS count as (-1, -1)."""
        pair = (preferred, chosen)
        if pair not in self.spills and len(self.spills) >= MAX_PAIRS:
            pair = (-1, -1)
        self.spills[pair] += 1


def _learner(policy: Policy) -> Learner | None:
    """The policy, if it learns. Asked by name: a wrapper may pass on what it does not define."""
    parts = ("new_memory", "learn", "heard")
    return cast(Learner, policy) if all(hasattr(policy, part) for part in parts) else None


def _remembering(view: LoadView, learner: Learner) -> LoadView:
    """The view, with a memory for the policy."""
    if view.memory is None:
        view.memory = learner.new_memory()
        view.retracted.clear()
    return view


class Dispatcher:
    """Decides with the current policy and accounts every decision at once."""

    def __init__(
        self,
        policy: Policy,
        budget: Budget,
        boot: int,
        on_policy_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.policy = policy
        self._learner = _learner(policy)
        self.policy_version = 1
        self.budget = budget
        self.boot = boot
        self.tallies: dict[str, Tally] = {}
        self.on_policy_error = on_policy_error
        budget.on_forget = self._forget

    def swap_policy(self, policy: Policy) -> None:
        """Decide with another policy from the next query on; loads and counters stay."""
        same = type(policy) is type(self.policy) and policy.params == self.policy.params
        self.policy = policy
        self._learner = _learner(policy)
        for instance in self.budget.instances.values():
            if not same:
                instance.view.memory = None
                self._catch_up(instance)
        self.policy_version += 1

    def report(self, report: wire.LoadReport, now: float) -> None:
        """Take in a load report. Raises PeerError."""
        instance = self.budget.instance(report.instance, now)
        instance.apply_report(report, now)
        if self._learner is not None:
            self._learner_told(
                self._learner.heard, report, _remembering(instance.view, self._learner), now
            )

    def handle(self, query: wire.Query, now: float) -> wire.Reply:
        """Decide every request of a query, each seeing those before it.

        now: monotonic seconds. Raises PeerError, after which nothing was decided.
        """
        if query.requests and not query.ranks:
            raise PeerError("no_live_rank", "the query names no live rank")
        instance, view = self._meet(query, now)
        tally, learner = self._tally(query), self._learner
        policy, decisions = self.policy, tally.decisions[self.policy.name]
        ranks: list[int] = []
        reasons: list[str] = []
        for facts in query.requests:
            position, reason, preferred = self._decide(policy, facts, view)
            instance.assign(position, facts.tokens)
            rank = view.ranks[position]
            if learner is not None:
                self._learner_told(learner.learn, facts, rank, None, view)
            ranks.append(rank)
            reasons.append(reason)
            decisions[reason] += 1
            if reason in SPILLS:
                tally.count_spill(view.ranks[preferred], rank)
        if not view.known:
            tally.unguarded += len(ranks)
        return wire.Reply(
            wire.VERSION,
            query.seq,
            self.boot,
            policy.name,
            self.policy_version,
            ranks,
            reasons,
            policy.want,
        )

    def _meet(self, query: wire.Query, now: float) -> tuple[Instance, LoadView]:
        """The instance that asks, and its view, once both know what the query tells."""
        instance = self.budget.instance(query.instance, now)
        try:
            view = instance.apply_query(query, now)
        except PeerError:
            if instance.epoch is None and not instance.states:
                self.budget.forget(instance.name)
            raise
        view.placed.clear()
        if self._learner is not None:
            _remembering(view, self._learner)
            for past in query.history:
                self._learner_told(
                    self._learner.learn, past.facts, past.rank, past.age_ms / 1000, view
                )
        return instance, view

    def _catch_up(self, instance: Instance) -> None:
        """Tell a new policy the last reports, so that it sees what the next ones change."""
        if self._learner is not None:
            view = _remembering(instance.view, self._learner)
            heard = [state for state in instance.states.values() if state.report is not None]
            newest = max((state.reported_at for state in heard), default=0.0)
            for state in heard:
                # Time begins with the first: one that has long been silent would mislead it.
                if newest - state.reported_at <= instance.stale_seconds:
                    self._learner_told(self._learner.heard, state.report, view, state.reported_at)

    def _learner_told(self, method: Callable[..., None], *what: object) -> None:
        """Tell a policy that learns; a fault of its code costs what it would have learnt."""
        try:
            method(*what)
        except Exception as error:  # noqa: BLE001 - see the docstring
            self.on_policy_error(error)

    def _decide(self, policy: Policy, facts: wire.RequestFacts, view: LoadView) -> Choice:
        """The policy's choice if it is a sound one; a policy may be anyone's code."""
        try:
            choice = policy.choose(facts, view)
            position, reason, preferred = choice
            size = len(view.ranks)
            if (
                type(position) is int
                and 0 <= position < size
                and reason in REASONS
                and type(preferred) is int
                and (0 if reason in SPILLS else -1) <= preferred < size
            ):
                return choice
            raise ValueError(f"{choice} of {size} ranks")
        except Exception as error:  # noqa: BLE001 - see the docstring
            self.on_policy_error(error)
            return Choice(fewest_requests(view, facts.tokens), Reason.POLICY_ERROR)

    def _forget(self, instance: str) -> None:
        self.tallies.pop(instance, None)

    def _tally(self, query: wire.Query) -> Tally:
        tally = self.tallies.get(query.instance)
        if tally is None:
            tally = self.tallies[query.instance] = Tally()
        tally.queries += 1
        if query.bypassed is not None:
            tally.bypassed = query.bypassed
        if query.abstained is not None:
            tally.abstained = query.abstained
        if query.about is not None:
            tally.about = query.about
        return tally
