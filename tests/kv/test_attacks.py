"""What an adversary found: stalls, phantoms, memory without bound, prompts that lie."""

from collections import Counter

import pytest

from sidecar.policies import make_policy
from sidecar.policies.kv import memory as memory_module
from sidecar.policies.kv.costs import Costs
from sidecar.policies.kv.footprint import Footprint
from sidecar.policies.kv.index import SEEN_FREE, SEEN_WEIGHT
from sidecar.wire import MAX_RANKS, RequestFacts
from tests.kv.reference import check
from tests.kv.server import DEFAULTS, Scheduler, Server, past, prompt
from tests.support import make_dispatcher, report


def make_server(ranks: int, capacity: int = 0) -> Server:
    server = Server(make_dispatcher("kv_affinity"), list(range(ranks)))
    for rank in range(ranks):
        server.say(rank, capacity_tokens=capacity)
    return server


def counted(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> Counter[str]:
    """How often a method is called from now on."""
    calls: Counter[str] = Counter()
    original = getattr(kind, name)

    def counting(self, *args):
        calls[name] += 1
        return original(self, *args)

    monkeypatch.setattr(kind, name, counting)
    return calls


def test_an_eviction_looks_at_each_span_once() -> None:
    """One long prompt on a rank that was used a little each second."""

    class Spans(dict[int, int]):
        looks = 0

        def __iter__(self):
            Spans.looks += len(self)
            return super().__iter__()

    footprint = Footprint(2000, 0, 0)
    footprint._spans = Spans()
    for span in range(2000):
        footprint.use(1, -1, span)
    footprint.use(2000, -1, 2000)
    assert (footprint.total, footprint.oldest) == (2000, 2000)
    assert Spans.looks <= 2 * 2000


@pytest.mark.parametrize("late", [True, False])
def test_late_ranks_are_guessed_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    server = make_server(200)
    for rank in range(200):
        server.say(rank, prefilling_tokens=500)
    server.now += 0.1
    for rank in range(200):
        server.say(rank, prefilling_tokens=400)
    for rank in range(200):
        server.put(prompt(f"p{rank}", 1000, f"k{rank}", last_rank=rank, last_age_ms=1))
    server.ask(prompt("settle", 10))
    server.now += 0.4 if late else 0.01
    calls = counted(monkeypatch, Costs, "update")
    for n in range(20):
        server.ask(prompt(f"q{n}", 10, "q", last_rank=0, last_age_ms=1))
    # Each decision changes its own rank too; a new span, and a refresh of the view, all once.
    assert calls["update"] <= 20 + (400 if late else 0) + 2 * memory_module.LATE_AT_ONCE


def test_every_late_rank_has_its_turn() -> None:
    server = make_server(100)
    for rank in range(100):
        server.say(rank, prefilling_tokens=50_000)
    server.now += 0.1
    for rank in range(100):
        server.say(rank, prefilling_tokens=49_000)
    for rank in range(100):
        server.put(prompt(f"p{rank}", 1000, f"k{rank}", last_rank=rank, last_age_ms=1))
    server.ask(prompt("settle", 10))
    before = list(server.view.memory.costs.serving)
    for _ in range(20):
        server.now += 0.1
        server.ask(prompt("q", 10, "q", last_rank=0, last_age_ms=1))
    after = server.view.memory.costs.serving
    assert all(new < old for old, new in zip(before[1:], after[1:], strict=True))


def test_a_flush_of_every_rank_ages_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(50, 100_000)
    server.put(prompt("p", 1000))
    ages = counted(monkeypatch, Footprint, "age")
    for rank in range(50):
        server.schedulers[rank].add(flushes=1)
        server.now += 1e-4
        server.report(rank)
    assert ages["age"] <= 2 * 50
    assert all(known.footprint.total == 0 for known in server.view.memory.ranks.values())


def test_strange_ranks_take_no_memory_without_bound() -> None:
    server = make_server(4)
    heard = server.dispatcher.active._learner.heard
    for rank in range(3000):
        heard(report(rank), server.view, server.now)
    assert len(server.view.memory.ranks) <= MAX_RANKS
    server.ranks = [0, 5000]
    server.schedulers[5000] = Scheduler()
    server.sent[5000] = server.sent_tokens[5000] = 0
    server.put(prompt("p", 1000))
    assert 5000 in server.view.memory.ranks


def test_a_rank_long_silent_does_not_set_the_clock_of_a_new_policy() -> None:
    server = make_server(3)
    server.now += 86_400
    server.ranks = [1, 2]
    for rank in (1, 2):
        server.say(rank, capacity_tokens=10**6)
    server.put(prompt("x", 64))
    server.dispatcher.swap_policy(make_policy("kv_affinity", {"request_tokens": 301.0}))
    ages = (1, 100, 300)
    server.ask(history=[past(prompt(f"h{age}", 6400), 1, float(age)) for age in ages])
    clock = server.view.memory.clock
    assert len({clock.at(server.now - age) for age in ages}) == 3


def test_many_ranks_of_a_node_weigh() -> None:
    server = make_server(20)
    facts = prompt("shared", 64)
    for rank in range(20):
        server.ask(history=[past(facts, rank, 1.0)])
    index = server.view.memory.index
    alone = make_server(20)
    alone.ask(history=[past(facts, 0, 1.0)])
    extra = index.weight - alone.view.memory.index.weight
    assert extra == SEEN_WEIGHT * (20 - SEEN_FREE)
    check(index)


def test_what_the_hook_sent_elsewhere_waits_nowhere() -> None:
    """Our answer came too late: the hook's next counters say where the prompt went."""
    server = make_server(2)
    for rank in range(2):
        server.put(prompt(f"{rank}", 50, f"k{rank}", last_rank=rank, last_age_ms=1))
    dispatcher, big = server.dispatcher, prompt("big", 200_000)
    (went,) = dispatcher.handle(server.query([big]), server.now).ranks
    server.send(1 - went, 200_000)
    # What was there before still waits: a queue that only forgets its oldest would keep the prompt
    # that never came.
    server.put(prompt("next", 10, "n", last_rank=1 - went, last_age_ms=1))
    queue = server.view.memory.ranks[went].queue
    assert (len(queue), queue.tokens(1.0), queue.left) == (1, 50, 0)
    assert server.view.memory.costs.serving[went] == 50 + DEFAULTS.request_tokens


@pytest.mark.parametrize("tokens", [0, 5, 64, 100])
def test_a_prompt_has_no_more_blocks_than_tokens(tokens: int) -> None:
    server = make_server(2)
    for _ in range(2):
        server.put(RequestFacts(b"", 0, tokens, None, [11, 22, 33, 44]))
        server.finish()
    memory = server.view.memory
    held = memory.held(RequestFacts(b"", 0, tokens, None, [11, 22, 33, 44]))
    assert all(0 < some <= tokens for some in held.values())
    check(memory.index)


@pytest.mark.parametrize(
    "prompts",
    [
        [[5, 5, 5], [5, 6], [5, 5, 7]],
        [[1, 2, 3], [4, 2, 3], [1, 2, 9], [2, 3]],
        [[1, 2], [2, 1], [1, 2, 1, 2], [1, 3]],
    ],
)
def test_one_hash_in_two_places_raises_nothing(prompts: list[list[int]]) -> None:
    server = make_server(3, 1000)
    for n, blocks in enumerate(prompts * 3):
        facts = RequestFacts(b"", 0, 64 * len(blocks), None, blocks)
        server.ask(history=[past(facts, n % 3, 1.0)])
        server.put(facts)
    memory = server.view.memory
    for known in memory.ranks.values():
        assert known.footprint.total == sum(known.footprint._spans.values()) >= 0
    memory.index.limit = 0
    server.put(prompt("last", 6400))
    assert len(memory.index._recent) == 1
