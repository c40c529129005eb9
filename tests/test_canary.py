"""A second policy that decides for a share of the keys."""

from random import Random
from typing import Any

import pytest

from sidecar.dispatcher import Dispatcher
from sidecar.errors import ConfigError
from sidecar.hashing import key_hash
from sidecar.policies import Choice, make_policy
from sidecar.policies.kv_affinity import KvAffinityParams
from sidecar.wire import RequestFacts, Want
from tests.kv.server import Server as KvServer
from tests.kv.server import prompt
from tests.kv.world import Checked, World, checked
from tests.outside import Outside, OutsideLearner
from tests.support import (
    INSTANCE,
    Server,
    in_flight,
    keyed,
    keyless,
    load_up,
    make_dispatcher,
    query,
)


def decisions(dispatcher: Dispatcher) -> dict[str, dict[str, int]]:
    return {name: dict(n) for name, n in dispatcher.tallies[INSTANCE].decisions.items()}


# ---- what they decide


def test_counters_by_policy_and_role() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    load_up(dispatcher, [0] * 8)
    dispatcher.set_canary(make_policy("round_robin"), 0.3)
    server, canary = Server(), dispatcher.canary
    batch = [keyed(f"k{i}") for i in range(500)] + [keyless() for _ in range(20)]
    taken = sum(canary.takes(facts) for facts in batch)
    reply = server.ask(dispatcher, batch, 1.0)
    assert decisions(dispatcher) == {
        "kv_affinity": {"placed": 520 - taken},
        "round_robin": {"round_robin": taken},
    }
    roles = dispatcher.tallies[INSTANCE].roles
    assert (roles["active"].requests, roles["canary"].requests) == (520 - taken, taken)
    assert reply.policy == "kv_affinity"
    for facts, reason in zip(batch, reply.reasons, strict=True):
        assert (reason == "round_robin") == canary.takes(facts)


def test_both_learn_of_every_request_and_in_flight_returns_to_zero() -> None:
    policy = OutsideLearner(choose=lambda facts, view: Choice(2, "placed"))
    dispatcher = make_dispatcher("kv_affinity")
    dispatcher.set_canary(policy, 0.5)
    server = Server()
    for turn in range(10):
        server.ask(dispatcher, [keyed(f"k{turn}-{i}") for i in range(10)], 1.0 + turn)
    assert policy.calls.count("learn") == 100
    seats = dispatcher.active, dispatcher.canary.seat
    one, other = (seat.budget.instances[INSTANCE] for seat in seats)
    assert in_flight(one) == in_flight(other) == server.sent
    server.finish(dispatcher, 20.0)
    assert in_flight(one) == in_flight(other) == [0] * 8
    assert one.view.requests == other.view.requests == [0] * 8


def test_its_keys_come_back() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    server = KvServer(dispatcher)
    facts = [prompt(f"k{i}", 640, f"k{i}") for i in range(64)]
    home = server.put(*facts)
    dispatcher.set_canary(make_policy("prefix_affinity"), 0.5)
    during = server.put(*[prompt(f"k{i}", 700, f"k{i}") for i in range(64)])
    taken = [dispatcher.canary.takes(one) for one in facts]
    assert [a == b for a, b, it in zip(home, during, taken, strict=True) if not it] == [True] * (
        64 - sum(taken)
    )
    version = dispatcher.policy_version
    dispatcher.set_canary(None)
    assert dispatcher.policy_version == version + 1
    assert dispatcher.canary is None
    after = server.ask(*[prompt(f"k{i}", 760, f"k{i}") for i in range(64)])
    # Where the canary has sent them, their cache is: they stay there.
    assert after.ranks == during
    assert set(after.reasons) == {"affinity_hit"}
    assert dispatcher.want == make_policy("kv_affinity").want


def test_a_session_keeps_its_rank_when_a_canary_of_kv_affinity_begins_and_ends() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    server = KvServer(dispatcher)
    home = server.put(*[prompt(f"k{i}", 640, f"k{i}") for i in range(64)])
    for step in range(6):
        if step % 2:
            dispatcher.set_canary(None)
        else:
            dispatcher.set_canary(make_policy("kv_affinity", {"move_tokens": 8192}), 0.5)
        server.now += 1
        size = 700 + 10 * step
        assert server.put(*[prompt(f"k{i}", size, f"k{i}") for i in range(64)]) == home


EQUAL_WORLD = ["ask"] * 5 + ["report"] * 3 + ["tick"] * 2
EQUAL_WORLD += ["reports", "silence", "pinned", "flush", "restart", "ranks", "history"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_an_equal_canary_changes_nothing(seed: int, share: float) -> None:
    def play(*, canary: bool) -> list[Any]:
        dispatcher = checked(move_tokens=200)
        if canary:
            dispatcher.set_canary(Checked(KvAffinityParams(move_tokens=200)), share)
        world = World(dispatcher, Random(seed))
        for _ in range(600):
            getattr(world, world.drawn.choice(EQUAL_WORLD))()
        return world.replies

    assert play(canary=True) == play(canary=False)


# ---- what the hook must tell


def test_the_hook_tells_what_both_want() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    kv, prefix = make_policy("kv_affinity").want, make_policy("prefix_affinity").want
    dispatcher.set_canary(make_policy("prefix_affinity"), 0.5)
    want = dispatcher.handle(query(), 0.0).want
    assert want == Want(
        *(prefix.prefix_tokens, prefix.prefix_with_key, kv.block_tokens, kv.max_blocks),
        *(kv.block_growth, kv.history),
    )
    reply = dispatcher.handle(
        query([RequestFacts(b"", 0, 5000, key_hash(b"p%d" % i), [i + 1]) for i in range(200)]), 0.0
    )
    assert {"token_affinity_hit", "placed"} <= set(reply.reasons)
    dispatcher.set_canary(None)
    assert dispatcher.handle(query(), 0.0).want == kv


@pytest.mark.parametrize(
    ("active", "canary", "words"),
    [
        (("prefix_affinity", {"hash_tokens": 64}), ("prefix_affinity", {}), ("64", "4096")),
        (("kv_affinity", {"block_tokens": 32}), ("kv_affinity", {}), ("32", "64")),
    ],
)
def test_wants_that_conflict_are_refused(active: Any, canary: Any, words: tuple[str, str]) -> None:
    dispatcher = make_dispatcher(active[0], **active[1])
    before = dispatcher.policy, dispatcher.policy_version, dispatcher.want
    for change in (
        lambda: dispatcher.set_canary(make_policy(*canary), 0.5),
        lambda: dispatcher.set_shadow(make_policy(*canary)),
    ):
        with pytest.raises(ConfigError, match="same") as caught:
            change()
        assert not [word for word in words if word not in str(caught.value)]
    assert (dispatcher.policy, dispatcher.policy_version, dispatcher.want) == before
    assert dispatcher.canary is dispatcher.shadow is None
    # The same with a swap beside a canary that is there already.
    dispatcher.set_canary(make_policy(active[0], active[1]), 0.5)
    with pytest.raises(ConfigError, match="same"):
        dispatcher.swap_policy(make_policy(*canary))
    assert dispatcher.policy is before[0]


# ---- failures


def test_a_canary_that_raises_hurts_nobody() -> None:
    dispatcher, errors = make_dispatcher("kv_affinity"), []
    dispatcher.on_policy_error = errors.append
    server = KvServer(dispatcher)
    home = server.put(*[prompt(f"k{i}", 640, f"k{i}") for i in range(64)])
    dispatcher.set_canary(Outside(RuntimeError("bug")), 0.5)
    taken = [dispatcher.canary.takes(keyed(f"k{i}")) for i in range(64)]
    for turn in range(3):
        reply = server.ask(*[prompt(f"k{i}", 700 + turn, f"k{i}") for i in range(64)])
        assert reply.ranks == home
        assert [reason == "policy_error" for reason in reply.reasons] == taken
    assert len(errors) == 3 * sum(taken)
    assert {error.policy for error in errors} == {"outside"}
    assert decisions(dispatcher)["outside"] == {"policy_error": 3 * sum(taken)}
    dispatcher.set_canary(None)
    assert set(server.ask(prompt("k0", 800, "k0")).reasons) == {"affinity_hit"}


def test_the_stand_in_of_a_failed_canary_goes_with_it() -> None:
    dispatcher = make_dispatcher("prefix_affinity")
    dispatcher.set_canary(Outside(RuntimeError("bug")), 1.0)
    dispatcher.handle(query([keyed("a")]), 0.0)
    assert len(dispatcher._others) == 2
    dispatcher.set_canary(None)
    assert dispatcher._others == ()


def test_a_swap_of_the_active_policy_keeps_the_canary_and_its_memory() -> None:
    dispatcher = make_dispatcher("round_robin")
    dispatcher.set_canary(make_policy("kv_affinity"), 0.5)
    server = KvServer(dispatcher)
    server.put(*[prompt(f"k{i}", 640, f"k{i}") for i in range(64)])
    memory = dispatcher.canary.seat.budget.instances[INSTANCE].view.memory
    dispatcher.swap_policy(make_policy("total_tokens"))
    assert dispatcher.canary.share == 0.5
    assert dispatcher.canary.seat.budget.instances[INSTANCE].view.memory is memory
    assert dispatcher.want == make_policy("kv_affinity").want
