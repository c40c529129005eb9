"""What each rank costs, term by term."""

from math import inf

import pytest

from sidecar.loads import LoadView
from sidecar.policies.kv.costs import Costs
from sidecar.policies.kv.engine import PrefillRate
from sidecar.policies.kv.footprint import Footprint
from sidecar.policies.kv.memory import RankMemory
from sidecar.policies.kv.queue import LATE_SECONDS, Sent
from tests.support import report


def make(size: int = 3, **lists: list) -> tuple[Costs, list[RankMemory], LoadView]:
    costs = Costs(request_tokens=10, recent_weight=0.5)
    costs.resize(size)
    zeros = {name: [0] * size for name in ("requests", "queued", "in_flight", "prefilling")}
    fields = {"ranks": list(range(size)), "usable": [True] * size, "now": 50.0} | zeros | lists
    return costs, [RankMemory(Footprint(0, 0, 0)) for _ in range(size)], LoadView(**fields)


def at(costs: Costs, position: int) -> tuple[float, float]:
    return costs.serving[position], costs.placing[position]


def test_an_idle_rank_costs_nothing() -> None:
    costs, ranks, view = make()
    for position, rank in enumerate(ranks):
        costs.update(position, rank, view, 0.0)
    assert (costs.serving, costs.placing) == ([0.0] * 3, [0.0] * 3)


def test_requests_count() -> None:
    costs, ranks, view = make(requests=[0, 4, 7])
    costs.update(1, ranks[1], view, 0.0)
    assert at(costs, 1) == (40, 40)
    assert at(costs, 2) == (0, 0)  # nobody asked for it


def test_what_waits_counts_once_in_both() -> None:
    costs, ranks, view = make(queued=[2, 0, 0], prefilling=[300, 0, 0])
    ranks[0].queue.add(Sent(7000, 500, 50.0))
    ranks[0].queue.add(Sent(0, 60, 50.0))
    costs.update(0, ranks[0], view, 0.0)
    assert at(costs, 0) == (860, 860)
    ranks[0].engine.credit = 0.5
    costs.update(0, ranks[0], view, 0.0)
    assert at(costs, 0) == (4360, 4360)
    view.queued[0] = 1
    costs.update(0, ranks[0], view, 0.0)
    assert at(costs, 0) == (360, 360)


def test_requests_that_nobody_told_of_count_as_the_mean() -> None:
    costs, ranks, view = make(queued=[0, 5, 0])
    told = report(1, received=10, admitted_tokens=5000, cached_tokens=1000)
    ranks[1].engine.heard(told, 0, 1.0, PrefillRate())
    ranks[1].queue.add(Sent(0, 70, 50.0))
    costs.update(1, ranks[1], view, 0.0)
    assert at(costs, 1) == (4 * 400 + 70, 4 * 400 + 70)


def test_what_is_active_or_was_computed_lately_counts_where_one_is_placed() -> None:
    costs, ranks, view = make()
    footprint = ranks[2].footprint
    footprint.use(1000, -1, 1)
    footprint.use(600, -1, 2)
    footprint.age(2)
    costs.update(2, ranks[2], view, 0.0)
    assert at(costs, 2) == (0, 300)
    ranks[2].engine.heard(report(2, recent_uncached_tokens=44), 0, 1.0, PrefillRate())
    costs.update(2, ranks[2], view, 0.0)
    assert at(costs, 2) == (0, 322)


@pytest.mark.parametrize(("late", "expected"), [(0.9, 1000), (1.0, 800), (3.0, 400), (9.0, 0)])
def test_a_late_report_drains_the_queue(late: float, expected: float) -> None:
    costs, ranks, view = make(queued=[1, 0, 0], in_flight=[1, 0, 0])
    ranks[0].queue.add(Sent(0, 1000, view.now - late * LATE_SECONDS))
    rate = 200 / LATE_SECONDS
    costs.update(0, ranks[0], view, rate)
    assert at(costs, 0) == (pytest.approx(expected), pytest.approx(expected))


def test_a_rank_that_is_not_usable_costs_infinitely_much() -> None:
    costs, ranks, view = make(usable=[True, False, True], requests=[1, 1, 1])
    for position, rank in enumerate(ranks):
        costs.update(position, rank, view, 0.0)
    assert costs.serving == [10, inf, 10]
    assert costs.placing == [10, inf, 10]
    view.usable[1] = True
    costs.update(1, ranks[1], view, 0.0)
    assert at(costs, 1) == (10, 10)


def test_resizing_forgets() -> None:
    costs, ranks, view = make(requests=[1, 2, 3])
    for position, rank in enumerate(ranks):
        costs.update(position, rank, view, 0.0)
    costs.resize(2)
    assert (costs.serving, costs.placing) == ([0, 0], [0, 0])
