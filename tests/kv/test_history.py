"""What the hook tells of the past makes the index that it would have been."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.wire import Past
from tests.kv.server import Server, past, prompt
from tests.kv.world import checked
from tests.support import make_dispatcher

SECONDS = 30
DISPATCHES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(64, 4000), st.integers(1, SECONDS - 1)),
    max_size=12,
    unique_by=lambda dispatch: dispatch[2],
)
"""Rank, tokens, second; each another conversation."""


def running(live: list[tuple[int, int, int]], capacity: int) -> Server:
    """A server that answered a request each second; some others went where `live` says."""
    server = Server(make_dispatcher("kv_affinity"), list(range(4)))
    for rank in range(4):
        server.say(rank, capacity_tokens=capacity)
    for second in range(SECONDS):
        server.now += 0.5
        server.put(prompt("", 0, "clock", last_rank=0, last_age_ms=1))
        for rank, tokens, when in live:
            if when == second:
                server.now += 0.5
                server.put(prompt(f"{when}", tokens, f"k{when}", last_rank=rank, last_age_ms=1))
                server.finish()
                server.now -= 0.5
        server.now += 0.5
    server.finish()
    return server


def known(server: Server, dispatches: list[tuple[int, int, int]]) -> list:
    """All that matters of an index."""
    memory = server.view.memory
    return [
        [memory.held(prompt(f"{when}", tokens)) for _, tokens, when in dispatches],
        *((r.footprint.total, r.footprint.active) for _, r in sorted(memory.ranks.items())),
    ]


def told(server: Server, dispatches: list[tuple[int, int, int]]) -> list[Past]:
    # Dispatches were half a second after the beginning of a span.
    return [
        past(prompt(f"{when}", tokens, f"k{when}"), rank, SECONDS - when - 1.0)
        for rank, tokens, when in dispatches
    ]


@given(DISPATCHES, st.randoms(use_true_random=False), st.sampled_from([0, 3000, 9000]))
def test_the_order_in_which_it_is_told_does_not_matter(dispatches, random, capacity) -> None:
    original, server = running(dispatches, capacity), running([], capacity)
    random.shuffle(dispatches)
    server.ask(history=told(server, dispatches))
    assert known(server, dispatches) == known(original, dispatches)
    server.ask(history=told(server, dispatches))  # twice is as once
    assert known(server, dispatches) == known(original, dispatches)


def new_sidecar(capacity: int = 0) -> Server:
    """A sidecar that heard reports and nothing else."""
    server = Server(make_dispatcher("kv_affinity"), list(range(4)))
    for rank in range(4):
        server.say(rank, capacity_tokens=capacity)
    return server


def day(count: int, tokens: int) -> list[Past]:
    """Conversations of the last hours on rank 2, the newest first."""
    return [past(prompt(f"{n}", tokens), 2, 10.0 * (n + 1)) for n in range(count)]


def held(server: Server, count: int, tokens: int) -> list[int]:
    memory = server.view.memory
    return [n for n in range(count) if 2 in memory.held(prompt(f"{n}", tokens))]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_new_sidecar_knows_what_it_is_told(parts: int) -> None:
    server, history = new_sidecar(), day(30, 2000)
    for part in range(parts):
        server.now += 0.01
        server.ask(history=history[part::parts])
    assert held(server, 30, 2000) == list(range(30))
    assert server.put(prompt("3", 2100)) == [2]


def test_a_new_sidecar_that_is_asked_before_it_is_told() -> None:
    """The query that meets a new sidecar has no history; the next have."""
    server = Server(make_dispatcher("kv_affinity"), list(range(4)))
    server.put(prompt("new", 100))
    server.now += 0.01
    server.ask(history=day(30, 2000))
    assert held(server, 30, 2000) == list(range(30))


def test_a_new_sidecar_is_told_of_more_than_the_cache_holds() -> None:
    server = new_sidecar(capacity=21_000)
    server.ask(history=day(30, 2000))
    server.now += 2.0
    server.put(prompt("new", 1000, "k", last_rank=2, last_age_ms=1))
    some = held(server, 30, 2000)
    assert some == list(range(len(some)))
    assert 8 <= len(some) <= 10


def test_a_new_sidecar_is_told_of_more_than_the_index_holds() -> None:
    server = new_sidecar()
    server.put(prompt("new", 100))
    server.view.memory.index.limit = 300  # some eight prompts
    server.ask(history=day(30, 2000))
    some = held(server, 30, 2000)
    assert some == list(range(len(some)))
    assert some


def test_what_is_told_waits_for_nothing() -> None:
    server = new_sidecar()
    server.ask(history=day(30, 2000))
    server.put(prompt("new", 10, "k", last_rank=0, last_age_ms=1))
    assert max(server.view.memory.costs.serving) == 0


def test_what_is_told_of_this_moment_waits_for_nothing_that_it_sent() -> None:
    """A hook that decided alone tells it in the same millisecond; the counters say so too."""
    server = new_sidecar()
    server.put(prompt("p", 5000, "k", last_rank=2, last_age_ms=1))
    server.ask(history=[past(prompt("p", 5000), 2, 0.0), past(prompt("q", 900), 1, 0.0)])
    queues = {rank: len(known.queue) for rank, known in server.view.memory.ranks.items()}
    assert queues == {0: 0, 1: 0, 2: 1, 3: 0}


def test_ranks_that_are_gone_may_be_told_of() -> None:
    dispatcher = checked()
    server = Server(dispatcher, [0, 1])
    server.ask(history=[past(prompt("p", 3000), rank, 5.0) for rank in (0, 7, 65_535)])
    assert server.put(prompt("p", 3000)) == [0]
    assert dispatcher.policy.decisions == 1
