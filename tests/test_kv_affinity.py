"""kv_affinity on loads and caches: where it places, what it binds, when it lets go."""

from collections import Counter
from random import Random

import pytest

from sidecar.policies.kv_affinity import KvAffinityParams
from tests.kv.server import ENDS, Server, past, prompt
from tests.support import make_dispatcher

MOVE = KvAffinityParams().move_tokens
RATIO = KvAffinityParams().move_ratio


def make_server(ranks: object = range(8), **params: float) -> Server:
    """A server that reported once and is idle."""
    server = Server(make_dispatcher("kv_affinity", **params), list(ranks))
    server.dispatcher.on_policy_error = fail
    server.finish()
    return server


def fail(error: Exception) -> None:
    raise error


def bound(key: str, rank: int, tokens: int = 100, age_ms: int = 1000, **more: object):
    """A request of a key that was on a rank last."""
    return prompt(f"of {key}", tokens, key, last_rank=rank, last_age_ms=age_ms, **more)


def one(server: Server, facts) -> tuple[int, str]:
    reply = server.ask(facts)
    return reply.ranks[0], reply.reasons[0]


@pytest.mark.parametrize("key", ["", "key-{}"])
@pytest.mark.parametrize("served", ["at once", "never"])
@pytest.mark.parametrize("tokens", [0, 50, 3000])
def test_an_empty_server_spreads_what_is_new(key: str, served: str, tokens: int) -> None:
    server, counts = make_server(), Counter()
    for n in range(800):
        rank, reason = one(server, prompt(f"{n}", tokens, key.format(n)))
        counts[rank] += 1
        assert reason == "placed"
        server.now += 0.001
        if served == "at once":
            server.finish()
    assert set(counts) == set(range(8))
    assert max(counts.values()) <= 110


def test_new_keys_of_any_length_spread_by_tokens() -> None:
    server, drawn, tokens = make_server(), Random(1), Counter()
    for n in range(800):
        size = drawn.choice([100, 500, 4000, 30_000])
        tokens[one(server, prompt(f"{n}", size, f"key-{n}"))[0]] += size
        server.now += 0.001
    assert max(tokens.values()) <= 1.1 * sum(tokens.values()) / 8


def test_a_new_key_goes_to_the_least_queued_work() -> None:
    server = make_server(range(4))
    server.put(*(bound(f"k{rank}", rank, 10_000 * (rank + 1)) for rank in (0, 1, 3)))
    server.put(bound("k2", 2, 9000))
    assert one(server, prompt("new", 100, "new")) == (2, "placed")


def test_a_new_key_goes_to_the_fewest_requests() -> None:
    server = make_server(range(4))
    for rank, running in enumerate([5, 3, 2, 4]):
        server.say(rank, running=running)
    assert one(server, prompt("new", 100, "new")) == (2, "placed")


def test_a_new_key_goes_to_the_smallest_recent_footprint() -> None:
    server = make_server(range(4))
    server.put(*(bound(f"k{rank}", rank, size) for rank, size in enumerate([9000, 5000, 700, 800])))
    server.finish()
    assert one(server, prompt("new", 100, "new")) == (2, "placed")
    computed = make_server(range(4))
    for rank, tokens in enumerate([9000, 5000, 7000, 800]):
        computed.say(rank, recent_uncached_tokens=tokens)
    assert one(computed, prompt("new", 100, "new")) == (3, "placed")


@pytest.mark.parametrize("size", [2, 8, 320])
def test_a_key_stays_where_it_was(size: int) -> None:
    server, drawn = make_server(range(size)), Random(size)
    for n in range(50):
        rank = drawn.randrange(size)
        assert one(server, bound(f"k{n}", rank)) == (rank, "affinity_hit")
        server.finish()


@pytest.mark.parametrize("tokens", [0, 100, 5000, 100_000])
@pytest.mark.parametrize("blocks", [True, False])
def test_a_key_stays_until_waiting_costs_more_than_the_margin(tokens: int, blocks: bool) -> None:
    """Its cache is there, known (from the last turn) or not; it is all to compute elsewhere."""
    for more, stays in ((-100, True), (100, False)):
        server = make_server(range(4))
        facts = bound("k", 1, tokens)
        if not blocks:
            facts.block_hashes = []
        elif tokens:
            server.ask(history=[past(facts, 1, 1.0)])
        held = tokens if blocks else 0
        # Staying costs what waits; leaving costs the prompt, where nothing waits.
        leaving, staying = tokens, tokens - held
        excess = max(leaving + MOVE, RATIO * leaving) - staying
        server.say(1, prefilling_tokens=round(excess + more))
        rank, reason = one(server, facts)
        assert (rank == 1) is stays
        if stays:
            assert reason == "affinity_hit"


def test_a_small_gain_or_a_small_ratio_does_not_move_a_key() -> None:
    for here, there, moves in [
        (MOVE * 0.9, 0, False),  # many times, but few tokens
        (MOVE * 1.2, 0, True),
        (MOVE * 10, MOVE * 10 / RATIO * 1.1, False),  # many tokens, but not as many times
        (MOVE * 10, MOVE * 10 / RATIO * 0.8, True),
    ]:
        server = make_server(range(4))
        for rank in range(4):
            server.say(rank, prefilling_tokens=round(here if rank == 2 else there))
        rank, reason = one(server, bound("k", 2, 0))
        assert ((rank != 2), reason != "affinity_hit") == (moves, moves)


def test_a_key_that_moved_stays_where_it_moved_to() -> None:
    server = make_server(range(4))
    assert server.put(prompt("p", 2000, "k", last_rank=0, last_age_ms=10)) == [0]
    server.finish()
    server.say(0, prefilling_tokens=round(10 * MOVE))
    moved, _ = one(server, prompt("p", 2100, "k"))
    assert moved != 0
    server.finish()  # the old home is idle again, and has most of the prompt still
    for tokens in (2200, 2300, 2400):
        server.now += 1.0
        assert one(server, prompt("p", tokens, "k")) == (moved, "affinity_hit")
        server.finish()


def test_a_key_that_leaves_with_no_copy_known_is_spilled() -> None:
    server = make_server(range(4))
    server.say(0, prefilling_tokens=round(10 * MOVE))
    rank, reason = one(server, bound("k", 0))
    assert (rank != 0, reason) == (True, "spill")


def test_a_copy_that_is_as_good_is_taken() -> None:
    server = make_server(range(4))
    facts = bound("k", 0, 5000)
    server.ask(history=[past(facts, 0, 1.0), past(facts, 2, 2.0)])
    server.say(0, prefilling_tokens=round(10 * MOVE))
    assert one(server, facts) == (2, "replica_hit")


def spills(seeds: range) -> list[tuple[str, float, float]]:
    """Keys on ranks in any state: reason, cost of staying and cost of going where each went."""
    found = []
    for seed in seeds:
        drawn, server, facts = Random(seed), make_server(range(4)), bound("k", 2, 500)
        server.ask(history=[past(facts, 2, 1.0)])
        for rank in range(4):
            server.say(
                rank,
                running=drawn.choice([0, 2, 60]),
                prefilling_tokens=drawn.choice([0, 20_000, 40_000, 90_000]),
                recent_uncached_tokens=drawn.choice([0, 300_000, 900_000]),
            )
        rank, reason = one(server, facts)
        cost = server.view.memory.costs.serving
        assert rank == 2 or reason != "affinity_hit"
        found.append((reason, cost[2] - 500, cost[rank] - 500 * (rank == 2)))
    return found


def test_the_states_of_the_next_tests_let_some_keys_go() -> None:
    reasons = Counter(reason for reason, *_ in spills(range(200)))
    assert reasons["spill"] > 20
    assert reasons["affinity_hit"] > 20


def test_a_key_is_never_spilled_to_what_costs_as_much() -> None:
    assert not [s for s in spills(range(200)) if s[0] == "spill" and s[2] >= s[1]]


def test_resident_tokens_are_no_load() -> None:
    server = make_server(range(4))
    server.say(0, tokens=800_000, capacity_tokens=900_000)
    assert one(server, bound("k", 0)) == (0, "affinity_hit")
    assert one(server, bound("k2", 0, 50_000)) == (0, "affinity_hit")


def test_a_hot_prefix_neither_stays_nor_scatters() -> None:
    """100 requests at once share 8,192 tokens that one rank holds."""
    server = make_server()
    others = [bound(f"other-{rank}", rank, 3000) for rank in range(8)]
    server.put(*others)
    server.put(prompt("first", 8192, "hot", shared="hot", shared_tokens=8192, last_rank=3))
    server.finish()
    hot = [
        prompt(f"{n}", 8392, "hot", shared="hot", shared_tokens=8192, last_rank=3, last_age_ms=10)
        for n in range(100)
    ]
    ranks, holders, found = server.put(*hot), {3}, 0
    for rank in ranks:
        found += rank in holders
        holders.add(rank)
    assert found >= 90
    assert len(holders) > 1
    assert Counter(ranks).most_common(1)[0][1] <= 60
    homes = [one(server, bound(f"other-{rank}", rank, 3000))[0] for rank in range(8)]
    assert homes == list(range(8))


def test_ends_reach_as_far_as_any_context() -> None:
    assert ENDS[-1] >= 1 << 20
