"""A second policy that decides every request too, without acting: what would it do?

It sees the loads as they are, but remembers its own decisions: where it would have sent a session,
and so what it would find cached there. Whoever does not tell what is cached (round_robin, say) is
judged by the index of `kv_affinity`, fed with what it decided.
"""

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

from sidecar import wire
from sidecar.errors import PeerError
from sidecar.hashing import key_hash, normalize_key
from sidecar.orders import Compared
from sidecar.policies import SPILLS, Choice, KvAffinity, Policy, Reason, make_policy
from sidecar.policies.least_loaded import fewest_requests
from sidecar.seat import Expected, Seat
from sidecar.tally import Role

MAX_KEYS = 131_072
"""As many keys as the hook remembers the last rank of."""
SLICE = 4
"""Requests decided before others may be served: about 0.2 ms."""
RECENT_SECONDS = 300.0
"""How long what was assigned to a rank counts in the imbalance, an e-folding time."""


class Assigned:
    """Tokens that ranks had to compute lately for what was assigned to them."""

    def __init__(self) -> None:
        self._work: dict[int, float] = {}
        self._at = 0.0

    def add(self, rank: int, uncached: float, now: float) -> None:
        """Count work, in prompt tokens. now: monotonic seconds."""
        if now > self._at:
            fade = math.exp((self._at - now) / RECENT_SECONDS)
            self._work = {r: tokens * fade for r, tokens in self._work.items() if tokens * fade > 1}
            self._at = now
        self._work[rank] = self._work.get(rank, 0.0) + uncached

    def imbalance(self, ranks: list[int]) -> float:
        """Most over mean of those ranks; 1 is even, and what it is before anything was assigned."""
        work = [self._work.get(rank, 0.0) for rank in ranks]
        total = sum(work)
        return max(work) * len(work) / total if total else 1.0


class Comparison:
    """Both policies on one instance since the shadow began."""

    def __init__(self) -> None:
        self.agreed = self.disagreed = 0
        self.roles = {"active": Role(), "shadow": Role()}
        self.assigned = {"active": Assigned(), "shadow": Assigned()}

    def add(self, role: str, facts: wire.RequestFacts, expected: Expected, spilled: bool) -> None:
        """Count one decision of one role."""
        self.roles[role].add(facts.tokens, expected, spilled=spilled)


class Judged:
    """The decisions of one policy, and what they would find cached."""

    def __init__(self, seat: Seat, judge: Seat | None) -> None:
        self.seat = seat
        self.seats = (seat,) if judge is None else (seat, judge)
        self._judge = seat if judge is None else judge

    def meet(self, query: wire.Query, now: float) -> None:
        """Take in what a query tells. Raises PeerError."""
        for seat in self.seats:
            seat.meet(query, now)

    def take(self, facts: wire.RequestFacts, position: int) -> Expected:
        """Take note of a decision; tokens expected at the rank chosen, and at the best."""
        expected = self._judge.expected(facts, position) or (0.0, 0.0)
        for seat in self.seats:
            seat.take(facts, position)
        return expected


def _tells(policy: Policy) -> bool:
    return hasattr(policy, "expected")


def _judge(policy: Policy, active: Policy) -> Policy:
    """Whose index says what is cached: one that is there already wants no other hashes."""
    for one in (active, policy):
        if _tells(one):
            # Not itself: it may remember more than stands in the memory of an instance.
            return type(one)(one.params)
    return make_policy(KvAffinity.name)


def wants(policy: Policy, active: Policy) -> tuple[wire.Want, ...]:
    """What the hooks must tell for `policy` to be the shadow of `active`."""
    return policy.want, _judge(policy, active).want


class Shadow:
    """The second policy at work. active: the seat whose loads it begins with.

    since: first `policy_version` that it follows; what was decided before is in those loads.
    """

    def __init__(self, policy: Policy, active: Seat, since: int = 0) -> None:
        self._since = since
        judge = _judge(policy, active.policy)
        own = active.beside(policy)
        self._own = Judged(own, None if _tells(policy) else active.beside(judge))
        self._real = Judged(active.beside(judge), None)
        self.comparisons: dict[str, Comparison] = {}
        self._last: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()
        """(instance, key) -> rank that it went to, and would have gone to."""
        own.budget.on_forget = self._forget
        self.told: Callable[[str, wire.RequestFacts, int, str, Expected], None] | None = None
        """For a replay: role, request, rank id, reason and what is expected of each decision."""

    @property
    def seat(self) -> Seat:
        """Where the policy sits that looks on."""
        return self._own.seat

    @property
    def policy(self) -> Policy:
        """The policy that looks on."""
        return self.seat.policy

    def compared(self) -> Compared:
        """Both policies since the shadow began."""
        all_of = list(self.comparisons.values())
        mine = [one.roles["shadow"] for one in all_of]
        real = [one.roles["active"] for one in all_of]
        agreed = sum(one.agreed for one in all_of)
        return Compared(
            agreed + sum(one.disagreed for one in all_of),
            agreed,
            sum(role.prompt_tokens for role in mine),
            sum(role.expected_tokens for role in mine),
            sum(role.expected_tokens for role in real),
            sum(role.spills for role in mine),
            sum(role.spills for role in real),
        )

    def close(self) -> None:
        """Let go of all that it remembers."""
        for seat in (*self._real.seats, *self._own.seats):
            seat.close()

    def report(self, report: wire.LoadReport, now: float) -> None:
        """Take in a load report that was taken in already."""
        for seat in (*self._real.seats, *self._own.seats):
            with contextlib.suppress(PeerError):  # it knows a newer one already
                seat.report(report, now)
        self._call_witness(report.instance)

    def _call_witness(self, name: str) -> None:
        """How far an index is to be trusted, reports show by what was really sent."""
        real = self._real.seat.budget.instances.get(name)
        for seat in self._own.seats:
            instance = seat.budget.instances.get(name)
            if real is not None and instance is not None:
                instance.view.witness = real.view.memory

    def follow(self, query: wire.Query, reply: wire.Reply, now: float) -> Iterator[None]:
        """Decide what was decided; yields now and then, so that others may be served between."""
        if reply.policy_version < self._since:
            return
        try:
            self._own.meet(query, now)
            self._real.meet(query, now)
            self._call_witness(query.instance)
        except PeerError:
            return  # its budget forgot or never met what ours knows: the next query will do
        view = self._own.seat.here.view
        found = self.comparisons.setdefault(query.instance, Comparison())
        for done, (facts, rank, reason) in enumerate(
            zip(query.requests, reply.ranks, reply.reasons, strict=True), 1
        ):
            self._decide(found, facts, view.position[rank], reason, now)
            if done % SLICE == 0:
                yield

    def _decide(
        self, found: Comparison, facts: wire.RequestFacts, real: int, reason: str, now: float
    ) -> None:
        seat = self._own.seat
        view = seat.here.view
        mine = self._as_ours(seat.here.name, facts)
        choice = seat.choose(mine) or Choice(
            fewest_requests(view, facts.tokens), Reason.POLICY_ERROR
        )
        for role, judged, said, position, why in (
            ("shadow", self._own, mine, choice.position, choice.reason),
            ("active", self._real, facts, real, reason),
        ):
            expected = judged.take(said, position)
            found.add(role, facts, expected, why in SPILLS)
            if self.told is not None:
                self.told(role, facts, view.ranks[position], why, expected)
            uncached = max(0.0, facts.tokens - expected[0])
            found.assigned[role].add(view.ranks[position], uncached, now)
        if choice.position == real:
            found.agreed += 1
        else:
            found.disagreed += 1
        self._remember(seat.here.name, facts, view.ranks[real], view.ranks[choice.position])

    def _as_ours(self, instance: str, facts: wire.RequestFacts) -> wire.RequestFacts:
        """The facts, with the last rank that we would have sent the key to."""
        slot = _slot(instance, facts)
        last = None if slot is None else self._last.get(slot)
        # What went elsewhere since we saw it (an explicit rank, the hook alone), went there for us.
        if last is None or last[0] != facts.last_rank or last[1] == facts.last_rank:
            return facts
        return wire.RequestFacts(
            facts.routing_key,
            facts.namespace,
            facts.tokens,
            facts.prefix_hash,
            facts.block_hashes,
            last[1],
            facts.last_age_ms,
        )

    def _remember(self, instance: str, facts: wire.RequestFacts, real: int, ours: int) -> None:
        slot = _slot(instance, facts)
        if slot is not None:
            self._last[slot] = (real, ours)
            self._last.move_to_end(slot)
            if len(self._last) > MAX_KEYS:
                self._last.popitem(last=False)

    def _forget(self, instance: str) -> None:
        self.comparisons.pop(instance, None)


def _slot(instance: str, facts: wire.RequestFacts) -> tuple[str, int] | None:
    key = facts.routing_key and normalize_key(facts.routing_key)
    return (instance, key_hash(key)) if key else None
