"""What a scheduler's own figures say of our expectations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.policies.kv.engine import CALIBRATION_TOKENS, Engine, PrefillRate
from tests.support import report


class Rank:
    """A rank that reports every second, and the engine that listens."""

    def __init__(self, **fields: int) -> None:
        self.engine, self.rate, self.now = Engine(), PrefillRate(), 0.0
        self.fields = fields
        self.say()

    def say(self, expected: int = 0, seconds: float = 1.0, **changes: int) -> None:
        self.now += seconds
        self.fields |= changes
        self.engine.heard(report(0, int(self.now), **self.fields), expected, self.now, self.rate)

    def admit(self, tokens: int, found: int, expected: int, **changes: int) -> float:
        """Requests are admitted; returns the credit that is left."""
        totals = {"admitted_tokens": tokens, "cached_tokens": found}
        sums = {name: self.fields.get(name, 0) + more for name, more in totals.items()}
        self.say(expected, **sums, **changes)
        return self.engine.credit


def test_credit_falls_when_less_is_found_and_recovers() -> None:
    rank = Rank()
    assert rank.admit(100_000, 90_000, 90_000) == 1.0
    falling = [rank.admit(100_000, 30_000, 90_000) for _ in range(30)]
    assert falling == sorted(falling, reverse=True)
    assert len({*falling}) == 30
    assert falling[-1] == pytest.approx(1 / 3, abs=0.05)  # what is found, of what was expected
    rising = [rank.admit(100_000, 90_000, 90_000) for _ in range(30)]
    assert rising == sorted(rising)
    assert rising[-1] > 0.99


def test_one_surprise_does_not_decide() -> None:
    assert Rank().admit(1000, 0, 1000) > 0.9
    assert Rank().admit(10 * CALIBRATION_TOKENS, 0, 10 * CALIBRATION_TOKENS) < 0.1


def test_nothing_admitted_changes_nothing() -> None:
    rank = Rank()
    credit = rank.admit(100_000, 0, 100_000)
    for _ in range(1000):
        rank.say()
    assert rank.engine.credit == credit < 1


def test_expectations_without_admission_count() -> None:
    """A request that was admitted was forgotten by the engine's counters, or left unadmitted."""
    rank = Rank()
    assert rank.admit(0, 0, 100_000) < 1


FIGURES = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 1 << 20)),
    max_size=40,
)


@given(FIGURES)
def test_credit_is_a_share(figures: list[tuple[int, int, int]]) -> None:
    rank = Rank()
    for tokens, found, expected in figures:
        assert 0 <= rank.admit(max(tokens, found), found, expected) <= 1
    if all(found >= expected for _, found, expected in figures):
        assert rank.engine.credit == 1.0


def test_a_new_epoch_is_no_difference() -> None:
    rank = Rank(admitted_tokens=500_000, cached_tokens=400_000, waiting=1)
    rank.say(300_000, epoch=2, admitted_tokens=600_000, cached_tokens=400_000)
    assert (rank.engine.credit, rank.rate.value) == (1.0, 0.0)
    # From then on it is compared with the new process.
    rank.say(0, epoch=2, admitted_tokens=601_000)
    assert rank.rate.value == 1000
    assert rank.admit(300_000, 0, 300_000) < 1


@pytest.mark.parametrize("field", ["admitted_tokens", "cached_tokens"])
def test_counters_that_go_back_are_passed_over(field: str) -> None:
    rank = Rank(admitted_tokens=50_000, cached_tokens=50_000, waiting=1)
    rank.say(40_000, **{field: 10_000})
    assert (rank.engine.credit, rank.rate.value) == (1.0, 0.0)
    assert getattr(rank.engine.report, field) == 10_000
    rank.say(0, admitted_tokens=51_000 + rank.fields["admitted_tokens"])
    assert rank.rate.value == 51_000


@pytest.mark.parametrize(
    ("before", "after", "rate"),
    [
        ({"waiting": 1}, {}, 6000),  # a queue all the time
        ({"prefilling_tokens": 500}, {}, 6500),  # 500 of an older prompt were computed too
        ({"prefilling_tokens": 500}, {"prefilling_tokens": 2000}, 4500),
        ({"prefilling_tokens": 1}, {"prefilling_tokens": 6001}, 0),  # admitted, nothing computed
        ({}, {"waiting": 1}, 0),  # idle at first: nobody knows for how long
        ({"running": 5}, {}, 0),
    ],
)
def test_the_rate_is_of_busy_intervals_alone(before: dict, after: dict, rate: float) -> None:
    rank = Rank(**before)
    quiet = dict.fromkeys(before, 0)
    rank.admit(10_000, 4000, 4000, **(quiet | after))
    assert rank.rate.value == rate


def test_the_rate_is_tokens_by_seconds_of_all_ranks() -> None:
    rate = PrefillRate()
    assert rate.value == 0.0
    rate.add(1000, 0.1)
    assert rate.value == pytest.approx(10_000)
    rate.add(0, 0.1)
    assert rate.value == pytest.approx(5000, rel=0.02)
    for _ in range(1000):
        rate.add(200, 0.1)
    assert rate.value == pytest.approx(2000, rel=0.01)


def test_no_time_passed() -> None:
    rank = Rank(waiting=1)
    rank.say(0, seconds=0.0, admitted_tokens=1000)
    rank.say(0, seconds=-1.0, admitted_tokens=2000)
    assert rank.rate.value == 0.0


def test_emptied_by_a_flush_or_a_new_process() -> None:
    engine, rate = Engine(), PrefillRate()
    assert not engine.emptied(report(epoch=7, flushes=3))  # the first word: nothing to compare
    engine.heard(report(epoch=7, flushes=3), 0, 1.0, rate)
    assert not engine.emptied(report(seq=2, epoch=7, flushes=3))
    assert engine.emptied(report(seq=2, epoch=7, flushes=4))
    assert engine.emptied(report(seq=2, epoch=8, flushes=3))
    assert engine.emptied(report(seq=2, epoch=8, flushes=0))


def test_a_request_of_which_nothing_is_known_is_as_the_mean() -> None:
    rank = Rank()
    assert rank.engine.typical_uncached == 0.0
    rank.say(received=4, admitted_tokens=1000, cached_tokens=200)
    assert rank.engine.typical_uncached == 200
    assert Engine().typical_uncached == 0.0
