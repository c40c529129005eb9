"""Does a restarted sidecar decide as one that was never restarted?

    python -m bench.restart [--workload NAME ...] [--seeds 2] [--every 20] [--json]

MODEL, virtual time. One sidecar decides all along. Every 20 s another of the same policy starts
with nothing known, as after a restart: it gets the same reports (the last one of a rank that has no
news as a heartbeat) and the same queries, with the parts of its history that the hook's own class
tells a new sidecar. What it would decide is compared; what is dispatched, and learned by both, is
the first one's decision. `without history` is told no past. A tie: the two ranks cost the same in
its eyes. To reach: 99 % of the requests equal from one second after the restart on.
"""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from bench import report
from bench.arms.sidecar import SidecarChooser
from bench.cells import server_from
from bench.model.cluster import Cluster
from bench.model.server import ServerSpec
from bench.workloads import TRACES, make_workload
from sglang_hook.memory import History
from sidecar import hashing, wire
from sidecar.budget import Budget
from sidecar.dispatcher import Dispatcher
from sidecar.loads import LoadView
from sidecar.policies import Choice, Policy, make_policy
from sidecar.policies.kv_affinity import KvAffinity
from sidecar.wire import LoadReport, Query, Reply, RequestFacts

WORKLOADS = (
    *("agentic-trace-64:sessions=120", "mooncake:requests=2000"),
    *("short-chats", "published-16x32", "hot-key"),
)
POLICIES = ("kv_affinity", "prefix_affinity")
HEARTBEAT = 0.25
"""Seconds within which the hook repeats an unchanged report."""
SETTLED = 1.0
"""Seconds after a restart."""


class Tally:
    """How often a restarted sidecar decided as the other."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[bool, str]] = Counter()
        """(settled, reason of the one that was not restarted) -> requests."""
        self.equal: Counter[tuple[bool, str]] = Counter()
        self.ties: Counter[bool] = Counter()
        """Of those that are not equal."""
        self.unequal: Counter[str] = Counter()
        """Of the settled ones: both reasons -> requests."""

    def share(self, settled: bool, reason: str = "") -> float | None:
        """Equal ones, of all or of one reason; None: there are none."""
        mine = [key for key in self.asked if key[0] == settled and reason in ("", key[1])]
        asked = sum(self.asked[key] for key in mine)
        return round(sum(self.equal[key] for key in mine) / asked, 4) if asked else None

    def requests(self, settled: bool) -> int:
        return sum(n for key, n in self.asked.items() if key[0] == settled)

    def summary(self) -> dict[str, Any]:
        told: dict[str, Any] = {"unequal": dict(self.unequal.most_common())}
        for name, settled in (("first_second", False), ("later", True)):
            shares = {r: self.share(s, r) for s, r in sorted(self.asked) if s == settled}
            told[name] = {"requests": self.requests(settled), "equal": self.share(settled)}
            told[name] |= {"ties": self.ties[settled], "by_reason": shares}
        return told


class Shadow:
    """A policy whose choices are noted and not carried out: those of another are."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.want, self.params = policy.name, policy.want, policy.params
        self.real = self.own = Choice(0, "")
        self.cursor, self.tie = -1, False
        """Where the turns of the other stand after its choice; whether ours is as good as it."""

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        own = self.own = self._policy.choose(facts, view)
        self.tie = self.real.position != own.position and self._as_good(facts, view)
        view.cursor = self.cursor
        return own._replace(position=self.real.position)

    def _as_good(self, facts: RequestFacts, view: LoadView) -> bool:
        if not isinstance(self._policy, KvAffinity):
            return False
        offers = {offer.rank: offer.figures for offer in self._policy.explain(facts, view).offers}
        a, b = offers[view.ranks[self.own.position]], offers[view.ranks[self.real.position]]
        return all(abs(a[by] - b[by]) < 1 for by in ("placing_tokens", "serving_tokens"))


class Restarted:
    """A sidecar that started at `since`."""

    def __init__(self, policy: Policy, history: History | None, since: float, tally: Tally) -> None:
        self._dispatcher = Dispatcher(policy, Budget(1e9, 1), boot=2 + int(since * 1000))
        self._shadow = Shadow(policy)
        self._dispatcher.active.policy = self._shadow  # type: ignore[assignment]  # it still learns
        self._history, self._since, self._tally = history, since, tally

        self.report = self._dispatcher.report

    def greet(self, query: Query, now: float) -> None:
        """What the hook sends when nobody answered for a while."""
        reply = self._dispatcher.handle(msgspec.structs.replace(query, requests=[]), now)
        if self._history is not None:
            self._history.missed()
            self._history.heard(reply)

    def follow(self, query: Query, real: Choice, cursor: int, now: float) -> None:
        """Decide a query that has been decided."""
        shadow, tally, settled = self._shadow, self._tally, now - self._since >= SETTLED
        shadow.real, shadow.cursor = real, cursor
        query = msgspec.structs.replace(query)
        if self._history is not None:
            query.history = self._history.part(query.seq, lambda: now)
            if len(wire.encode(query)) > wire.MAX_MESSAGE_BYTES:
                query.history = self._history.withdraw()
        reply = self._dispatcher.handle(query, now)
        if self._history is not None:
            self._history.heard(reply)
        equal = shadow.own.position == real.position
        tally.asked[settled, real.reason] += 1
        tally.equal[settled, real.reason] += equal
        tally.ties[settled] += shadow.tie
        if settled and not equal:
            tally.unequal[f"{real.reason} -> {shadow.own.reason}{' (tie)' * shadow.tie}"] += 1


class Restarting:
    """Stands in for the arm's dispatcher: it decides, the restarted ones follow."""

    def __init__(
        self, first: Dispatcher, make: Callable[[], Policy], every: float, tallies: dict[str, Tally]
    ) -> None:
        self._first, self._make, self._every, self._tallies = first, make, every, tallies
        self._history, self._next = History(), every
        self._followers: list[Restarted] = []
        self._last: dict[int, LoadReport] = {}
        self._silent: dict[int, float] = {}  # whose heartbeat is missed still -> when it comes

    def report(self, told: LoadReport, now: float) -> None:
        self._first.report(told, now)
        self._last[told.rank] = told
        self._silent.pop(told.rank, None)
        for follower in self._followers:
            follower.report(told, now)

    def handle(self, query: Query, now: float) -> Reply:
        if now >= self._next:
            self._restart(query, now)
            self._next += self._every * (1 + (now - self._next) // self._every)
        for rank in [rank for rank, due in self._silent.items() if now >= due]:
            del self._silent[rank]
            for follower in self._followers:
                follower.report(self._last[rank], now)
        reply = self._first.handle(query, now)
        real = self._first.policy.last  # type: ignore[attr-defined]  # the arm records it
        cursor = self._first.budget.instances[query.instance].view.cursor
        if not self._followers:
            self._history.heard(reply)
        for follower in self._followers:
            follower.follow(query, real, cursor, now)
        (facts,), (rank,) = query.requests, reply.ranks
        if (conversation := conversation_of(facts)) is not None:
            self._history.put(conversation, facts, reply.want, rank, now, decided=True)
        return reply

    def _restart(self, query: Query, now: float) -> None:
        """One started at `_next`; it hears reports since then, and of us with this query."""
        self._followers = [
            Restarted(self._make(), self._history if told else None, now, self._tallies[name])
            for name, told in (("with history", True), ("without history", False))
        ]
        for follower in self._followers:
            follower.greet(query, now)
        late = HEARTBEAT / len(query.ranks)
        self._silent = {r: self._next + late * (i + 1) for i, r in enumerate(self._last)}


def conversation_of(facts: RequestFacts) -> int | None:
    """As the hook's `facts.look_at` does."""
    if facts.routing_key:
        return hashing.key_hash(facts.routing_key)
    return facts.block_hashes[-1] if facts.block_hashes else facts.prefix_hash


def measure(
    workload: str, policy: str, seeds: int, every: float, server: ServerSpec, traces: Path
) -> dict[str, Tally]:
    """Tallies over all seeds and restarts, with and without history."""
    tallies = {"with history": Tally(), "without history": Tally()}
    made = make_workload(workload, traces)
    rank = msgspec.structs.replace(server.rank, page_tokens=made.page_tokens)
    for seed in range(seeds):
        cluster = Cluster(msgspec.structs.replace(server, rank=rank))
        make = partial(make_policy, policy)
        chooser = SidecarChooser(cluster, make())
        twin = Restarting(chooser.dispatcher, make, every, tallies)
        chooser.dispatcher = twin  # type: ignore[assignment]
        cluster.run(made.make(seed), chooser)
    return tallies


def main() -> int:
    add = (parser := report.arguments(__doc__)).add_argument
    add("--workload", action="append", metavar="NAME")
    add("--policy", action="append", metavar="NAME", choices=POLICIES)
    add("--seeds", type=int, default=2, metavar="N")
    add("--every", type=float, default=20.0, metavar="SECONDS", help="between restarts")
    add("--server", action="append", default=[], metavar="FIELD=VALUE")
    add("--traces", type=Path, default=TRACES, metavar="DIR")
    options = parser.parse_args()
    server = server_from(options.server)
    rows = [["workload", "policy", "", "requests", "first second", "requests", "later", "ties"]]
    table: dict[str, dict[str, Any]] = {}
    for workload, policy in product(options.workload or WORKLOADS, options.policy or POLICIES):
        setting = (options.seeds, options.every, server, options.traces)
        for name, tally in measure(workload, policy, *setting).items():
            told = table[f"{workload} {policy} {name}"] = tally.summary()
            rows.append([workload, policy, name, *figures(told)])
    report.show({"model": True, "table": table}, rows, as_json=options.json)
    if not options.json:
        print("later, by reason:")
        for name, told in table.items():
            print(f"{name}: {told['later']['by_reason']}; unequal {told['unequal']}")
    return 0


def figures(told: dict[str, Any]) -> list[str]:
    """A row of the table: how many requests, the share that is equal, and how many are ties."""
    first, later = told["first_second"], told["later"]
    cells = [first["requests"], first["equal"], later["requests"], later["equal"], later["ties"]]
    return ["-" if cell is None else str(cell) for cell in cells]


if __name__ == "__main__":
    sys.exit(main())
