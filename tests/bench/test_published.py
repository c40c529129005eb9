"""The simulation behind the default grace: it ends, counts right, and shows what a grace is for."""

from statistics import fmean

import pytest

from bench.published import TRAFFIC, errors, simulate


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("overlap", [True, False])
def test_every_request_ends_and_is_in_the_figures_meanwhile(name: str, overlap: bool) -> None:
    rate, tokens = TRAFFIC[name]
    events = simulate(overlap, rate, tokens, 40.0, seed=1)
    orders = [event.order for event in events]
    assert orders.count(-1) == orders.count(0) > 20
    assert max(event.running for event in events) > 5
    assert events == simulate(overlap, rate, tokens, 40.0, seed=1)


def test_without_a_grace_loads_are_told_too_low_and_with_a_long_one_too_high() -> None:
    rate, tokens = TRAFFIC["short prompts"]
    events = simulate(False, rate, tokens, 60.0, seed=1)
    none, some, long = (fmean(errors(events, grace)) for grace in (0.0, 0.05, 2.0))
    assert none < 0 < some < long
