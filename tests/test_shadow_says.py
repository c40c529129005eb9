"""What the shadow says, what bounds it, and how it ends."""

from collections import deque
from random import Random
from typing import Any

import pytest

from sidecar import shadow as module
from sidecar.dispatcher import Dispatcher
from sidecar.hashing import key_hash
from sidecar.metrics import Health, collect
from sidecar.policies import Choice, make_policy
from sidecar.shadow import MAX_KEYS, Assigned, Shadow
from sidecar.wire import RequestFacts
from tests.kv.server import Server as KvServer
from tests.kv.server import prompt
from tests.outside import Outside
from tests.shadowing import BUG, followed, found
from tests.support import INSTANCE, keyed, make_dispatcher, order_of, query, report

# ---- what it says


def agentic(dispatcher: Dispatcher) -> None:
    """Forty sessions that grow by 1,000 tokens a turn; ranks tell what they really found."""
    server, drawn = KvServer(dispatcher), Random(1)
    cached: dict[tuple[int, int], int] = {}
    for turn in range(1, 13):
        for key in drawn.sample(range(40), 40):
            server.now += 0.05
            (rank,) = server.put(prompt(f"s{key}", 1000 * turn, f"s{key}"))
            server.schedulers[rank].add(cached_tokens=cached.get((rank, key), 0))
            cached[rank, key] = 1000 * turn
        server.finish()


def test_kv_affinity_would_find_what_round_robin_does_not() -> None:
    dispatcher = followed(make_dispatcher("round_robin"))
    dispatcher.set_shadow(make_policy("kv_affinity"))
    assert dispatcher.handle(query(), 0.0).want == make_policy("kv_affinity").want
    agentic(dispatcher)
    roles = found(dispatcher).roles
    shadow, active = roles["shadow"], roles["active"]
    assert shadow.prompt_tokens == active.prompt_tokens > 0
    assert shadow.expected_tokens > 0.8 * shadow.prompt_tokens
    assert active.expected_tokens < 0.6 * active.prompt_tokens
    assert active.avoidable_tokens > 10 * shadow.avoidable_tokens
    assert found(dispatcher).disagreed > found(dispatcher).agreed


def test_round_robin_would_find_less_than_kv_affinity() -> None:
    dispatcher = followed(make_dispatcher("kv_affinity"))
    dispatcher.set_shadow(make_policy("round_robin"))
    agentic(dispatcher)
    roles = found(dispatcher).roles
    assert roles["active"].expected_tokens > 0.8 * roles["active"].prompt_tokens
    assert roles["shadow"].expected_tokens < 0.6 * roles["shadow"].prompt_tokens
    # What the active role expects here is what the policy said itself when it decided.
    said = dispatcher.tallies[INSTANCE].roles["active"]
    assert roles["active"].expected_tokens == pytest.approx(said.expected_tokens)
    assert roles["active"].prompt_tokens == said.prompt_tokens


def test_what_the_hook_decided_alone_went_there_for_the_shadow_too() -> None:
    dispatcher = followed(make_dispatcher("round_robin"))
    dispatcher.set_shadow(make_policy("kv_affinity"))
    server = KvServer(dispatcher)
    for size in (640, 1280, 1920):
        server.put(prompt("a", size, "a"))
    shadow = dispatcher.shadow
    assert shadow is not None
    (home,) = (ours for _, ours in shadow._last.values())
    # The client names a rank: the hook remembers that one, and says so in the next query.
    other = next(rank for rank in range(8) if rank != home)
    server.keys[b"a"] = other, server.now
    server.put(prompt("a", 2560, "a"))
    assert [ours for _, ours in shadow._last.values()] == [other]


def test_spills_and_imbalance_of_both() -> None:
    dispatcher = followed(make_dispatcher("total_requests"))
    dispatcher.set_shadow(make_policy("prefix_affinity", {"min_load_gap": 0}))
    server = KvServer(dispatcher)
    home = order_of(key_hash(b"hot"), range(8))[0]
    for rank in range(8):
        server.say(rank, running=60 * (rank == home))
    for _ in range(40):
        server.put(prompt("a", 640, "hot"))
    comparison = found(dispatcher)
    assert comparison.roles["shadow"].spills > 0
    assert comparison.roles["active"].spills == 0
    ranks = list(range(8))
    for role in ("active", "shadow"):
        assert comparison.assigned[role].imbalance(ranks) >= 1


def test_imbalance_fades_and_knows_only_live_ranks() -> None:
    one = Assigned()
    assert one.imbalance([0, 1]) == 1
    assert one.imbalance([]) == 1
    one.add(0, 1000.0, 0.0)
    assert one.imbalance([0, 1]) == 2
    assert one.imbalance([1, 2]) == 1
    one.add(1, 1000.0, 0.0)
    assert one.imbalance([0, 1]) == 1
    one.add(1, 0.0, 10_000.0)
    one.add(1, 500.0, 10_000.0)
    assert one.imbalance([0, 1]) == 2, "what was long ago is gone"
    one.add(0, 500.0, 9000.0)
    assert one.imbalance([0, 1]) == 1, "one that comes late counts too"


# ---- bounds and ends


def test_its_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = followed(make_dispatcher("round_robin"))
    dispatcher.set_shadow(make_policy("total_requests"))
    for start in range(0, 1_000_000 // 50, 2000):  # keys of a fiftieth: the bound is one too
        monkeypatch.setattr(module, "MAX_KEYS", MAX_KEYS // 50)
        batch = [RequestFacts(b"%d" % (start + i), 0, 10) for i in range(2000)]
        dispatcher.handle(query(batch), start / 1e6)
    assert dispatcher.shadow is not None
    assert len(dispatcher.shadow._last) == MAX_KEYS // 50
    newest = next(reversed(dispatcher.shadow._last))
    dispatcher.handle(query([RequestFacts(b"0", 0, 10)]), 1.0)
    assert newest in dispatcher.shadow._last


def test_forgotten_instances() -> None:
    dispatcher = followed(make_dispatcher("kv_affinity", max_instances=2))
    dispatcher.set_shadow(make_policy("round_robin"))
    for number in range(10):
        dispatcher.handle(query([keyed("a")], instance=f"i{number}"), 100.0 * number)
    assert dispatcher.shadow is not None
    assert set(dispatcher.shadow.comparisons) == {"i8", "i9"} == set(dispatcher.tallies)
    b"".join(family.exposition() for family in collect(dispatcher, Health(), 1000.0))


def test_it_ends_and_leaves_nothing() -> None:
    dispatcher = followed(make_dispatcher("round_robin"))
    dispatcher.set_shadow(make_policy("kv_affinity"))
    dispatcher.handle(query([keyed("a")]), 0.0)
    dispatcher.set_shadow(None)
    assert dispatcher.shadow is None
    assert dispatcher.policy_version == 3
    assert dispatcher.handle(query([keyed("a")]), 0.0).want == make_policy("round_robin").want


def test_a_swap_of_the_active_policy_begins_it_anew() -> None:
    dispatcher = followed(make_dispatcher("round_robin"), late=5)
    dispatcher.set_shadow(make_policy("kv_affinity"))
    server = KvServer(dispatcher)
    for i in range(20):
        server.put(prompt(f"{i}", 640, f"{i}"))
    dispatcher.swap_policy(make_policy("kv_affinity"))
    assert dispatcher.shadow is not None
    assert dispatcher.shadow.policy.name == "kv_affinity"
    assert not dispatcher.shadow.comparisons
    for i in range(20):
        server.put(prompt(f"{i}", 700, f"{i}"))
    comparison = found(dispatcher)
    # What was decided before the swap, and looked at after it, is nobody's here.
    assert comparison.agreed + comparison.disagreed <= 20
    assert comparison.disagreed == 0
    for seat in (dispatcher.shadow._own.seat, dispatcher.active):
        view = seat.budget.instances[INSTANCE].view
        assert sum(view.in_flight) in (40, 35), "up to the five that wait"


def test_late_reports_and_queries_are_left_out() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    dispatcher.report(report(0, 5, running=3), 1.0)
    asked = query([keyed("a")], epoch=5)
    reply = dispatcher.handle(asked, 1.0)
    dispatcher.set_shadow(make_policy("total_requests"))
    shadow = dispatcher.shadow
    assert shadow is not None
    shadow.report(report(0, 4, running=9), 1.1)
    shadow.report(report(0, 5, running=9), 1.1)
    assert shadow._own.seat.budget.instances[INSTANCE].view.requests[0] == 3
    deque(shadow.follow(asked, reply, 1.0), maxlen=0)
    assert not shadow.comparisons, "decided before it began"
    stale = query([keyed("a")], epoch=4)
    later = dispatcher.handle(query([keyed("a")], epoch=5), 1.2)
    deque(shadow.follow(stale, later, 1.2), maxlen=0)
    assert not shadow.comparisons


def test_ranks_that_leave_while_it_is_behind() -> None:
    dispatcher = followed(make_dispatcher("kv_affinity"), late=3)
    dispatcher.set_shadow(make_policy("total_requests"))
    for live in ([0, 1, 2], [2], [0, 5, 9], [1, 2], list(range(8)), [7]):
        dispatcher.handle(query([keyed(f"k{n}") for n in range(9)], ranks=live), 0.0)
    assert found(dispatcher).agreed + found(dispatcher).disagreed == 27


@pytest.mark.parametrize("answer", [BUG, SystemExit(2), Choice(99, "placed"), None], ids=repr)
def test_a_shadow_that_fails(answer: Any) -> None:
    dispatcher, errors = followed(make_dispatcher("kv_affinity")), []
    dispatcher.on_policy_error = errors.append
    dispatcher.set_shadow(Outside(answer))
    server = KvServer(dispatcher)
    for i in range(20):
        assert server.ask(prompt(f"{i}", 640, f"{i}")).reasons == ["placed"]
    assert len(errors) == 20
    assert {error.policy for error in errors} == {"outside"}
    assert found(dispatcher).agreed + found(dispatcher).disagreed == 20
    assert dispatcher.tallies[INSTANCE].decisions == {"kv_affinity": {"placed": 20}}


def test_a_shadow_beside_a_canary() -> None:
    dispatcher = followed(make_dispatcher("kv_affinity"))
    dispatcher.set_canary(make_policy("round_robin"), 0.5)
    dispatcher.set_shadow(make_policy("kv_affinity"))
    server = KvServer(dispatcher)
    for turn in range(1, 5):
        server.put(*[prompt(f"{i}", 640 * turn, f"{i}") for i in range(40)])
    comparison = found(dispatcher)
    assert comparison.agreed + comparison.disagreed == 160
    assert comparison.roles["active"].requests == 160, "all that was done, the canary's too"
    assert comparison.roles["shadow"].expected_tokens > comparison.roles["active"].expected_tokens


def test_it_gives_way_within_a_batch() -> None:
    dispatcher = make_dispatcher("round_robin")
    dispatcher.set_shadow(make_policy("kv_affinity"))
    asked = query([keyed(f"{i}") for i in range(100)])
    reply = dispatcher.handle(asked, 0.0)
    shadow: Shadow | None = dispatcher.shadow
    assert shadow is not None
    assert len(list(shadow.follow(asked, reply, 0.0))) == 25
