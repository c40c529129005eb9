"""Series of the ranks: what they reported, how the load lies over them, and restarts."""

import pytest

from sidecar.dispatcher import Dispatcher
from sidecar.errors import PeerError
from tests.support import INSTANCE, STALE_SECONDS, Server, keyed, make_dispatcher, query, report
from tests.test_metrics import exposition, samples

ONE = (INSTANCE, "1")


def test_what_a_rank_counts_of_its_cache() -> None:
    dispatcher = make_dispatcher()
    told = report(1, 1, epoch=1_700_000_000_500_000_000, max_running=256)
    told.admitted_tokens, told.cached_tokens, told.flushes = 900, 600, 2
    dispatcher.report(told, 0.0)
    series = samples(exposition(dispatcher))
    assert series["admitted_prompt_tokens_total"] == {ONE: 900}
    assert series["cached_prompt_tokens_total"] == {ONE: 600}
    assert series["cache_flushes_total"] == {ONE: 2}
    assert series["max_running_requests"] == {ONE: 256}
    assert series["scheduler_start_time_seconds"] == {ONE: 1_700_000_000.5}


def test_a_restarted_scheduler_is_a_counter_reset_with_a_new_start_time() -> None:
    dispatcher = make_dispatcher()
    before = report(1, 50, epoch=10**18)
    before.admitted_tokens, before.cached_tokens = 10**6, 10**5
    dispatcher.report(before, 0.0)
    after = report(1, 1, epoch=2 * 10**18)
    after.admitted_tokens = 7
    dispatcher.report(after, 1.0)
    series = samples(exposition(dispatcher))
    assert series["admitted_prompt_tokens_total"] == {ONE: 7}
    assert series["cached_prompt_tokens_total"] == {ONE: 0}
    assert series["scheduler_start_time_seconds"] == {ONE: 2e9}


def test_a_controller_that_restarts_alone_begins_again_too() -> None:
    dispatcher, server = make_dispatcher(), Server(ranks=2)
    for _ in range(5):
        server.send(1)
    dispatcher.handle(server.query(), 0.0)
    assert samples(exposition(dispatcher))["sent_requests_total"][ONE] == 5
    server.restart_controller(2)
    dispatcher.handle(server.query(), 1.0)
    assert samples(exposition(dispatcher))["sent_requests_total"][ONE] == 0


def spread(dispatcher: Dispatcher, now: float = 0.0) -> dict[str, float]:
    """The series of all ranks together."""
    series = samples(exposition(dispatcher, now=now))
    names = ("live_ranks", "stale_ranks", "idle_ranks", "load_imbalance_ratio")
    return {name: series[name][INSTANCE,] for name in names if name in series}


@pytest.mark.parametrize(
    ("running", "waiting", "idle", "imbalance"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0], 0, 1),
        ([3, 3, 3, 3], [0, 0, 0, 0], 0, 1),
        ([4, 0, 0, 0], [0, 0, 0, 0], 0, 4),  # unbalanced, but nobody waits
        ([4, 0, 0, 2], [1, 0, 0, 0], 2, 5 / 1.75),
        ([0, 9, 9, 9], [0, 9, 9, 9], 1, 4 / 3),
        ([0, 0, 0, 0], [2, 0, 0, 0], 3, 4),
        ([1, 1, 1, 1], [5, 0, 0, 0], 0, 6 / 2.25),
    ],
)
def test_how_the_load_lies(
    running: list[int], waiting: list[int], idle: int, imbalance: float
) -> None:
    dispatcher = make_dispatcher()
    dispatcher.handle(query(ranks=range(4)), 0.0)
    for rank, (runs, waits) in enumerate(zip(running, waiting, strict=True)):
        dispatcher.report(report(rank, running=runs, waiting=waits), 0.0)
    expected = {"live_ranks": 4, "stale_ranks": 0, "idle_ranks": idle}
    assert spread(dispatcher) == expected | {"load_imbalance_ratio": pytest.approx(imbalance)}


def test_what_is_in_flight_is_load() -> None:
    dispatcher, server = make_dispatcher(), Server(ranks=2)
    dispatcher.report(report(0, waiting=1, running=1), 0.0)
    dispatcher.report(report(1), 0.0)
    dispatcher.handle(server.query(), 0.0)
    assert spread(dispatcher)["idle_ranks"] == 1
    server.send(1)
    dispatcher.handle(server.query(), 0.0)
    assert (spread(dispatcher)["idle_ranks"], spread(dispatcher)["load_imbalance_ratio"]) == (
        0,
        pytest.approx(2 / 1.5),
    )


def test_ranks_that_are_silent_or_gone() -> None:
    dispatcher = make_dispatcher()
    dispatcher.handle(query(ranks=range(4)), 0.0)
    # Nobody has reported: no load is known, so nothing is said of its spread.
    assert spread(dispatcher) == {"live_ranks": 4, "stale_ranks": 4, "idle_ranks": 0}
    for rank in range(3):
        dispatcher.report(report(rank, running=rank), 0.0)
    assert spread(dispatcher)["stale_ranks"] == 1
    dispatcher.report(report(0, 2, running=6), STALE_SECONDS + 1)
    late = spread(dispatcher, STALE_SECONDS + 1)
    assert (late["stale_ranks"], late["load_imbalance_ratio"]) == (3, 1)
    dispatcher.handle(query(ranks=[0, 2]), STALE_SECONDS + 1)
    gone = spread(dispatcher, STALE_SECONDS + 1)
    assert (gone["live_ranks"], gone["stale_ranks"]) == (2, 1)


def test_an_instance_that_only_reports_has_no_live_ranks_yet() -> None:
    dispatcher = make_dispatcher()
    dispatcher.report(report(0, running=1), 0.0)
    assert spread(dispatcher) == {}


def test_reports_of_strange_ranks_are_bounded() -> None:
    dispatcher = make_dispatcher()
    dispatcher.handle(query([keyed("k")]), 0.0)
    for rank in range(8, 1024):
        dispatcher.report(report(rank), 0.0)
    with pytest.raises(PeerError, match="more than 1024 ranks"):
        dispatcher.report(report(1024), 0.0)
    series = samples(exposition(dispatcher))
    assert len(series["report_age_seconds"]) == 1024 - 8
    assert series["live_ranks"] == {(INSTANCE,): 8}
