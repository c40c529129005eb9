"""A policy that fails or answers nonsense, at each place where it is called; and who stands in."""

import math
import signal
from asyncio import CancelledError
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from sidecar.errors import PeerError, PolicyError
from sidecar.loads import LoadView
from sidecar.metrics import Health, collect
from sidecar.policies import Choice, KvAffinity, Reason, make_policy
from sidecar.policies.base import NoParams
from sidecar.policies.kv_affinity import KvAffinityParams
from sidecar.wire import RequestFacts, Want
from tests.kv.server import Server as KvServer
from tests.kv.server import prompt
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
    reasons,
    report,
)

BUG = RuntimeError("SECRET-key")
PANIC = type("PanicException", (BaseException,), {})("of a policy in Rust")


def failing(policy: Any) -> tuple[Any, list[PolicyError]]:
    """A dispatcher whose policy is that one, and its errors."""
    dispatcher, errors = make_dispatcher("kv_affinity"), []
    dispatcher.on_policy_error = errors.append
    dispatcher.swap_policy(policy)
    return dispatcher, errors


def test_ctrl_c_ends_a_replay_and_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, errors = failing(Outside(KeyboardInterrupt()))
    # Not whatever started us left: a shell's background job ignores it.
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        dispatcher.handle(query([keyed("a")]), 0.0)
    # Who serves has a handler of its own, so what is raised there is the policy's.
    monkeypatch.setattr(signal, "getsignal", lambda number: lambda *about: None)
    assert dispatcher.handle(query([keyed("a")]), 0.0).reasons == ["policy_error"]
    assert len(errors) == 1


class Text(str):
    """A string that is not quite one."""


def steps() -> Iterator[Any]:
    yield from (0, "placed", -1)


@pytest.mark.parametrize(
    "answer",
    [
        *(BUG, SystemExit(1), KeyError(b"SECRET-key"), RecursionError()),
        *(PANIC, CancelledError(), GeneratorExit()),
        *(Choice(True, "placed"), Choice(0, Text("placed")), Choice(0, "placed", True)),
        *(Choice(0, "placed", -2), Choice(0, "policy", 0), (0, "placed"), "abc", {0: 1}),
        *(Choice(8, "placed"), Choice(-1, "placed"), Choice(0, "placed", 8), Choice(10**30, "x")),
        *(Choice(math.nan, "placed"), Choice(0, "", -1), Choice(0, b"placed", -1)),
    ],
    ids=repr,
)
def test_the_default_policy_stands_in(answer: Any) -> None:
    dispatcher, errors = failing(Outside(answer))
    server = KvServer(dispatcher)
    for rank in range(8):
        server.report(rank)
    home = {f"k{i}": server.put(prompt(f"k{i}", 640, f"k{i}"))[0] for i in range(16)}
    assert Counter(home.values()) == dict.fromkeys(range(8), 2), "placed by load, as the default"
    for _ in range(3):
        for key, rank in home.items():
            reply = server.ask(prompt(key, 1280, key))
            assert (reply.ranks, reply.reasons) == ([rank], ["policy_error"])
    assert len(errors) == 64
    assert {error.policy for error in errors} == {"outside"}
    assert not [error for error in errors if "SECRET" in str(error)], "may be a routing key"
    assert dispatcher.tallies[INSTANCE].decisions == {"outside": {"policy_error": 64}}
    assert sum(in_flight(dispatcher.budget.instances[INSTANCE])) == 64


def test_what_it_answers_is_taken_as_it_is() -> None:
    for answer in ((3, "placed", -1), [3, "placed", -1], Outside(Choice(3, "placed")).answer):
        dispatcher, errors = failing(Outside(answer))
        assert dispatcher.handle(query([keyless()]), 0.0).ranks == [3]
        assert not errors
    dispatcher, errors = failing(Outside(lambda facts, view: steps()))
    reply = dispatcher.handle(query([keyless()] * 2), 0.0)
    assert (reply.ranks, reply.reasons, errors) == ([0, 0], ["placed"] * 2, [])


def test_the_first_query_of_a_stand_in_keeps_sessions() -> None:
    # Sessions that the hook knows of from before: the stand-in has never seen any of them.
    dispatcher, errors = failing(Outside(BUG))
    facts = [RequestFacts(b"k%d" % i, 0, 100, None, [], i % 8, 500) for i in range(50)]
    reply = dispatcher.handle(query(facts), 0.0)
    assert reply.ranks == [i % 8 for i in range(50)]
    assert len(errors) == 50


def test_a_policy_that_fails_now_and_then() -> None:
    asked = iter(range(10**6))
    dispatcher, errors = failing(
        Outside(lambda facts, view: BUG if next(asked) % 3 == 0 else Choice(5, "placed"))
    )
    server = Server()
    replies = [server.ask(dispatcher, [keyed(f"k{i}")], 1.0) for i in range(30)]
    assert [reply.reasons[0] for reply in replies] == ["policy_error", "placed", "placed"] * 10
    assert len(errors) == 10
    assert sum(in_flight(dispatcher.budget.instances[INSTANCE])) == 30
    stand_in = dispatcher._stand_in.budget.instances[INSTANCE]
    assert in_flight(stand_in) == in_flight(dispatcher.budget.instances[INSTANCE])


def test_a_policy_made_from_ours_is_not_taken_for_it() -> None:
    class Derived(KvAffinity):
        name = "derived"

        def choose(self, facts: Any, view: Any) -> Choice:
            raise BUG

    dispatcher, errors = failing(Derived(KvAffinityParams()))
    facts = [RequestFacts(b"k%d" % i, 0, 100, None, [], i % 8, 500) for i in range(50)]
    assert dispatcher.handle(query(facts), 0.0).ranks == [i % 8 for i in range(50)]
    assert len(errors) == 50


def test_loads_decide_when_the_default_fails_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, errors = failing(make_policy("kv_affinity"))
    monkeypatch.setattr(KvAffinity, "choose", lambda *_: None)
    reply = dispatcher.handle(query([keyed(f"k{i}") for i in range(16)]), 0.0)
    assert Counter(reply.ranks) == dict.fromkeys(range(8), 2)
    assert reasons(reply) == {"policy_error"}
    assert len(errors) == 16


@pytest.mark.parametrize("fault", [BUG, SystemExit(1)], ids=repr)
@pytest.mark.parametrize("part", ["new_memory", "learn", "heard", "expected"])
def test_a_part_that_fails_costs_no_request(part: str, fault: BaseException) -> None:
    policy = OutsideLearner(**{part: fault})
    dispatcher, errors = failing(policy)
    dispatcher.report(report(0, 1, running=2), 0.0)
    server = Server()
    for step in range(5):
        reply = server.ask(dispatcher, [keyed("a"), keyless()], step + 1.0)
        assert reply.ranks == [0, 0]
        dispatcher.report(report(0, step + 2, running=2), step + 1.0)
    assert errors
    assert {error.policy for error in errors} == {"outside"}
    assert part in policy.calls
    assert sum(in_flight(dispatcher.budget.instances[INSTANCE])) == 10


@pytest.mark.parametrize(
    "expected",
    [
        *(None, 5, "many", {0: "many"}, {0: math.nan}, {0: math.inf}, {1: math.inf}, {0: -1.0}),
        *({0: None}, {0: 10**400}, [1, 2], {1: math.nan}),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_prediction_without_sense_spoils_no_figure(expected: Any) -> None:
    dispatcher, errors = failing(OutsideLearner(expected=expected))
    dispatcher.handle(query([keyed("a"), keyless()]), 0.0)
    assert dispatcher.expected == [None, None]
    assert len(errors) == 2
    did = dispatcher.tallies[INSTANCE].roles["active"]
    assert (did.requests, did.prompt_tokens, did.expected_tokens, did.avoidable_tokens) == (
        *(2, 0),
        *(0.0, 0.0),
    )
    b"".join(family.exposition() for family in collect(dispatcher, Health(), 0.0))


def test_a_prediction_of_ranks_that_are_gone() -> None:
    dispatcher, errors = failing(OutsideLearner(expected={0: 10, 99: 50.0, 7: 20}))
    dispatcher.handle(query([keyed("a")]), 0.0)
    assert dispatcher.expected == [(10.0, 20.0)]
    assert not errors


def test_it_recovers_with_the_next_policy() -> None:
    dispatcher, errors = failing(Outside(BUG))
    server = Server()
    first = server.ask(dispatcher, [keyed(f"k{i}") for i in range(16)], 1.0)
    dispatcher.swap_policy(make_policy("kv_affinity"))
    facts = [
        RequestFacts(b"k%d" % i, 0, 100, None, [], rank, 10) for i, rank in enumerate(first.ranks)
    ]
    second = server.ask(dispatcher, facts, 1.0)
    assert second.ranks == first.ranks
    assert reasons(second) == {"affinity_hit"}
    assert len(errors) == 16
    assert dispatcher._others == (), "nobody pays for the stand-in any more"


def test_swaps_keep_loads_and_an_equal_policy_its_memory() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    load_up(dispatcher, [3] * 8)
    server = Server()
    server.ask(dispatcher, [keyed("a")] * 5, 1.0)
    view = dispatcher.budget.instances[INSTANCE].view
    memory = view.memory
    dispatcher.swap_policy(make_policy("kv_affinity"))
    assert view.memory is memory
    dispatcher.swap_policy(make_policy("kv_affinity", {"move_tokens": 1}))
    assert view.memory is not memory
    assert (view.total, sum(view.in_flight)) == (29, 5)
    dispatcher.swap_policy(make_policy("round_robin"))
    assert view.memory is None
    assert view.total == 29


def test_a_query_that_is_refused_tells_nobody_anything() -> None:
    dispatcher = make_dispatcher("kv_affinity", max_instances=1)
    dispatcher.set_canary(make_policy("kv_affinity", {"move_tokens": 1}), 0.5)
    dispatcher.handle(query([keyed("a")], epoch=9), 0.0)
    seats = (dispatcher.active, dispatcher.canary.seat)
    for bad in (query([keyed("b")], instance="b"), query([keyed("b")], epoch=8)):
        with pytest.raises(PeerError):
            dispatcher.handle(bad, 0.1)
    for seat in seats:
        assert set(seat.budget.instances) == {INSTANCE}
        assert sum(in_flight(seat.budget.instances[INSTANCE])) == 1
    dispatcher.report(report(0, 5), 1.0)
    with pytest.raises(PeerError):
        dispatcher.report(report(0, 5), 1.0)
    # One that is idle makes room, in all of them.
    dispatcher.handle(query([keyed("b")], instance="b"), 200.0)
    assert [set(seat.budget.instances) for seat in seats] == [{"b"}] * 2


def test_a_twin_changes_on_its_own() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    load_up(dispatcher, [1] * 8)
    server = Server()
    server.ask(dispatcher, [keyed("a")] * 4, 1.0)
    one = dispatcher.budget.instances[INSTANCE]
    other = dispatcher.budget.twin().instances[INSTANCE]
    for name in ("requests", "queued", "in_flight", "tokens", "usable", "counted", "ranks"):
        ours, theirs = getattr(one.view, name), getattr(other.view, name)
        assert ours == theirs
        assert ours is not theirs
    assert other.view.memory is None
    before = list(one.view.requests), one.view.total, in_flight(one)
    other.assign(3, 100)
    other.apply_report(report(0, 9, running=50), 2.0)
    other.apply_query(query(ranks=[1, 2], epoch=7), 3.0)
    assert (list(one.view.requests), one.view.total, in_flight(one)) == before
    assert one.epoch == 1
    assert one.states.keys() == set(range(8))


def test_a_swap_mends_what_a_policy_has_written_into_the_view() -> None:
    class Vandal:
        name = "vandal"
        Params = NoParams

        def __init__(self) -> None:
            self.params, self.want = NoParams(), Want()

        def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
            view.ranks.clear()
            view.changed = view.requests = None  # type: ignore[assignment]
            return Choice(0, Reason.PLACED)

    server = Server()
    dispatcher = make_dispatcher("kv_affinity")
    before = server.ask(dispatcher, [keyed("a"), keyed("b")], 1.0)
    dispatcher.swap_policy(Vandal())
    with pytest.raises(Exception):  # noqa: B017 - whatever it broke; the pump answers a refusal
        server.ask(dispatcher, [keyed("a")], 2.0)
    dispatcher.swap_policy(make_policy("kv_affinity"))
    after = server.ask(dispatcher, [keyed("a"), keyed("b")], 3.0)
    assert len(before.ranks) == len(after.ranks) == 2
    view = dispatcher.budget.instances[INSTANCE].view
    assert view.ranks == list(range(server.ranks))
    assert sum(view.requests) == sum(server.sent) == 4
