"""When a cache is left: both margins, and what is at stake."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.policies.kv.spill import leaves

COSTS = st.integers(0, 100_000)


@pytest.mark.parametrize(
    ("here", "best", "stake", "expected"),
    [
        (2001, 1000, inf, True),
        (2000, 1000, inf, False),  # the margin is to be exceeded
        (5000, 4000, inf, False),
        (8000, 4000, inf, False),  # the ratio too: 2 times is not over it
        (8001, 4000, inf, True),
        (8001, 4000, 1001, True),
        (6000, 4000, 1001, False),  # more at stake than the margin: the ratio counts
        (6000, 4000, 1000, True),  # no more than the margin: it does not
        (4101, 4000, 100, True),
        (4100, 4000, 100, False),  # at least the stake is to be gained
        (4001, 4000, 0, True),  # nothing to lose: any gain
        (4000, 4000, 0, False),
        (0, 0, 0, False),
        (0, 0, inf, False),
        (1000, 0, inf, False),
        (1001, 0, inf, True),
        (inf, 4000, inf, True),
        (inf, 4000, 0, True),
        (4000, inf, 0, False),
        (inf, inf, inf, False),
    ],
)
def test_leaves(here: float, best: float, stake: float, expected: bool) -> None:
    assert leaves(here, best, stake, 1000, 2.0) is expected


@given(COSTS, COSTS, COSTS | st.just(inf), COSTS, st.floats(1, 10))
def test_in_words(here: float, best: float, stake: float, move: float, ratio: float) -> None:
    gain = here - best
    enough = gain > stake or gain > move
    assert leaves(here, best, stake, move, ratio) is (
        enough and (stake <= move or here > ratio * best)
    )


@given(COSTS, COSTS, COSTS, COSTS, COSTS, st.floats(1, 10))
def test_monotone(here: int, best: int, stake: int, more: int, move: int, ratio: float) -> None:
    if leaves(here, best, stake, move, ratio):
        assert leaves(here + more, best, stake, move, ratio)
        assert leaves(here, max(0, best - more), stake, move, ratio)
        assert leaves(here, best, max(0, stake - more), move, ratio)
    assert not leaves(min(here, best), best, stake, move, ratio)
