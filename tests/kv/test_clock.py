"""Spans against a list of when each began."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.policies.kv.clock import KEPT, SpanClock

STEPS = st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60)


@given(STEPS, st.integers(1, 30), st.lists(st.integers(-5, 2500), max_size=20))
def test_spans_against_a_list(steps: list[tuple[int, bool]], seconds: int, asked: list[int]):
    clock, begins, now = SpanClock(float(seconds)), [float("-inf")], 0
    for step, cut in steps:
        now += step
        over = now - begins[-1] >= seconds
        if cut:
            clock.cut(now)
        else:
            assert clock.advance(now) is over
        if cut or over:
            begins.append(now)
        assert clock.span == len(begins) - 1
        assert clock.at(now) == clock.span
    for time in asked:
        assert clock.at(time) == sum(begin <= time for begin in begins) - 1


def test_a_span_in_which_nobody_asks_has_no_number() -> None:
    clock = SpanClock(1.0)
    assert [clock.advance(now) for now in (10.0, 10.5, 5000.0, 5000.99, 5001.0)] == [
        *(True, False, True, False, True)
    ]
    assert clock.span == 3
    assert [clock.at(now) for now in (9.9, 10.0, 11.0, 4999.0, 5000.5)] == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("spans", [2 * KEPT - 2, 2 * KEPT, 2 * KEPT + 1, 5 * KEPT + 7])
def test_what_is_long_ago_counts_as_of_the_oldest(spans: int) -> None:
    clock = SpanClock(1.0)
    for now in range(1, spans + 1):
        assert clock.advance(float(now))
    assert clock.span == spans
    # At least the last KEPT are exact, whatever was forgotten.
    assert [clock.at(n + 0.5) for n in range(spans - KEPT + 2, spans + 1)] == list(
        range(spans - KEPT + 2, spans + 1)
    )
    old = [clock.at(n + 0.5) for n in range(-3, spans + 1)]
    assert old == sorted(old)
    assert all(0 <= span <= spans for span in old)
    # Never taken for younger than it is, but for what precedes the oldest that is known.
    oldest = clock.at(float("-inf"))
    assert all(clock.at(n + 0.5) == max(n, oldest) for n in range(1, spans + 1))
    assert oldest <= max(0, spans - KEPT + 1)
