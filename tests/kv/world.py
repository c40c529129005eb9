"""Things that happen to a server at random, and a policy whose costs are checked all the while."""

from math import inf
from random import Random

import pytest

from sidecar.budget import Budget
from sidecar.dispatcher import Dispatcher
from sidecar.loads import LoadView
from sidecar.policies import Choice
from sidecar.policies.kv.memory import Memory
from sidecar.policies.kv.queue import PrefillQueue
from sidecar.policies.kv_affinity import KvAffinity, KvAffinityParams
from sidecar.wire import RequestFacts
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
        typical = max(0, report.admitted_tokens - report.cached_tokens) / report.received
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
        begin = memory.clock._begins[-1]
        since = max(footprint.oldest, memory.clock.at(begin - params.recent_seconds))
        recent = report.recent_uncached_tokens if report is not None else 0
        recent += sum(
            node.end - node.begin
            for node in memory.index._recent
            if node.seen.get(rank, -1) >= since
        )
        cost = waiting(view, position) + params.request_tokens * view.requests[position]
        serving.append(cost)
        placing.append(cost + params.recent_weight * recent)
    return serving, placing


class Checked(KvAffinity):
    """The policy, checked at each decision."""

    decisions = 0

    def new_memory(self) -> Memory:
        memory = super().new_memory()
        memory.late_refresh = 0.0  # what is late is guessed anew at each decision
        return memory

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        choice = super().choose(facts, view)
        serving, placing = costs_anew(self.params, view)
        costs = view.memory.costs
        assert costs.serving == pytest.approx(serving)
        assert costs.placing == pytest.approx(placing)
        assert view.position == {rank: n for n, rank in enumerate(view.ranks)}
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
