"""Cases of shared/cases.md that the dispatcher decides, each as a test of its whole kind."""

from collections import Counter

import pytest

from sidecar.hashing import key_hash
from tests.support import (
    INSTANCE,
    STALE_SECONDS,
    Server,
    key_preferring,
    keyed,
    keyless,
    load_up,
    make_dispatcher,
    order_of,
    query,
    reasons,
    report,
)
from tests.test_dispatcher import POLICIES, SIZES
from tests.test_policies import LOAD_AWARE


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cold", [True, False])
def test_case_1_a_batch_of_one_key_stays_together(size: int, cold: bool) -> None:
    dispatcher, server = make_dispatcher(), Server(ranks=size)
    if not cold:
        server.finish(dispatcher, 0.0)
    home = order_of(key_hash(b"session-1"), range(size))[0]
    reply = server.ask(dispatcher, [keyed("session-1")] * 4, 0.0)
    assert (reply.ranks, reasons(reply)) == ([home] * 4, {"affinity_hit"})


@pytest.mark.parametrize("name", [*LOAD_AWARE, "prefix_affinity"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cold", [True, False], ids=["before any report", "between reports"])
@pytest.mark.parametrize("batch", [1, 16])
def test_cases_4_5_7_a_burst_spreads(name: str, size: int, cold: bool, batch: int) -> None:
    dispatcher, server, counts = make_dispatcher(name), Server(ranks=size), Counter()
    if not cold:
        server.finish(dispatcher, 0.0)
    for step in range(64 // batch):
        counts.update(server.ask(dispatcher, [keyless()] * batch, 0.01 * step).ranks)
        if not cold:  # zero reports, sampled before the scheduler took anything in
            for rank in range(size):
                dispatcher.report(server.report(rank), 0.01 * step)
    assert max(counts.values()) - min(counts.get(rank, 0) for rank in range(size)) <= 1
    assert sum(counts.values()) == 64


@pytest.mark.parametrize("name", POLICIES)
def test_case_6_equal_loads_take_turns(name: str) -> None:
    dispatcher, server, counts = make_dispatcher(name), Server(), Counter()
    for step in range(800):
        counts.update(server.ask(dispatcher, [keyless()], 0.001 * step).ranks)
        server.finish(dispatcher, 0.001 * step)
    assert counts == dict.fromkeys(range(8), 100)


def test_case_10_a_dead_rank_is_not_in_the_average() -> None:
    dispatcher = make_dispatcher(min_load_gap=0.0, max_load_skew=1.0)
    load_up(dispatcher, [5, 5, 0])
    key = key_preferring(0, [0, 1])
    reply = dispatcher.handle(query([keyed(key)], ranks=[0, 1]), 0.0)
    # With the dead rank the average were 3.3, and 5 an overload.
    assert (reply.ranks, reply.reasons) == ([0], ["affinity_hit"])


def test_case_11_keys_of_a_silent_rank_move_and_return() -> None:
    dispatcher, keys = make_dispatcher(), [f"session-{i}".encode() for i in range(200)]
    facts = [keyed(key) for key in keys]
    orders = [order_of(key_hash(key), range(8)) for key in keys]

    def ask(seq: int, now: float, silent: int | None) -> list[int]:
        for rank in range(8):
            if rank != silent:
                dispatcher.report(report(rank, seq), now)
        # Each alone, so that the guard stays out of it: nothing was sent before.
        return [dispatcher.handle(query([one]), now).ranks[0] for one in facts]

    homes = [order[0] for order in orders]
    assert ask(1, 0.0, None) == homes
    assert [ask(2 + step, step * STALE_SECONDS / 4, 2) for step in range(1, 5)] == [homes] * 4
    moved = ask(7, STALE_SECONDS * 1.25, 2)
    assert moved == [order[1] if order[0] == 2 else order[0] for order in orders]
    assert dispatcher.tallies[INSTANCE].decisions["prefix_affinity"]["stale_skip"] == homes.count(2)
    assert ask(8, STALE_SECONDS * 1.25 + 0.1, None) == homes


def test_case_12_all_stale_is_rendezvous_without_a_guard() -> None:
    dispatcher, server = make_dispatcher(), Server()
    server.finish(dispatcher, 0.0)
    reply = server.ask(dispatcher, [keyed("session-1")] * 100, STALE_SECONDS * 10)
    home = order_of(key_hash(b"session-1"), range(8))[0]
    assert (set(reply.ranks), reasons(reply)) == ({home}, {"affinity_hit"})
    assert dispatcher.tallies[INSTANCE].unguarded == 100


@pytest.mark.parametrize("name", POLICIES)
def test_case_15_health_checks_move_no_user(name: str) -> None:
    users = [keyed(f"session-{i % 37}") if i % 3 else keyless() for i in range(200)]

    def ranks(checked: bool) -> list[int]:
        dispatcher, server, chosen = make_dispatcher(name), Server(), []
        for step, facts in enumerate(users):
            now = 0.01 * step
            if checked:
                server.send(step % 8, 1)
            chosen += server.ask(dispatcher, [facts], now).ranks
            server.finish(dispatcher, now)
        return chosen

    with_checks, without = ranks(True), ranks(False)
    # Where a check is under way its rank is busier by one, which only load-aware methods may heed.
    mine = {"prefix_affinity": lambda i: i % 3, "round_robin": lambda i: True}
    heed = mine.get(name, lambda i: False)
    assert [with_checks[i] for i in range(200) if heed(i)] == [
        without[i] for i in range(200) if heed(i)
    ]
    assert max(Counter(with_checks).values()) <= max(Counter(without).values()) + 10


@pytest.mark.parametrize("name", POLICIES)
def test_case_15_finished_health_checks_leave_no_trace(name: str) -> None:
    def ranks(checked: bool) -> list[int]:
        dispatcher, server, chosen = make_dispatcher(name), Server(), []
        for step in range(200):
            if checked:
                server.send(step % 8, 1)
                server.finish(dispatcher, 0.01 * step)
            facts = keyed(f"session-{step % 37}") if step % 2 else keyless()
            chosen += server.ask(dispatcher, [facts], 0.01 * step).ranks
            server.finish(dispatcher, 0.01 * step)
        return chosen

    assert ranks(True) == ranks(False)


@pytest.mark.parametrize("key", [b"", b"   ", "\u3000".encode()])
def test_case_17_800_blank_keys_spread(key: bytes) -> None:
    dispatcher, server = make_dispatcher(), Server()
    reply = server.ask(dispatcher, [keyed(key)] * 800, 0.0)
    assert Counter(reply.ranks) == dict.fromkeys(range(8), 100)
    assert reasons(reply) == {"fallback"}


@pytest.mark.parametrize("name", ["session-{}", "user{}"])
def test_case_18_similar_keys_are_independent(name: str) -> None:
    dispatcher = make_dispatcher()
    homes = [dispatcher.handle(query([keyed(name.format(i))]), 0.0).ranks[0] for i in range(3000)]
    counts = Counter(homes)
    assert all(abs(counts[rank] - 375) < 0.15 * 375 for rank in range(8)), counts
    same = sum(a == b for a, b in zip(homes[1:300], homes[10:2999:10], strict=True))
    assert same < 299 / 4


@pytest.mark.parametrize("gone", [0, 3, 7])
def test_case_21_a_rank_that_leaves_moves_its_keys_only(gone: int) -> None:
    dispatcher = make_dispatcher()
    facts = [keyed(f"session-{i}") for i in range(1000)]

    def homes(ranks: list[int]) -> list[int]:
        return [dispatcher.handle(query([one], ranks=ranks), 0.0).ranks[0] for one in facts]

    before, without = homes(list(range(8))), homes([r for r in range(8) if r != gone])
    moved = {a for a, b in zip(before, without, strict=True) if a != b}
    assert moved == {gone}
    assert gone not in without
    assert homes(list(range(8))) == before
