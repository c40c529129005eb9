"""kv_affinity explains what it would do, and does nothing."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv.server import ENDS, Server, prompt
from tests.kv.world import World, checked, live
from tests.test_kv_affinity import MOVE, bound, make_server

THINGS = [*["ask"] * 3, *["report"] * 2, "tick", "reports", "silence", "flush", "restart"]
SEEDS, STEPS = st.integers(0, 1 << 32), st.integers(1, 60)


def snapshot(server: Server) -> list:
    view = server.view
    memory = view.memory
    return [
        view.cursor,
        len(memory.index),
        memory.clock.span,
        memory.costs.serving[:],
        memory.costs.placing[:],
        {rank: len(known.queue) for rank, known in memory.ranks.items()},
        {rank: (r.footprint.total, r.footprint.active) for rank, r in memory.ranks.items()},
    ]


@given(SEEDS, STEPS)
def test_it_is_what_is_done_then(seed: int, steps: int) -> None:
    dispatcher = checked()
    world, drawn = World(dispatcher, Random(seed)), Random(seed + 1)
    server, policy = world.server, dispatcher.policy
    for _ in range(steps):
        live(world, 1, THINGS)
        server.ask()  # a probe: the view is of now
        facts = world.facts()
        if facts.routing_key and drawn.random() < 0.7:
            facts.last_rank, facts.last_age_ms = world.rank(), drawn.randrange(5000)
        first = policy.explain(facts, server.view)
        before = snapshot(server)
        assert policy.explain(facts, server.view) == first
        assert snapshot(server) == before
        assert sorted(offer.rank for offer in first.offers) == server.view.ranks
        assert first.preferred in (-1, first.offers[0].rank)
        server.keys.pop(facts.routing_key, None)  # the facts stand as they are
        reply = server.ask(facts)
        world.sent[reply.ranks[0]].append(facts.tokens)
        assert server.view.ranks[first.choice.position] == reply.ranks[0]
        assert first.choice.reason == reply.reasons[0]


@given(SEEDS, STEPS)
def test_who_is_asked_to_explain_decides_as_if_not(seed: int, steps: int) -> None:
    worlds = [World(checked(), Random(seed)) for _ in range(2)]
    asking = Random(seed)
    for _ in range(steps):
        for world in worlds:
            live(world, 1, THINGS)
        explaining = worlds[0].server
        if explaining.instance in explaining.dispatcher.budget.instances:
            view = explaining.view
            if view.memory is not None and view.ranks:
                facts = prompt(f"{asking.randrange(4)}", 1000, asking.choice(["", "key"]))
                explaining.dispatcher.policy.explain(facts, view)
    assert worlds[0].replies == worlds[1].replies


def test_what_it_tells() -> None:
    server, first = make_server([0, 5, 9]), ENDS[41]
    server.put(bound("k", 5, first))
    server.now += 1.0
    server.say(0, prefilling_tokens=700)
    server.ask()
    policy, params = server.dispatcher.policy, server.dispatcher.policy.params
    assert 4000 < first < 5000
    told = policy.explain(prompt("of k", 5000), server.view)
    assert (told.preferred, told.choice) == (5, (1, "prefix_hit", 1))
    assert [offer.rank for offer in told.offers] == [5, 9, 0]  # home, then by cost
    figures = [offer.figures for offer in told.offers]
    assert [offer["held_tokens"] for offer in figures] == [first, 0, 0]
    # Rank 5 has still to compute all of the first.
    assert [offer["serving_tokens"] for offer in figures] == [
        first + params.request_tokens + 5000 - first,
        5000,
        5700,
    ]
    assert [o["placing_tokens"] - o["serving_tokens"] for o in figures] == pytest.approx(
        [params.recent_weight * first, 0, 0]
    )
    server.say(5, prefilling_tokens=round(9 * MOVE))
    spilled = policy.explain(prompt("of k", 5000), server.view)
    assert (spilled.preferred, spilled.choice.reason) == (5, "prefix_spill")
    assert policy.explain(prompt("new", 10, "new"), server.view).preferred == -1
