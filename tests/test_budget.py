"""Load accounting: in flight, staleness, dead ranks, bounds. Restarts: test_budget_restarts.py."""

import contextlib
import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.budget import IDLE_INSTANCE_SECONDS, Budget, Instance
from sidecar.errors import PeerError
from sidecar.wire import MAX_RANKS
from tests.support import STALE_SECONDS, Server, in_flight, query, report


def fresh_instance(reported: int = 0) -> Instance:
    """An instance of 8 ranks of which the first `reported` have reported."""
    instance = Instance("i", STALE_SECONDS)
    for rank in range(reported):
        instance.apply_report(report(rank), 0.0)
    return instance


def test_load_is_running_waiting_and_in_flight() -> None:
    instance = fresh_instance()
    instance.apply_report(
        report(2, received=7, received_tokens=700, running=3, waiting=2, tokens=5000), 0.0
    )
    view = instance.apply_query(
        query(sent=[0, 0, 11, 0, 0, 0, 0, 0], sent_tokens=[0, 0, 900, 0, 0, 0, 0, 0]), 0.0
    )
    assert view.requests == [0, 0, 3 + 2 + 4, 0, 0, 0, 0, 0]
    assert view.tokens == [0, 0, 5000 + 200, 0, 0, 0, 0, 0]
    assert in_flight(instance) == [0, 0, 4, 0, 0, 0, 0, 0]


def test_received_before_sent_is_heard_is_no_negative_load() -> None:
    instance = fresh_instance()
    instance.apply_report(report(0, received=9, received_tokens=90, running=9), 0.0)
    view = instance.apply_query(query(ranks=[0], sent=[4], sent_tokens=[40]), 0.0)
    assert (view.requests, view.tokens) == ([9], [0])


def test_a_stale_zero_report_does_not_erase_what_is_in_flight() -> None:
    instance = fresh_instance(8)
    view = instance.apply_query(query(sent=[5] * 8, sent_tokens=[50] * 8), 0.1)
    for seq in range(2, 6):
        instance.apply_report(report(3, seq), 0.1 * seq)
        assert (view.requests[3], view.tokens[3], view.total) == (5, 50, 40)
    instance.apply_report(report(3, 6, received=5, received_tokens=50, running=5), 0.6)
    assert (view.requests[3], view.tokens[3], view.total) == (5, 0, 40)


@pytest.mark.parametrize("seq", [5, 4, 1, 0])
def test_old_and_repeated_reports_are_dropped(seq: int) -> None:
    instance = fresh_instance()
    instance.apply_report(report(0, 5, running=2), 0.0)
    instance.apply_query(query(), 0.0)
    with pytest.raises(PeerError) as caught:
        instance.apply_report(report(0, seq, running=99), 1.0)
    assert caught.value.cause == "stale_report"
    assert instance.view.requests[0] == 2
    assert instance.states[0].reported_at == 0.0


def test_a_report_of_an_older_process_is_dropped() -> None:
    instance = fresh_instance()
    instance.apply_report(report(0, 1, epoch=2, running=2), 0.0)
    with pytest.raises(PeerError) as caught:
        instance.apply_report(report(0, 50, epoch=1, running=99), 0.1)
    assert caught.value.cause == "stale_report"
    # A clock that was set back must not shut a rank out for good.
    instance.apply_report(report(0, 1, epoch=1, running=3), STALE_SECONDS + 0.1)
    assert instance.apply_query(query(), STALE_SECONDS + 0.1).requests[0] == 3


def test_a_new_process_with_an_older_clock_is_heard_before_its_rank_is_stale() -> None:
    instance = Instance("i", STALE_SECONDS)
    instance.apply_query(query(), 0.0)
    for rank in range(8):
        instance.apply_report(report(rank, 1, epoch=2), 0.0)
    now = 0.0
    for seq in range(1, 60):
        for rank in range(8):
            now += 0.03
            with contextlib.suppress(PeerError):
                instance.apply_report(report(rank, seq, epoch=1), now)
            assert all(instance.apply_query(query(), now).usable)
    assert [state.report.epoch for state in instance.states.values()] == [1] * 8


def test_a_rank_that_stops_reporting_is_stale_until_it_reports() -> None:
    instance = fresh_instance(8)
    now = 0.0
    for step in range(1, 80):
        now = step * 0.1
        for rank in (0, 1, 3, 4, 5, 6, 7):
            instance.apply_report(report(rank, 1 + step, running=rank), now)
        view = instance.apply_query(query(), now)
        if now <= STALE_SECONDS:
            assert view.usable[2] and view.counted[2]
        # It may be noticed a tenth of the limit late.
        if now > STALE_SECONDS * 1.1 + 0.1:
            assert not view.usable[2] and not view.counted[2]
            assert (view.known, view.total, view.average()) == (7, 26, 26 / 7)
    instance.apply_report(report(2, 2, running=6), now)
    assert view.usable[2] and view.counted[2]
    assert (view.known, view.average()) == (8, 4.0)


def test_all_stale_is_no_known_load_and_all_usable() -> None:
    instance = fresh_instance(8)
    instance.apply_query(query(), 0.0)
    view = instance.apply_query(query(), STALE_SECONDS * 3)
    assert (view.known, view.average()) == (0, 0.0)
    assert view.usable == [True] * 8


@given(st.lists(st.floats(0.0, 0.25), min_size=8, max_size=8), st.floats(1.0, 10.0))
def test_ranks_that_fall_silent_together_are_all_usable(
    heartbeats: list[float], stall: float
) -> None:
    """As under DP attention, which keeps them in step, or if it is we who stood still."""
    instance = fresh_instance(8)
    now = 0.0
    for seq in range(2, 20):
        now = seq / 4
        for rank, phase in enumerate(heartbeats):
            instance.apply_report(report(rank, seq), now + phase)
    ends = now + 0.25 + stall * STALE_SECONDS
    while now < ends:
        now += 0.1
        assert all(instance.apply_query(query(), now).usable)
    for rank, phase in sorted(enumerate(heartbeats), key=lambda each: each[1]):
        instance.apply_report(report(rank, 20), ends + phase)
        assert all(instance.apply_query(query(), ends + phase).usable)


def test_one_that_stays_silent_when_the_others_go_on_is_stuck() -> None:
    instance = fresh_instance(8)
    begins, now = STALE_SECONDS * 3, STALE_SECONDS * 3
    while all(instance.apply_query(query(), now).usable):
        now += 0.25
        for rank in range(7):
            instance.apply_report(report(rank, round(now * 4)), now)
        assert now < begins + STALE_SECONDS
    assert instance.view.usable == [True] * 7 + [False]


def test_a_rank_that_never_reports_is_as_loaded_as_the_others() -> None:
    """Its hook is off or its node cannot reach us: that is no reason to leave it idle."""
    instance = fresh_instance(7)
    view = instance.apply_query(query(), 0.0)
    assert view.usable[7] and not view.counted[7]
    for rank in range(7):
        instance.apply_report(report(rank, 2, running=6), STALE_SECONDS * 2)
    sent = {"sent": [0] * 7 + [500], "sent_tokens": [0] * 8}
    instance.apply_query(query(**sent), STALE_SECONDS * 2)
    assert view.usable == [True] * 8
    assert view.counted == [True] * 7 + [False]
    assert view.requests == [6] * 8
    instance.apply_report(report(7, 1, running=1, received=500), STALE_SECONDS * 2)
    assert view.requests[7] == 1


def test_dead_ranks_leave_the_average_and_return_with_history() -> None:
    instance = fresh_instance()
    for rank, running in enumerate([5, 0, 5]):
        instance.apply_report(report(rank, running=running, received=2), 0.0)
    view = instance.apply_query(query(ranks=[0, 2], sent=[2, 2], sent_tokens=[0, 0]), 0.0)
    assert (view.ranks, view.requests, view.average()) == ([0, 2], [5, 5], 5.0)
    # It is heard of while it is down, and that changes nobody's average.
    instance.apply_report(report(1, 2, running=1, received=2), 0.0)
    assert (view.average(), view.known) == (5.0, 2)
    view = instance.apply_query(query(ranks=[0, 1, 2], sent=[2, 3, 2], sent_tokens=[0] * 3), 0.0)
    assert (view.requests, view.known) == ([5, 2, 5], 3)


def test_cold_start_counts_what_is_in_flight() -> None:
    instance = fresh_instance()
    view = instance.apply_query(query(), 0.0)
    assert (view.known, view.total) == (8, 0)
    instance.assign(3, 100)
    assert (view.requests[3], view.tokens[3], view.total, view.average()) == (1, 100, 1, 1 / 8)
    sent = [0, 0, 0, 1, 0, 0, 0, 0]
    view = instance.apply_query(query(sent=sent, sent_tokens=[100 * n for n in sent]), 0.0)
    assert (view.requests[3], view.total) == (1, 1)


def test_a_decision_counts_once_when_the_next_query_confirms_it() -> None:
    instance = fresh_instance(8)
    view = instance.apply_query(query(), 0.0)
    instance.assign(1, 10)
    sent = [0, 1, 0, 0, 0, 0, 0, 0]
    instance.apply_query(query(sent=sent, sent_tokens=[10 * n for n in sent]), 0.0)
    assert view.requests == sent
    # One that the controller did not follow (its deadline had passed) is no load.
    instance.assign(2, 10)
    instance.apply_query(query(sent=sent, sent_tokens=[10 * n for n in sent]), 0.0)
    assert view.requests == sent


def test_a_thousand_aborted_requests_leave_nothing_in_flight() -> None:
    server, instance = Server(), fresh_instance()
    for number in range(1000):
        server.send(number % 8, 50)
    assert instance.apply_query(server.query(), 0.0) is instance.view
    for rank, scheduler in enumerate(server.schedulers):
        scheduler.take_in()
        scheduler.running = 0  # aborted as soon as they came
        instance.apply_report(server.report(rank), 0.1)
    assert instance.view.requests == instance.view.tokens == [0] * 8
    assert instance.view.total == 0


@pytest.mark.parametrize("ranks", [[1, 0], [0, 0], [0, 1, 1]])
def test_ranks_ascend(ranks: list[int]) -> None:
    with pytest.raises(PeerError, match="ascend") as caught:
        fresh_instance().apply_query(query(ranks=ranks), 0.0)
    assert caught.value.cause == "field"


def test_ranks_are_bounded() -> None:
    instance = fresh_instance()
    instance.apply_query(query(ranks=range(MAX_RANKS)), 0.0)
    for rank in (MAX_RANKS, 65535):
        with pytest.raises(PeerError, match=str(MAX_RANKS)) as caught:
            instance.apply_report(report(rank), 0.0)
        assert caught.value.cause == "field"
    # live ranks take the place of those that no controller calls live
    view = instance.apply_query(query(ranks=range(1, MAX_RANKS + 1)), 0.0)
    assert len(instance.states) == len(view.requests) == len(view.counted) == MAX_RANKS


def test_instances_are_bounded_and_idle_ones_forgotten() -> None:
    budget, forgotten = Budget(STALE_SECONDS, 2), []
    budget.on_forget = forgotten.append
    budget.instance("a", 0.0)
    budget.instance("b", 10.0).apply_report(report(), 10.0)
    with pytest.raises(PeerError, match="max_instances") as caught:
        budget.instance("c", IDLE_INSTANCE_SECONDS - 1)
    assert caught.value.cause == "too_many_instances"
    assert budget.instance("a", 0.0) is budget.instances["a"]
    budget.instance("c", IDLE_INSTANCE_SECONDS)
    assert (sorted(budget.instances), forgotten) == (["b", "c"], ["a"])


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["send", "take", "finish", "report", "query", "ranks", "wait"]),
        st.integers(0, 5),
        st.integers(0, 400),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_view_equals_a_recomputation(operations: list[tuple[str, int, int]]) -> None:
    server, instance, now = Server(ranks=6), Instance("i", STALE_SECONDS), 0.0
    live = list(range(6))
    for name, rank, amount in operations:
        scheduler, asked = server.schedulers[rank], False
        if name == "send":
            server.send(rank, amount)
        elif name == "take":
            scheduler.take_in()
        elif name == "finish":
            scheduler.running = max(0, scheduler.running - amount)
        elif name == "report":
            instance.apply_report(server.report(rank), now)
        elif name == "wait":
            now += amount / 100
        else:
            if name == "ranks":
                live = sorted(set(live) ^ {rank})
            sent = [[counts[r] for r in live] for counts in (server.sent, server.sent_tokens)]
            message = server.query(ranks=live, sent=sent[0], sent_tokens=sent[1])
            instance.apply_query(message, now)
            asked = True
            if live and amount % 2:
                instance.assign(amount % len(live), amount)
        check_view(instance, now, refreshed=asked and name == "ranks")


def check_view(instance: Instance, now: float, *, refreshed: bool) -> None:
    view, again = instance.view, copy.deepcopy(instance)
    again.refresh(now)
    for position, rank in enumerate(view.ranks):
        # What is assumed of a rank that never reported follows the others a little late.
        if instance.states[rank].report is not None or not (view.known or again.view.known):
            assert view.requests[position] == again.view.requests[position]
            assert view.tokens[position] == again.view.tokens[position]
    assert view.known == sum(view.counted)
    assert view.total == sum(n for n, c in zip(view.requests, view.counted, strict=True) if c)
    assert view.average() == (view.total / view.known if view.known else 0.0)
    assert all(n >= 0 for n in view.requests + view.tokens)
    assert any(view.usable) or not view.ranks
    if refreshed:  # otherwise staleness may be noticed a little late
        assert (view.counted, view.usable) == (again.view.counted, again.view.usable)
