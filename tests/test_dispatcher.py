"""From a query to a reply: batches, swaps, bad policies. Cases of the trackers: test_cases.py."""

import random
from collections import Counter

import pytest

from sidecar.errors import PeerError
from sidecar.hashing import key_hash
from sidecar.policies import REGISTRY, Choice, make_policy
from sidecar.wire import RequestFacts
from tests.support import (
    INSTANCE,
    Server,
    key_preferring,
    keyed,
    keyless,
    load_up,
    make_dispatcher,
    order_of,
    query,
    reasons,
)
from tests.test_policies import REASONS

POLICIES = sorted(REGISTRY)
SIZES = [2, 3, 8, 64, 320]


def blocks(number: int, size: int) -> RequestFacts:
    """A long prompt of prefix blocks, with a key and without, sent before and not."""
    key = b"b-%d" % number if number % 2 else b""
    hashes = [number * 1000 + block for block in range(40)]
    return RequestFacts(key, 0, 4096, None, hashes, number % size if number % 3 else -1, 10)


@pytest.mark.parametrize("size", SIZES)
def test_every_reason_is_documented_and_occurs(size: int) -> None:
    for name in POLICIES:
        # Margins that loads of this test exceed.
        params = {"move_tokens": 100, "move_ratio": 1} if name == "kv_affinity" else {}
        dispatcher = make_dispatcher(name, **params)
        server, drawn = Server(ranks=size), random.Random(size)
        seen, now = set(), 0.0
        for _ in range(300):
            now += drawn.choice([0.001, 0.01, 2.0])
            facts = [
                drawn.choice(
                    [keyed(f"s-{i}"), keyless(), keyless(prefix=i * 7919), blocks(i, size)]
                )
                for i in range(drawn.choice([1, 2, 30]))
            ]
            reply = server.ask(dispatcher, facts, now)
            seen |= reasons(reply)
            assert len(reply.ranks) == len(reply.reasons) == len(facts)
            for rank in drawn.sample(range(size), max(1, min(size // 2, 4))):
                server.schedulers[rank].take_in()
                server.schedulers[rank].running = drawn.choice([0, 1, 60])
                dispatcher.report(server.report(rank), now)
        assert seen == REASONS[name]


def test_a_batch_is_answered_in_order_and_sees_itself() -> None:
    dispatcher = make_dispatcher("total_tokens")
    load_up(dispatcher, [0, 0, 0])
    batch = [keyless(900), keyless(500), keyless(100), keyless(50), keyless(400), keyless(1)]
    reply = dispatcher.handle(query(batch, ranks=[0, 1, 2]), 0.0)
    assert reply.ranks == [0, 1, 2, 2, 2, 1]
    keys = [key_preferring(rank, range(8), str(n)) for n, rank in enumerate([5, 1, 5, 0, 7])]
    reply = make_dispatcher().handle(query([keyed(key) for key in keys]), 0.0)
    assert reply.ranks == [5, 1, 5, 0, 7]


@pytest.mark.parametrize("size", [8, 64])
def test_a_batch_of_one_key_spills_over_its_own_load(size: int) -> None:
    dispatcher = make_dispatcher(min_load_gap=4.0)
    load_up(dispatcher, [0] * size)
    reply = dispatcher.handle(query([keyed("k")] * 10 * size, ranks=range(size)), 0.0)
    order = order_of(key_hash(b"k"), range(size))
    counts = Counter(reply.ranks)
    assert reply.ranks[:5] == [order[0]] * 5
    assert max(counts.values()) <= max(1.5 * 10, 10 + 4) + 1
    assert list(counts) == order[: len(counts)]  # each rank begun after those before it
    assert reasons(reply) == {"affinity_hit", "spill"}


@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_equals_its_requests_one_by_one(name: str) -> None:
    facts = [keyed(f"s-{i}") if i % 2 else keyless(100 * i) for i in range(64)]
    whole, server, single = make_dispatcher(name), Server(), []
    at_once = whole.handle(query(facts), 0.0)
    one_by_one = make_dispatcher(name)
    for one in facts:
        single += server.ask(one_by_one, [one], 0.0).ranks
    assert at_once.ranks == single


@pytest.mark.parametrize("name", POLICIES)
def test_equal_inputs_give_equal_decisions(name: str) -> None:
    def play() -> list[int]:
        dispatcher, server, drawn, ranks = make_dispatcher(name), Server(), random.Random(3), []
        for step in range(300):
            facts = [keyed(f"s-{drawn.randrange(20)}"), keyless(drawn.randrange(5000))]
            ranks += server.ask(dispatcher, facts, 0.02 * step).ranks
            rank = drawn.randrange(8)
            server.schedulers[rank].take_in()
            dispatcher.report(server.report(rank), 0.02 * step)
        return ranks

    assert play() == play()


def test_spill_is_tallied_from_and_to() -> None:
    dispatcher = make_dispatcher(min_load_gap=0.0)
    key = key_preferring(3, range(8))
    second = order_of(key_hash(key), range(8))[1]
    load_up(dispatcher, [0, 0, 0, 9, 0, 0, 0, 0])
    reply = dispatcher.handle(query([keyed(key)]), 0.0)
    assert (reply.ranks, reply.reasons) == ([second], ["spill"])
    tally = dispatcher.tallies[INSTANCE]
    assert dict(tally.spills) == {(3, second): 1}


def test_swap_takes_effect_and_keeps_the_loads() -> None:
    dispatcher, server = make_dispatcher("total_requests"), Server(ranks=4)
    first = server.ask(dispatcher, [keyless()] * 3, 0.0)
    assert (first.policy, first.policy_version, first.want.prefix_tokens) == (
        "total_requests",
        1,
        0,
    )
    dispatcher.swap_policy(make_policy("prefix_affinity", {"hash_tokens": 64}))
    second = server.ask(dispatcher, [keyless()], 0.0)
    assert (second.policy, second.policy_version) == ("prefix_affinity", 2)
    assert second.want.prefix_tokens == 64
    assert (second.ranks, second.reasons) == ([3], ["fallback"])
    assert dispatcher.tallies[INSTANCE].decisions == {
        "total_requests": {"least_requests": 3},
        "prefix_affinity": {"fallback": 1},
    }


class Bad:
    """A policy that answers nonsense."""

    params = None
    name = "bad"
    want = make_policy("round_robin").want

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def choose(self, facts: object, view: object) -> Choice:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    "answer",
    [
        *(RuntimeError("bug"), ZeroDivisionError(), KeyError(), RecursionError(), MemoryError()),
        *(Choice(3, "affinity_hit"), Choice(-1, "spill"), Choice(99, "spill"), None, (1, "x"), 1),
        *(Choice("0", "spill"), Choice(None, "spill"), Choice(1.0, "affinity_hit")),
        *(Choice(1, "spill", 3), Choice(1, "spill", -1), Choice(1, "spill", None)),
        *(Choice(1, "nonsense"), Choice(1, None), Choice(1, ["spill"])),
    ],
    ids=repr,
)
def test_a_bad_policy_is_contained(answer: object) -> None:
    dispatcher, errors = make_dispatcher(), []
    dispatcher.on_policy_error = errors.append
    dispatcher.swap_policy(Bad(answer))
    reply = dispatcher.handle(query([keyless()] * 6, ranks=[0, 4, 7]), 0.0)
    assert Counter(reply.ranks) == {0: 2, 4: 2, 7: 2}
    assert reasons(reply) == {"policy_error"}
    assert len(errors) == 6
    assert dispatcher.tallies[INSTANCE].decisions == {"bad": {"policy_error": 6}}
    assert not dispatcher.tallies[INSTANCE].spills


def test_no_live_rank_is_an_error_and_decides_nothing() -> None:
    dispatcher = make_dispatcher()
    with pytest.raises(PeerError) as caught:
        dispatcher.handle(query([keyed("k")], ranks=[]), 0.0)
    assert caught.value.cause == "no_live_rank"
    assert not dispatcher.tallies
    assert not dispatcher.budget.instances
    assert dispatcher.handle(query(ranks=[]), 0.0).ranks == []  # a probe is welcome
    assert dispatcher.handle(query([keyed("k")]), 0.0).reasons == ["affinity_hit"]


def test_a_probe_is_answered_and_told_facts_are_kept() -> None:
    dispatcher = make_dispatcher()
    told = {"bypassed": {"deadline": 3}, "abstained": {"pinned": 1}, "about": {"hook": "1"}}
    reply = dispatcher.handle(query(seq=9, **told), 0.0)
    assert (reply.seq, reply.ranks, reply.reasons) == (9, [], [])
    dispatcher.handle(query(), 0.0)  # "as said before"
    tally = dispatcher.tallies[INSTANCE]
    assert {name: getattr(tally, name) for name in told} == told
    assert tally.queries == 2


def test_instances_do_not_share_loads() -> None:
    dispatcher = make_dispatcher("total_requests")
    load_up(dispatcher, [0, 9])
    assert dispatcher.handle(query([keyless()], ranks=[0, 1]), 0.0).ranks == [0]
    other = query([keyless()] * 4, ranks=[0, 1], instance="other")
    assert Counter(dispatcher.handle(other, 0.0).ranks) == {0: 2, 1: 2}


def test_forgotten_instances_leave_no_tally() -> None:
    dispatcher = make_dispatcher(max_instances=1)
    dispatcher.handle(query(instance="a"), 0.0)
    with pytest.raises(PeerError):
        dispatcher.handle(query(instance="b"), 1.0)
    dispatcher.handle(query(instance="b"), 100.0)
    assert set(dispatcher.tallies) == set(dispatcher.budget.instances) == {"b"}
