"""From a query to a reply: pure, the same code in the server, a replay and a simulator."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sidecar import wire
from sidecar.budget import Budget, Instance, LoadView
from sidecar.errors import PeerError
from sidecar.policies import Choice, Policy, Reason
from sidecar.policies.least_loaded import fewest_requests

_SPILLS = frozenset({Reason.SPILL, Reason.STALE_SKIP, Reason.TOKEN_SPILL, Reason.TOKEN_STALE_SKIP})


@dataclass(slots=True)
class Tally:
    """What was decided for one instance since the sidecar started; plain numbers for metrics."""

    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(policy, reason) -> requests."""
    spills: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(preferred rank, chosen rank) -> requests, whatever kept them off the preferred rank."""
    chosen: Counter[int] = field(default_factory=Counter)
    """Rank -> requests."""
    queries: int = 0
    unguarded: int = 0
    """Requests decided while no load was known."""
    bypassed: dict[str, int] = field(default_factory=dict)
    """Cause -> requests that the hook decided alone, since its controller started."""
    abstained: dict[str, int] = field(default_factory=dict)
    """Cause -> requests that the hook left to SGLang, since its controller started."""
    about: dict[str, str] = field(default_factory=dict)
    """Versions and settings that the hook told."""


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
        self.policy_version = 1
        self.budget = budget
        self.boot = boot
        self.tallies: dict[str, Tally] = {}
        self.on_policy_error = on_policy_error
        budget.on_forget = lambda name: void(self.tallies.pop(name, None))

    def swap_policy(self, policy: Policy) -> None:
        """Decide with another policy from the next query on; loads and counters stay."""
        self.policy = policy
        self.policy_version += 1

    def report(self, report: wire.LoadReport, now: float) -> None:
        """Take in a load report. Raises PeerError."""
        self.budget.instance(report.instance, now).apply_report(report, now)

    def handle(self, query: wire.Query, now: float) -> wire.Reply:
        """Decide every request of a query, each seeing those before it.

        now: monotonic seconds. Raises PeerError, after which nothing was decided.
        """
        instance = self.budget.instance(query.instance, now)
        view = instance.apply_query(query, now)
        tally = self._tally(query)
        if query.requests and not view.ranks:
            raise PeerError("no_live_rank", "the query names no live rank")
        policy = self.policy
        ranks: list[int] = []
        reasons: list[str] = []
        for facts in query.requests:
            choice = self._decide(policy, facts, view)
            self._account(instance, tally, choice, facts.tokens)
            ranks.append(view.ranks[choice.position])
            reasons.append(choice.reason)
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

    def _decide(self, policy: Policy, facts: wire.RequestFacts, view: LoadView) -> Choice:
        try:
            choice = policy.choose(facts, view)
            if 0 <= choice.position < len(view.ranks):
                return choice
            raise IndexError(f"position {choice.position} of {len(view.ranks)} ranks")
        except Exception as error:  # noqa: BLE001 - a policy may be anyone's code; contain it
            self.on_policy_error(error)
            return Choice(fewest_requests(view, facts.tokens), Reason.POLICY_ERROR)

    def _account(self, instance: Instance, tally: Tally, choice: Choice, tokens: int) -> None:
        view = instance.view
        rank = view.ranks[choice.position]
        tally.decisions[self.policy.name, choice.reason] += 1
        tally.chosen[rank] += 1
        if choice.reason in _SPILLS:
            tally.spills[view.ranks[choice.preferred], rank] += 1
        if not view.known:
            tally.unguarded += 1
        instance.assign(choice.position, tokens)

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


def void(value: object) -> None:
    """Drop a value where a callback must return None."""
