"""Figures of one run, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.outcome import Outcome, Row, Sample, percentiles, summarize


def row(number: int, rank: int, cached: int, ttft: float, e2e: float, **more: object) -> Row:
    return Row(number, number, 0, 0.0, rank, 100, cached, 11, ttft, e2e, **more)  # type: ignore[arg-type]


def outcome(rows: list[Row], **more: object) -> Outcome:
    return Outcome("w", "a", 0, "virtual", 2, rows, 10.0, **more)  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_numpy_s(values: list[float]) -> None:
    found = percentiles(values)
    assert found["mean"] == pytest.approx(np.mean(values))
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert found[name] == pytest.approx(np.percentile(values, share))


def test_every_figure_by_hand() -> None:
    rows = [row(0, 0, 80, 100.0, 200.0), row(1, 0, 40, 300.0, 700.0), row(2, 1, 0, 2500.0, 2600.0)]
    samples = [Sample(0.0, [2, 0]), Sample(1.0, [1, 1]), Sample(2.0, [0, 0])]
    found = summarize(outcome(rows, samples=samples))
    assert found["req_per_s"] == 0.3
    assert found["goodput_per_s"] == 0.2
    assert found["ttft_ms"]["mean"] == pytest.approx(2900 / 3)
    assert found["tpot_ms"]["mean"] == pytest.approx((10 + 40 + 10) / 3)
    assert found["reuse"] == 0.4
    assert found["requests_by_rank"] == [2, 1]
    assert found["uncached_by_rank"] == [80, 100]
    assert found["uncached_max_over_mean"] == pytest.approx(100 / 90)
    assert found["idle_by_rank"] == [0.0, 0.5]


def test_failed_requests_are_counted_and_are_in_no_other_figure() -> None:
    found = summarize(outcome([row(0, 0, 50, 1.0, 2.0), row(1, 1, 0, 9e9, 9e9, error="gone")]))
    assert (found["requests"], found["failed"]) == (2, 1)
    assert found["ttft_ms"]["p99"] == 1.0
    assert found["requests_by_rank"] == [1, 0]


def test_nothing_known_is_none() -> None:
    found = summarize(outcome([row(0, -1, -1, 1.0, 2.0)]))
    assert found["reuse"] is found["uncached_max_over_mean"] is found["idle_by_rank"] is None
    nothing = summarize(Outcome("w", "a", 0, "virtual", 2, [], 0.0))
    assert nothing["req_per_s"] is nothing["ttft_ms"] is nothing["reuse"] is None
    assert nothing["requests_by_rank"] == [0, 0]


def test_a_rank_that_came_later_counts() -> None:
    assert summarize(outcome([row(0, 4, 0, 1.0, 2.0)]))["requests_by_rank"] == [0, 0, 0, 0, 1]
