"""Tokens that wait, against a list of the requests and a fluid queue run tick by tick."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sidecar.policies.kv.queue import KEPT, LATE_KEPT, LATE_SECONDS, PrefillQueue, Sent

REQUESTS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=30)
CREDITS = st.sampled_from([0.0, 0.25, 0.5, 1.0])


def filled(requests: list[Sent]) -> PrefillQueue:
    queue = PrefillQueue()
    for sent in requests:
        queue.add(sent)
    return queue


def naive_tokens(requests: list[Sent], credit: float) -> float:
    return sum(sent.uncached + (1 - credit) * sent.cached for sent in requests)


OPERATIONS = st.lists(
    st.tuples(st.just("add"), st.integers(0, 500), st.integers(0, 500))
    | st.tuples(st.just("shrink"), st.integers(0, 12), st.just(0))
    | st.tuples(st.just("take"), st.just(0), st.just(0)),
    max_size=80,
)


@given(OPERATIONS, CREDITS)
def test_against_a_list(operations: list[tuple[str, int, int]], credit: float) -> None:
    queue, waiting, left = PrefillQueue(), [], 0
    for name, first, second in operations:
        if name == "add":
            waiting.append(Sent(first, second, 0.0))
            queue.add(waiting[-1])
        elif name == "shrink":
            kept = min(first, len(waiting))
            left += sum(sent.cached for sent in waiting[: len(waiting) - kept])
            waiting = waiting[len(waiting) - kept :]
            assert queue.shrink(first) == first - kept
        else:
            assert queue.left == left
            queue.left = left = 0
        assert len(queue) == len(waiting)
        assert queue.left == left
        assert queue.tokens(credit) == naive_tokens(waiting, credit)


def test_credit_counts_what_is_not_found() -> None:
    queue = filled([Sent(1000, 10, 0.0), Sent(0, 500, 0.0)])
    assert [queue.tokens(credit) for credit in (1.0, 0.75, 0.0)] == [510, 760, 1510]
    assert queue.shrink(1) == 0
    assert (queue.tokens(0.0), queue.left) == (500, 1000)


@pytest.mark.parametrize("more", [0, 1, 700])
def test_no_more_than_the_bound_are_remembered(more: int) -> None:
    queue = filled([Sent(n, 1, 0.0) for n in range(KEPT + more)])
    assert len(queue) == KEPT
    assert queue.tokens(1.0) == KEPT
    assert queue.tokens(0.0) == KEPT + sum(range(more, KEPT + more))
    assert queue.left == sum(range(more))
    assert queue.shrink(KEPT + more + 5) == more + 5


TICK = 0.125  # exact in binary, as are the rates: nothing is lost to rounding


def naive_drained(
    work: float, requests: list[Sent], in_flight: int, rate: float, credit: float, now: float
) -> float:
    """Tick by tick: what arrives is added, then the rank computes for one tick."""
    flying = requests[len(requests) - in_flight :]
    level = work + naive_tokens(requests[: len(requests) - in_flight], credit)
    time = flying[0].at
    while True:
        level += naive_tokens([sent for sent in flying if sent.at == time], credit)
        if time >= now:
            return level
        time += TICK
        level = max(0.0, level - rate * TICK)


@given(
    REQUESTS.filter(bool),
    st.data(),
    st.integers(0, 2000),
    st.sampled_from([8, 64, 4096, 1 << 16]),
    CREDITS,
)
def test_a_late_report_drains_as_a_fluid_queue(requests, data, base, rate, credit) -> None:
    gaps = data.draw(st.lists(st.integers(0, 6), min_size=len(requests), max_size=len(requests)))
    at, sent = 100.0, []
    for gap, (cached, uncached) in zip(gaps, requests, strict=True):
        at += gap * TICK
        sent.append(Sent(cached, uncached, at))
    in_flight = data.draw(st.integers(1, min(len(sent), LATE_KEPT)))
    now = at + TICK * data.draw(st.integers(0, 20))
    assume(now - sent[-in_flight].at >= LATE_SECONDS)
    expected = naive_drained(base, sent, in_flight, rate, credit, now)
    assert filled(sent).drained(base, in_flight, rate, credit, now) == pytest.approx(expected)


@given(REQUESTS, st.integers(0, 40), st.integers(0, 2000), CREDITS)
def test_reports_in_time_drain_nothing(requests, in_flight: int, base: int, credit: float) -> None:
    sent = [Sent(cached, uncached, 100.0) for cached, uncached in requests]
    now = 100.0 + 0.9 * LATE_SECONDS
    expected = base + naive_tokens(sent, credit)
    assert filled(sent).drained(base, in_flight, 1e6, credit, now) == expected


@pytest.mark.parametrize(
    ("in_flight", "rate", "now", "expected"),
    [
        (0, 100.0, 9.0, 900),  # all were taken in by the last report: it knows
        (2, 0.0, 9.0, 900),  # no rate is known
        (1, 100.0, 2.1, 900),  # the one in flight is not late; older ones do not count
        (2, 100.0, 2.1, 790),  # the older one is, so the rank has worked for 1.1 seconds
        (9, 100.0, 2.1, 790),  # more in flight than was ever added
        (2, 100.0, 11.0, 0),
    ],
)
def test_when_it_drains(in_flight: int, rate: float, now: float, expected: float) -> None:
    queue = filled([Sent(50, 400, 1.0), Sent(0, 400, 2.0)])
    got = queue.drained(100, in_flight, rate, 1.0, now)
    assert got == pytest.approx(expected)
    assert len(queue) == 2  # an estimate: nothing has left


def test_of_many_in_flight_the_last_are_drained_one_by_one() -> None:
    sent = [Sent(0, 100, 0.01 * n) for n in range(3 * LATE_KEPT)]
    now = 50.0
    expected = naive_tokens(sent, 1.0) - 10.0 * (now - sent[-LATE_KEPT].at)
    assert filled(sent).drained(0, len(sent), 10.0, 1.0, now) == pytest.approx(expected)
