"""Which rank a reason allows: the rule, per policy, by which a key stays or moves.

kv_affinity: a key's home is its last rank, if that is live and its cache was not emptied since;
else the rank of the key's first request in the same query; else it has none. `affinity_hit` is at
home; `placed` means that there is none; `spill`, `stale_skip` and `replica_hit` leave it.
prefix_affinity: a key's home is its rendezvous rank among the live ones, whatever its last rank
was: it moves by `spill` and `stale_skip`, and back by `affinity_hit`.
The others know no keys: each has one reason, and any rank will do that it prefers by load.

`stale_skip` needs a home that is silent; `spill` a home with some load. No policy takes a rank that
was silent for a while as long as another reports; but ranks that fell silent together are not
stuck, nor for a while after one of them is heard again.
"""

from typing import TYPE_CHECKING, NamedTuple

from sidecar.hashing import key_hash, normalize_key, preferred
from sidecar.policies import Reason
from sidecar.wire import Query, RequestFacts
from tests.support import STALE_SECONDS

if TYPE_CHECKING:
    from tests.model.daemon import Daemon

LATE = 1.1
"""A rank is called stale at the latest a tenth of the limit after it."""
KV = {Reason.AFFINITY_HIT, Reason.PLACED, Reason.SPILL, Reason.STALE_SKIP, Reason.REPLICA_HIT}
PREFIX = {Reason.AFFINITY_HIT, Reason.SPILL, Reason.STALE_SKIP}
ONLY = {
    "round_robin": Reason.ROUND_ROBIN,
    "total_requests": Reason.LEAST_REQUESTS,
    "total_tokens": Reason.LEAST_TOKENS,
}
MOVE_TOKENS = 16_384


class Decision(NamedTuple):
    """One request, and what was made of it. first: ranks of the query's keys so far."""

    daemon: "Daemon"
    query: Query
    facts: RequestFacts
    rank: int
    reason: str
    now: float
    first: dict[bytes, int]

    @property
    def policy(self) -> str:
        return self.daemon.dispatcher.policy.name

    def silent(self, rank: int, factor: float = 1.0) -> bool:
        """Whether a rank reported, and not for so many times the limit."""
        reported = rank in self.daemon.reported_at
        return reported and self.daemon.silent(rank, self.now) > factor * STALE_SECONDS

    def busy(self, rank: int) -> int:
        """Requests of a rank in the view, after the decision."""
        instance = self.daemon.instance
        assert instance is not None
        at = instance.view.position[rank]
        return instance.view.requests[at] or bool(instance.view.prefilling[at])


def check(made: Decision) -> None:
    """Raise AssertionError if the reason does not allow the rank."""
    _check_stale(made)
    if made.policy in ONLY:
        assert made.reason == ONLY[made.policy]
        if made.policy == "total_requests" and len(made.query.requests) == 1:
            _check_fewest(made)
        return
    if normalize_key(made.facts.routing_key):
        home = _kv_home(made) if made.policy == "kv_affinity" else _hash_home(made)
        _check_home(made, home)


def _check_stale(made: Decision) -> None:
    """A rank that is silent is not taken while another one has been speaking for a while."""
    daemon, live = made.daemon, made.query.ranks
    fresh = [r for r in live if daemon.silent(r, made.now) <= STALE_SECONDS / 2]
    going = made.now - daemon.reporting_since > STALE_SECONDS * (LATE - 0.5)
    assert not (made.silent(made.rank, LATE) and fresh and going), f"rank {made.rank} is silent"


def _kv_home(made: Decision) -> int | None:
    facts = made.facts
    emptied = made.daemon.emptied_at.get(facts.last_rank, float("-inf"))
    if facts.last_rank in made.query.ranks and made.now - facts.last_age_ms / 1000 >= emptied:
        return facts.last_rank
    return made.first.get(facts.routing_key)


def _hash_home(made: Decision) -> int:
    return preferred(key_hash(normalize_key(made.facts.routing_key)), made.query.ranks)


def _check_home(made: Decision, home: int | None) -> None:
    reason, rank = made.reason, made.rank
    assert reason in (KV if made.policy == "kv_affinity" else PREFIX)
    if home is None:
        assert reason == Reason.PLACED
        return
    assert reason != Reason.PLACED, f"it belongs to rank {home}"
    assert (rank == home) == (reason == Reason.AFFINITY_HIT), f"{reason}: {home} -> {rank}"
    if reason == Reason.STALE_SKIP:
        assert made.silent(home), f"rank {home} is not silent"
    if reason == Reason.SPILL and made.policy == "prefix_affinity":
        assert made.busy(home) > 1
    if reason == Reason.SPILL and made.facts.tokens < MOVE_TOKENS:
        assert made.busy(home), f"rank {home} is idle"


def _check_fewest(made: Decision) -> None:
    instance = made.daemon.instance
    assert instance is not None
    view = instance.view
    at = view.position[made.rank]
    others = [n for n, ok in zip(view.requests, view.usable, strict=True) if ok]
    assert view.requests[at] - 1 <= min(others)
