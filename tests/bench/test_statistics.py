"""Known answers for paired differences, and how often the interval holds the truth."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.intervals import BOOTSTRAP_FROM, t_quantile
from bench.outcome import Outcome, Row
from bench.statistics import METRICS, compare, paired

finite = st.floats(0.001, 1e6)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    # two-sided 95 %, from the printed tables
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)],
)
def test_t_quantile(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=5e-4)


def test_few_pairs_are_a_paired_t_interval() -> None:
    # Student's sleep data (1908), drug 1 against drug 2, the first five of ten pairs:
    # differences -1.2 -2.4 -1.3 -1.3 0.0, mean -1.24, sd 0.8503
    a, b = [0.7, -1.6, -0.2, -1.2, -0.1], [1.9, 0.8, 1.1, 0.1, -0.1]
    found = paired(a, b)
    half = 2.7764 * 0.850294 / math.sqrt(5)
    assert found.method == "paired t"
    assert found.mean == pytest.approx(-1.24)
    assert (found.low, found.high) == pytest.approx((-1.24 - half, -1.24 + half), rel=1e-4)
    assert found.verdict == "lower"
    assert found.ratio is None  # some are not above zero


def test_ten_pairs_are_a_bootstrap_about_as_wide_as_t() -> None:
    deltas = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]  # the whole sleep data
    found = paired([10 + d for d in deltas], [10.0] * 10)
    assert found.method == "bootstrap"
    assert found.verdict == "higher"
    assert found.low is not None and found.high is not None
    assert found.mean == pytest.approx(1.58)
    # R's t.test: 0.7001 to 2.4599; the data are skewed to the right, so is the bootstrap
    assert found.high - found.low == pytest.approx(1.76, rel=0.1)
    assert found.high - found.mean > found.mean - found.low


def test_one_pair_has_no_interval() -> None:
    found = paired([2.0], [4.0])
    assert (found.mean, found.ratio, found.pairs) == (-2.0, 0.5, 1)
    assert found.low is found.high is found.ratio_low is found.ratio_high is None
    assert (found.verdict, found.method) == ("unknown", "none")


@pytest.mark.parametrize("n", [2, 5, BOOTSTRAP_FROM, 20])
def test_equal_pairs_do_not_differ(n: int) -> None:
    values = [float(i + 1) for i in range(n)]
    found = paired(values, values)
    assert (found.mean, found.low, found.high) == (0, 0, 0)
    assert (found.ratio, found.ratio_low, found.ratio_high) == (1, 1, 1)
    assert found.verdict == "no difference"


@pytest.mark.parametrize("n", [2, 5, BOOTSTRAP_FROM, 20])
def test_a_constant_difference_is_certain(n: int) -> None:
    base = [float(i) for i in range(n)]
    found = paired([value + 3 for value in base], base)
    assert (found.mean, found.low, found.high, found.verdict) == (3, 3, 3, "higher")


def test_rounding_is_no_difference() -> None:
    assert paired([0.1 + 0.2] * 3, [0.3] * 3).verdict == "no difference"


def test_a_constant_factor_is_certain() -> None:
    found = paired([1.0, 10.0, 100.0], [2.0, 20.0, 200.0])
    assert (found.ratio, found.ratio_low, found.ratio_high) == pytest.approx((0.5, 0.5, 0.5))
    assert found.verdict == "no difference"  # in absolute terms one seed decides


@pytest.mark.parametrize("values", [([], []), ([1.0], [1.0, 2.0])])
def test_what_is_not_paired_is_refused(values: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="as many"):
        paired(*values)


@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=12))
def test_turned_round_everything_turns_round(pairs: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    there, back = paired(a, b), paired(b, a)
    assert there == paired(a, b)
    assert there.mean == pytest.approx(-back.mean)
    assert there.low is not None and there.high is not None and there.low <= there.high
    assert there.ratio is not None and back.ratio is not None
    assert there.ratio == pytest.approx(1 / back.ratio)
    if len(pairs) < BOOTSTRAP_FROM and there.ratio_low is not None and back.ratio_high:
        assert math.log(there.ratio_low) == pytest.approx(-math.log(back.ratio_high), abs=1e-6)


@pytest.mark.parametrize("n", [2, 3, 5, 7, 8, 12, 20])
def test_the_interval_holds_the_truth_in_95_of_100(n: int) -> None:
    draws = np.random.default_rng(n).normal(size=(600, 2, n))
    held = 0
    for noise, both in draws:
        found = paired(list(5 + both + noise), list(7 + both))
        assert found.low is not None and found.high is not None
        held += found.low <= -2 <= found.high
    # 600 draws of 0.95 have a standard deviation of 0.009
    assert held / 600 == pytest.approx(0.95, abs=0.027)


def test_without_a_difference_one_in_twenty_is_found() -> None:
    draws = np.random.default_rng(0).lognormal(sigma=0.5, size=(600, 2, 5))
    verdicts = [paired(list(a), list(b)).verdict for a, b in draws]
    assert verdicts.count("no difference") / 600 == pytest.approx(0.95, abs=0.027)


def outcome(
    arm: str, seed: int, ttft: float, workload: str = "w", kind: str = "virtual"
) -> Outcome:
    rows = [Row(i, i, 0, i / 10, i % 2, 100, 50, 11, ttft + i, ttft + i + 100) for i in range(10)]
    return Outcome(workload, arm, seed, kind, 2, rows, seconds=2.0)


def test_compare_pairs_by_workload_and_seed() -> None:
    runs = [outcome("base", seed, 100 + 50 * seed) for seed in range(3)]
    runs += [outcome("arm", seed, 90 + 50 * seed) for seed in (2, 1, 5)]
    runs += [outcome("arm", 0, 90, workload="other"), outcome("arm", 0, 90, kind="live")]
    random.Random(1).shuffle(runs)
    found = {(c.workload, c.kind, c.arm): c for c in compare(runs, "base")}
    arm = found["w", "virtual", "arm"]
    assert (arm.seeds, arm.counts["requests"], arm.counts["spills"]) == ([1, 2, 5], 10, None)
    ttft = arm.figures["ttft_ms_mean"]
    assert ttft is not None and ttft.difference is not None
    assert (ttft.seeds, ttft.low, ttft.difference.pairs) == (3, 144.5, 2)
    assert ttft.difference.mean == pytest.approx(-10)
    # Both lose the same 10 ms, which is not the same share of both: the ratio's interval holds one.
    assert ttft.difference.low == ttft.difference.high == pytest.approx(-10)
    assert ttft.difference.verdict == "no difference"
    base = found["w", "virtual", "base"].figures["ttft_ms_mean"]
    assert base is not None and base.difference is None
    assert arm.figures["idle_share"] is None
    for key in (("other", "virtual", "arm"), ("w", "live", "arm")):
        lone = found[key].figures["ttft_ms_mean"]
        assert lone is not None and lone.difference is None and lone.sd is None


def test_repeats_of_a_seed_are_no_further_seeds() -> None:
    runs = [outcome("base", 1, 100), outcome("arm", 1, 80), outcome("arm", 1, 100)]
    figure = compare(runs, "base")[1].figures["ttft_ms_p50"]
    assert figure is not None and figure.difference is not None
    assert (figure.seeds, figure.difference.pairs, figure.difference.mean) == (1, 1, -10)
    assert figure.difference.verdict == "unknown"


def test_figures_are_those_of_the_summary() -> None:
    figures = compare([outcome("base", 1, 100)], "base")[0].figures
    assert set(figures) == {metric.name for metric in METRICS}
    known = {name: figure.mean for name, figure in figures.items() if figure}
    assert known["req_per_s"] == known["goodput_per_s"] == 5
    assert known["tpot_ms_mean"] == 10
    assert known["reuse"] == 0.5
    assert known["e2e_ms_mean"] == known["ttft_ms_mean"] + 100


def test_nothing_and_failures_only() -> None:
    assert compare([], "base") == []
    failed = outcome("base", 1, 100)
    for row in failed.rows:
        row.error = "refused"
    figures = compare([failed, outcome("arm", 1, 100)], "base")
    assert figures[0].figures["ttft_ms_mean"] is None
    lone = figures[1].figures["ttft_ms_mean"]
    assert lone is not None and lone.difference is None
