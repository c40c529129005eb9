"""Names, numbers, marks and lines: how the report writes what it knows."""

import re

import pytest

from bench.html import text_table
from bench.html.figure import COLOURS, INK, lines
from bench.html.sweep import family, sweeps
from bench.html.words import best, interval, metric, number, signed
from bench.statistics import compare
from tests.bench.synthetic import small


def test_an_arm_keeps_its_line() -> None:
    arms = [f"arm{i}" for i in range(12)]
    found = lines(arms, "arm3")
    assert len(set(map(str, found.values()))) == 12
    assert found["arm3"] == (INK, "solid")
    assert found["arm0"] == (COLOURS[0], "solid")


def test_sweep_arms_are_told_from_others() -> None:
    assert family("p:max_load_skew=1.5:min_load_gap=4") == ("p", (1.5, 4))
    assert family("p:min_load_gap=4:x=1:max_load_skew=2") == ("p:x=1", (2, 4))
    for other in ("p", "p:min_load_gap=4", "p:max_load_skew=a:min_load_gap=4"):
        assert family(other) is None
    few = [f"p:max_load_skew=1:min_load_gap={gap}" for gap in range(3)]
    assert sweeps(few) == {}
    assert len(sweeps([*few, "p:max_load_skew=2:min_load_gap=0"])["p"]) == 4


def test_the_best_is_marked_only_where_it_differs() -> None:
    which = metric("ttft_ms_mean")
    base = [small("base", seed) for seed in range(3)]
    arm = [small("prefix_affinity", seed) for seed in range(3)]
    same = [small("same", seed, rows=small("base", seed).rows) for seed in range(3)]
    assert best(compare(base + arm, "base"), which) == "prefix_affinity"
    assert best(compare(base + arm, "prefix_affinity"), which) == "prefix_affinity"
    assert best(compare(base + same, "base"), which) is None
    assert best(compare(base, "base"), which) is None
    # an arm that lacks seeds does not compete
    assert best(compare(base + arm[:2], "base"), which) is None


def test_text_table() -> None:
    arms = ("base", "prefix_affinity")
    table = text_table(compare([small(arm, s) for arm in arms for s in range(3)], "base"))
    head, columns, first, second, *_ = table.splitlines()
    assert head == "w  MODEL (virtual time), 3 seeds"
    assert columns.split()[0] == "arm" and first.startswith("base")
    assert re.search(r"x0\.\d\d \[0\.\d\d, 0\.\d\d\]", second) and "+*" in second


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"),
        (1234.5, "1,234"),
        (99.96, "100.0"),
        (1.234, "1.23"),
        (0.5, "0.500"),
        (1e-4, "0.0001"),
    ],
)
def test_numbers(value: float, written: str) -> None:
    assert number(value) == written
    assert signed(value).lstrip("+") == written
    assert interval(None, value) == ""
