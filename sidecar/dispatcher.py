"""From a query to a reply: pure, the same code in the server, a replay and a simulator."""

from sidecar import wire
from sidecar.budget import Budget
from sidecar.canary import Canary
from sidecar.errors import PeerError, PolicyError
from sidecar.policies import SPILLS, Choice, KvAffinity, Policy, Reason, make_policy
from sidecar.policies.least_loaded import fewest_requests
from sidecar.policies.want import union
from sidecar.seat import Expected, OnDiscard, OnError, Seat, alike
from sidecar.shadow import Shadow, wants
from sidecar.tally import Tally


def wanted(active: Policy, canary: Policy | None, shadow: Policy | None) -> wire.Want:
    """What the hooks are to tell. Raises ConfigError if they cannot tell it all."""
    second = () if canary is None else (canary.want,)
    return union(active.want, *second, *(() if shadow is None else wants(shadow, active)))


def default_policy() -> Policy:
    """What stands in for a policy that fails."""
    return make_policy(KvAffinity.name)


class Dispatcher:
    """Decides with the current policy and accounts every decision at once.

    policy, budget: of the active seat; boot: start of this sidecar, ns since 1970; on_policy_error:
    told of each fault of a policy's code.
    """

    def __init__(
        self,
        policy: Policy,
        budget: Budget,
        boot: int,
        on_policy_error: OnError = lambda error: None,
    ) -> None:
        self.on_policy_error = on_policy_error
        self.on_discard: OnDiscard = lambda memory: None
        """Given each memory that is no longer needed."""
        self.active = Seat(policy, budget, self._failed, self._discard)
        self.canary: Canary | None = None
        self._stand_in: Seat | None = None
        self._others: tuple[Seat, ...] = ()
        """Those that follow what the active one is told."""
        self.policy_version = 1
        self.shadow: Shadow | None = None
        """Looks on; who serves lets it follow each decision once the reply is on its way."""
        self.want = policy.want
        """What the hooks are to tell."""
        self.boot = boot
        self.tallies: dict[str, Tally] = {}
        self.expected: list[Expected | None] = []
        """Of each request of the last query (`Seat.expected`), by the policy that decided it."""
        budget.on_forget = self._forget

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.active.policy

    @property
    def budget(self) -> Budget:
        """The loads, as the policy in force sees them."""
        return self.active.budget

    def swap_policy(self, policy: Policy) -> None:
        """Decide with another policy from the next query on; loads and counters stay.

        Raises ConfigError if it cannot be beside canary and shadow; nothing has changed then.
        """
        shadow = None if self.shadow is None else self.shadow.policy
        want = wanted(policy, self._canary_policy, shadow)
        same = alike(policy, self.policy)
        self.active.swap(policy)
        self._drop_stand_in()
        if not same:
            # It compares with the policy in force: with another one, from the beginning.
            self._set_shadow(shadow)
        self._changed(want)

    def set_canary(self, policy: Policy | None, share: float = 0.0) -> None:
        """Give a share (0 to 1) of the affinity keys to a second policy; None: no longer.

        Raises ConfigError if the two cannot be had side by side; nothing has changed then.
        """
        want = wanted(self.policy, policy, None if self.shadow is None else self.shadow.policy)
        if self.canary is not None:
            self.canary.seat.close()
        self.canary = None if policy is None else Canary(self.active.beside(policy), share)
        self._drop_stand_in()  # made again if it was not the canary that failed
        self._changed(want)

    def set_shadow(self, policy: Policy | None) -> None:
        """Let a second policy look on; None: no longer.

        Raises ConfigError if the two cannot be had side by side; nothing has changed then.
        """
        want = wanted(self.policy, self._canary_policy, policy)
        self._set_shadow(policy)
        self._changed(want)

    def _set_shadow(self, policy: Policy | None) -> None:
        since = self.policy_version + 1
        if self.shadow is not None:
            self.shadow.close()
        self.shadow = None if policy is None else Shadow(policy, self.active, since)

    def _drop_stand_in(self) -> None:
        if self._stand_in is not None:
            self._stand_in.close()
        self._stand_in = None

    @property
    def _canary_policy(self) -> Policy | None:
        return None if self.canary is None else self.canary.seat.policy

    def _changed(self, want: wire.Want) -> None:
        """Begin a new version, on which the hooks tell the past again."""
        self.want = want
        self.policy_version += 1
        self._seat_others()

    def _seat_others(self) -> None:
        canary = None if self.canary is None else self.canary.seat
        self._others = tuple(seat for seat in (canary, self._stand_in) if seat is not None)

    def report(self, report: wire.LoadReport, now: float) -> None:
        """Take in a load report. Raises PeerError."""
        self.active.report(report, now)
        for seat in self._others:
            seat.report(report, now)

    def handle(self, query: wire.Query, now: float) -> wire.Reply:
        """Decide every request of a query, each seeing those before it.

        now: monotonic seconds. Raises PeerError, after which nothing was decided.
        """
        if query.requests and not query.ranks:
            raise PeerError("no_live_rank", "the query names no live rank")
        view = self.active.meet(query, now)
        for seat in self._others:
            seat.meet(query, now)
        tally = self._tally(query)
        self.expected = []
        ranks: list[int] = []
        reasons: list[str] = []
        for facts in query.requests:
            position, reason = self._place(facts, tally)
            ranks.append(view.ranks[position])
            reasons.append(reason)
        if not view.known:
            tally.unguarded += len(ranks)
        return wire.Reply(
            wire.VERSION,
            query.seq,
            self.boot,
            self.active.name,
            self.policy_version,
            ranks,
            reasons,
            self.want,
        )

    def _place(self, facts: wire.RequestFacts, tally: Tally) -> tuple[int, str]:
        """Decide one request, account it, and let every policy take note of it."""
        seat, role = self.active, "active"
        if self.canary is not None and self.canary.takes(facts):
            seat, role = self.canary.seat, "canary"
        position, reason, preferred = seat.choose(facts) or self._instead_of(seat, facts)
        expected = seat.expected(facts, position)
        self.expected.append(expected)
        self.active.take(facts, position)
        for other in self._others:
            other.take(facts, position)
        if self._others:
            self._turn(seat.here.view.cursor)
        tally.decisions[seat.name][reason] += 1
        spilled = reason in SPILLS
        if spilled:
            ranks = seat.here.view.ranks
            tally.count_spill(ranks[preferred], ranks[position])
        tally.roles[role].add(facts.tokens, expected, spilled=spilled)
        return position, reason

    def _turn(self, cursor: int) -> None:
        """Equal ranks take turns whichever policy gives them one."""
        for seat in (self.active, *self._others):
            seat.here.view.cursor = cursor

    def _instead_of(self, seat: Seat, facts: wire.RequestFacts) -> Choice:
        """The default policy decides for one that failed; if it failed itself, loads do."""
        choice = None
        if type(seat.policy) is not KvAffinity:  # one derived from it may fail where it does not
            other = self._substitute()
            choice = other.choose(facts)
            seat.here.view.cursor = other.here.view.cursor
        if choice is None:
            choice = Choice(fewest_requests(seat.here.view, facts.tokens), Reason.POLICY_ERROR)
        return Choice(choice.position, Reason.POLICY_ERROR)

    def _substitute(self) -> Seat:
        if type(self.policy) is KvAffinity:
            return self.active  # the canary failed
        if self._stand_in is None:
            # From now on it learns what is decided; what was before, the hook tells: the last rank
            # of each key.
            self._stand_in = self.active.beside(default_policy())
            self._seat_others()
        return self._stand_in

    def _failed(self, error: PolicyError) -> None:
        # Looked up at each fault: it may be set after the dispatcher is made.
        self.on_policy_error(error)

    def _discard(self, memory: object) -> None:
        self.on_discard(memory)

    def _forget(self, instance: str) -> None:
        self.tallies.pop(instance, None)

    def _tally(self, query: wire.Query) -> Tally:
        tally = self.tallies.get(query.instance)
        if tally is None:
            tally = self.tallies[query.instance] = Tally()
        tally.hear(query)
        return tally
