"""A second policy that looks on: it changes nothing, and says what it would have done."""

from random import Random
from typing import Any

import pytest

from sidecar.policies import Choice, make_policy
from tests.kv.server import Server as KvServer
from tests.kv.server import prompt
from tests.kv.world import Checked, World, checked
from tests.outside import OutsideLearner
from tests.shadowing import BUG, EVERYTHING, followed, found, play
from tests.support import keyed, make_dispatcher, query

# ---- it acts on nothing


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("late", [0, 7])
@pytest.mark.parametrize("shadow", ["kv_affinity", "prefix_affinity", "round_robin", "bad"])
def test_it_changes_no_decision(shadow: str, late: int, seed: int) -> None:
    policy = OutsideLearner(choose=BUG, learn=BUG, heard=BUG) if shadow == "bad" else None
    plain = play(World(make_dispatcher("kv_affinity", move_tokens=200), Random(seed)))
    watched = followed(make_dispatcher("kv_affinity", move_tokens=200), late)
    watched.set_shadow(policy or make_policy(shadow))
    assert play(World(watched, Random(seed))).replies == plain.replies
    assert found(watched, "a").agreed + found(watched, "a").disagreed > 300


@pytest.mark.parametrize("active", ["prefix_affinity", "round_robin", "total_tokens"])
def test_nor_one_of_another_policy(active: str) -> None:
    def replies(shadow: str) -> list[list[int]]:
        dispatcher = followed(make_dispatcher(active))
        if shadow:
            dispatcher.set_shadow(make_policy(shadow))
        world = World(dispatcher, Random(5))
        for _ in range(500):
            getattr(world, world.drawn.choice(EVERYTHING))()
        return world.replies

    assert replies("") == replies("kv_affinity") == replies("total_requests")


def test_a_policy_that_remembers_in_itself_is_not_asked_by_the_shadow() -> None:
    class Stateful(OutsideLearner):
        def __init__(self, params: Any = None) -> None:
            super().__init__(choose=lambda facts, view: Choice(len(self.calls) % 8, "placed"))

        def _do(self, part: str) -> Any:
            self.calls.append(part)
            return {} if part == "expected" else None

    def ranks(*, shadow: bool) -> list[int]:
        dispatcher = followed(make_dispatcher("kv_affinity"))
        dispatcher.swap_policy(Stateful())
        if shadow:
            dispatcher.set_shadow(make_policy("round_robin"))
        return [dispatcher.handle(query([keyed("a")]), 0.0).ranks[0] for _ in range(20)]

    assert ranks(shadow=True) == ranks(shadow=False)


# ---- an equal one agrees


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("late", [0, 11])
def test_an_equal_one_agrees_always(seed: int, late: int) -> None:
    dispatcher = followed(checked(move_tokens=200), late)
    dispatcher.set_shadow(Checked(dispatcher.policy.params))
    play(World(dispatcher, Random(seed)), 700)
    comparison = found(dispatcher, "a")
    assert comparison.disagreed == 0
    assert comparison.agreed > 500
    roles = comparison.roles
    assert roles["shadow"] == roles["active"]
    for ranks in ([0, 5, 9, 12], [5, 9]):
        imbalance = [comparison.assigned[role].imbalance(ranks) for role in ("shadow", "active")]
        assert imbalance[0] == pytest.approx(imbalance[1])


@pytest.mark.parametrize("policy", ["round_robin", "total_tokens", "prefix_affinity"])
def test_equal_ones_that_tell_nothing_agree_too(policy: str) -> None:
    dispatcher = followed(make_dispatcher(policy))
    dispatcher.set_shadow(make_policy(policy))
    world = World(dispatcher, Random(2))
    for _ in range(500):
        getattr(world, world.drawn.choice(EVERYTHING))()
    comparison = found(dispatcher, "a")
    assert comparison.disagreed == 0
    assert comparison.roles["shadow"] == comparison.roles["active"]
    assert comparison.roles["shadow"].expected_tokens > 0, "judged by an index"


def test_one_that_begins_late_agrees_once_it_has_been_told() -> None:
    dispatcher = followed(make_dispatcher("kv_affinity"))
    server = KvServer(dispatcher)
    sessions = [f"k{i}" for i in range(32)]
    server.put(*[prompt(key, 6400, key) for key in sessions])
    dispatcher.set_shadow(make_policy("kv_affinity"))
    for turn in range(1, 6):
        server.now += 1
        server.put(*[prompt(key, 6400 + 640 * turn, key) for key in sessions])
        server.finish()
    assert found(dispatcher).disagreed == 0, "sessions have their last rank"
    roles = found(dispatcher).roles
    assert roles["shadow"] == roles["active"]
