"""Costs are kept piece by piece: after anything that happens they must equal those made anew."""

from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.budget import Budget
from sidecar.dispatcher import Dispatcher
from sidecar.loads import LoadView
from sidecar.policies import Choice, make_policy
from sidecar.policies.kv.queue import PrefillQueue
from sidecar.policies.kv_affinity import KvAffinity, KvAffinityParams
from sidecar.wire import RequestFacts
from tests.kv.reference import check
from tests.kv.server import Server, past, prompt
from tests.support import STALE_SECONDS


def waiting(view: LoadView, position: int) -> float:
    """Tokens that wait on one rank, from the requests that its queue remembers."""
    memory = view.memory
    rank, queued, queue = memory.ranks[view.ranks[position]], view.queued[position], PrefillQueue()
    for sent in list(rank.queue._sent)[-queued or len(rank.queue) :]:
        queue.add(sent)
    report, base = rank.engine.report, view.prefilling[position]
    if report is not None and report.received:
        typical = (report.admitted_tokens - report.cached_tokens) / report.received
        base += typical * (queued - len(queue))
    credit, rate = rank.engine.credit, memory.rate.value
    return queue.drained(base, view.in_flight[position], rate, credit, view.now)


def costs_anew(params: KvAffinityParams, view: LoadView) -> tuple[list[float], list[float]]:
    """Of serving and of placing, for each position."""
    serving, placing, memory = [], [], view.memory
    for position, rank in enumerate(view.ranks):
        if not view.usable[position]:
            serving.append(inf)
            placing.append(inf)
            continue
        known = memory.ranks[rank]
        report, footprint = known.engine.report, known.footprint
        since = max(footprint.oldest, memory.clock.span - round(params.recent_seconds) + 1)
        recent = report.recent_uncached_tokens if report is not None else 0
        recent += sum(
            node.end - node.begin
            for node in memory.index._recent
            if node.seen.get(rank, -1) >= since
        )
        tokens, requests = waiting(view, position), view.requests[position]
        serving.append(tokens + params.request_tokens * requests)
        placing.append(tokens + params.session_tokens * requests + params.recent_weight * recent)
    return serving, placing


class Checked(KvAffinity):
    """The policy, checked at each decision."""

    decisions = 0

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        choice = super().choose(facts, view)
        serving, placing = costs_anew(self.params, view)
        costs = view.memory.costs
        assert costs.serving == pytest.approx(serving)
        assert costs.placing == pytest.approx(placing)
        assert view.memory.position == {rank: n for n, rank in enumerate(view.ranks)}
        self.decisions += 1
        return choice


def fail(error: Exception) -> None:
    raise error


def checked(**params: float) -> Dispatcher:
    policy = Checked(KvAffinityParams(**params))
    return Dispatcher(policy, Budget(STALE_SECONDS, 4), 1, fail)


class World:
    """Things that happen to a server; each takes random numbers."""

    def __init__(self, dispatcher: Dispatcher, drawn: Random, instance: str = "a") -> None:
        self.all = [0, 5, 9, 12]
        self.server = Server(dispatcher, list(self.all), instance)
        self.drawn = drawn
        self.silent: set[int] = set()
        self.replies: list[list[int]] = []
        self.sent: dict[int, list[int]] = {rank: [] for rank in self.all}
        """Prompt tokens of what the sidecar sent there."""
        self.limit = 0

    def facts(self) -> RequestFacts:
        drawn = self.drawn
        key = drawn.choice(["", f"key-{drawn.randrange(4)}"])
        stem, size = f"{drawn.randrange(4)}", drawn.choice([0, 10, 64, 100, 700, 3000])
        return prompt(stem, size, key, shared="system", shared_tokens=drawn.choice([0, 256]))

    def rank(self) -> int:
        return self.drawn.choice(self.server.ranks)

    def ask(self) -> None:
        requests = [self.facts() for _ in range(self.drawn.choice([1, 1, 2, 5]))]
        self.replies.append(self.server.put(*requests))
        for facts, rank in zip(requests, self.replies[-1], strict=True):
            self.sent[rank].append(facts.tokens)
        if self.limit:
            self.server.view.memory.index.limit = self.limit

    def report(self) -> None:
        drawn, rank = self.drawn, self.rank()
        if rank in self.silent:
            return
        scheduler = self.server.schedulers[rank]
        scheduler.take_in(drawn.choice([None, None, 0, 1]))
        scheduler.add(cached_tokens=drawn.choice([0, 0, 10, 200]))
        self.server.say(
            rank,
            running=drawn.randrange(5),
            waiting=drawn.choice([0, 0, 1, 3, 20]),
            prefilling_tokens=drawn.choice([0, 0, 500]),
            recent_uncached_tokens=drawn.choice([0, 1000, 5000]),
            capacity_tokens=drawn.choice([2000, 4000]),
        )

    def tick(self) -> None:
        self.server.now += self.drawn.choice([0.01, 0.1, 0.3, 0.6, 0.6, 1.1, 3.0])

    def reports(self) -> None:
        """Every rank that can reports: none is stale."""
        for rank in set(self.server.ranks) - self.silent:
            self.server.report(rank)

    def silence(self) -> None:
        self.silent ^= {self.rank()}

    def pinned(self) -> None:
        """Requests that went past the sidecar: the next query's counters tell."""
        self.server.send(self.rank(), self.drawn.choice([0, 10, 500]))

    def history(self) -> None:
        told = [past(self.facts(), self.rank(), self.drawn.choice([0.5, 2.0, 90.0])) for _ in "ab"]
        self.server.ask(history=told)

    def flush(self) -> None:
        rank = self.rank()
        self.server.schedulers[rank].add(flushes=1)
        if rank not in self.silent:
            self.server.report(rank)

    def restart(self) -> None:
        self.server.restart(self.rank())

    def controller(self) -> None:
        """Another controller process, which counts anew."""
        self.server.epoch += 1
        self.server.sent = dict.fromkeys(self.all, 0)
        self.server.sent_tokens = dict.fromkeys(self.all, 0)

    def ranks(self) -> None:
        """Other ranks are live; a probe tells it, or the next request."""
        self.server.ranks = sorted(self.drawn.sample(self.all, self.drawn.randrange(1, 5)))
        if self.drawn.choice([True, False]):
            self.server.ask()


def live(world: World, steps: int, names: list[str]) -> None:
    """Let things happen; in between, the queues remember the last that were sent."""
    for _ in range(steps):
        getattr(world, world.drawn.choice(names))()
        memory = world.server.dispatcher.budget.instance(world.server.instance, 0).view.memory
        for rank, known in memory.ranks.items() if memory is not None else ():
            told = [sent.cached + sent.uncached for sent in known.queue._sent]
            assert told == world.sent[rank][len(world.sent[rank]) - len(told) :]


PLAIN = ["ask", "ask", "ask", "report", "report", "tick"]
EVENTS = ["silence", "pinned", "history", "flush", "restart", "controller", "ranks"]
STALE = {
    "pinned": "counters that a query corrects do not mark their rank",
    "history": "what is told of the past does not mark its rank",
    "flush": "a new span, begun by a flush, ages all ranks and marks one",
    "restart": "a new span, begun by a restart, ages all ranks and marks one",
    "limit": "the index forgets what other ranks hold and does not mark them",
    "unheard": "what ranks without reports are assumed to have changes with the others",
}
SEEDS, STEPS = st.integers(0, 1 << 32), st.integers(1, 150)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(event, marks=[pytest.mark.xfail(strict=True, reason=STALE[event])])
        if event in STALE
        else event
        for event in ["ask", "limit", "unheard", *EVENTS]
    ],
)
def test_costs_are_those_made_anew(event: str) -> None:
    @given(SEEDS, STEPS)
    def run(seed: int, steps: int) -> None:
        dispatcher = checked(recent_seconds=3.0)
        world, things = World(dispatcher, Random(seed)), list(PLAIN)
        if event == "limit":
            world.limit = 60
        elif event == "unheard":
            world.silent = {5, 12}
        else:
            world.reports()
            things += ["reports", event, event]
        world.ask()
        live(world, steps, things)
        world.ask()
        assert dispatcher.policy.decisions
        check(world.server.view.memory.index)

    run()


@pytest.mark.xfail(strict=True, reason="all of the above")
@given(SEEDS, STEPS)
def test_costs_after_all_that_can_happen(seed: int, steps: int) -> None:
    world = World(checked(recent_seconds=3.0), Random(seed))
    live(world, 2 * steps, [*PLAIN, *PLAIN, "reports", *EVENTS])


@given(SEEDS, STEPS)
def test_instances_never_mix(seed: int, steps: int) -> None:
    """Each decides as if it were alone."""
    together, alone = checked(), checked()
    worlds = [World(together, Random(seed), "a"), World(together, Random(seed + 1), "b")]
    single, turns = World(alone, Random(seed + 1), "b"), Random(seed)
    things = [*PLAIN, "silence", "controller", "ranks"]
    for _ in range(steps):
        if turns.random() < 0.5:
            live(worlds[0], 1, things)
        else:
            live(worlds[1], 1, things)
            live(single, 1, things)
    assert worlds[1].replies == single.replies
    memories = [instance.view.memory for instance in together.budget.instances.values()]
    assert len({id(memory) for memory in memories if memory is not None}) in (0, 1, len(memories))


@given(SEEDS, STEPS, STEPS)
def test_a_policy_that_went_and_came_back_knows_nothing_old(seed, before: int, after: int) -> None:
    dispatcher = checked()
    world, policy = World(dispatcher, Random(seed)), dispatcher.policy
    live(world, before, PLAIN)
    world.ask()
    dispatcher.swap_policy(make_policy("prefix_affinity"))
    assert world.server.view.memory is None
    live(world, before, PLAIN)
    dispatcher.swap_policy(policy)
    world.ask()
    # Reports that came meanwhile were not heard.
    assert all(rank.engine.report is None for rank in world.server.view.memory.ranks.values())
    live(world, after, PLAIN)
    check(world.server.view.memory.index)


@pytest.mark.xfail(strict=True, reason="a memory goes on with the parameters it was made with")
@pytest.mark.parametrize("name", ["request_tokens", "session_tokens", "recent_weight"])
def test_new_parameters_hold_from_the_next_decision_on(name: str) -> None:
    dispatcher = checked()
    world = World(dispatcher, Random(1))
    live(world, 50, PLAIN)
    changed = getattr(dispatcher.policy.params, name) * 3
    dispatcher.swap_policy(Checked(KvAffinityParams(**{name: changed})))
    live(world, 50, PLAIN)
    assert dispatcher.policy.decisions


@pytest.mark.xfail(strict=True, reason="a rank's queue is cut to that of the rank in its old place")
def test_a_report_between_a_probe_with_other_ranks_and_the_next_decision() -> None:
    dispatcher = checked()
    server = Server(dispatcher, [0, 1, 2])
    server.finish()
    server.put(prompt("p", 1000, "k", last_rank=1, last_age_ms=10))
    server.ranks = [1, 2]
    server.ask()
    server.report(1)  # it has not read the request yet
    server.ask(prompt("q", 10))
    assert server.view.memory.costs.serving[0] == 1000 + dispatcher.policy.params.request_tokens
