"""Counters survive any restart: of the sidecar, of the controller, of schedulers, of the server."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.budget import Instance
from tests.support import STALE_SECONDS, Server, in_flight

RANKS = 3
SECOND, HOUR = 10**9, 3600 * 10**9


class Play:
    """A server, the sidecar's view of it, and what is truly in flight."""

    def __init__(self) -> None:
        self.server = Server(ranks=RANKS)
        self.instance = Instance("i", STALE_SECONDS)
        self.epoch = 1
        self.now = 0.0

    def send(self, *ranks: int) -> None:
        for rank in ranks:
            self.server.send(rank, 10)

    def take_in(self) -> None:
        for scheduler in self.server.schedulers:
            scheduler.take_in()

    def query(self) -> None:
        self.now += 0.001
        self.instance.apply_query(self.server.query(), self.now)

    def report(self) -> None:
        self.now += 0.001
        for rank in range(RANKS):
            self.instance.apply_report(self.server.report(rank), self.now)

    def new_sidecar(self) -> None:
        self.instance = Instance("i", STALE_SECONDS)

    def new_controller(self) -> None:
        """What it had not sent out is lost; sockets of the old one are drained."""
        self.take_in()
        self.epoch += HOUR
        self.server.restart_controller(self.epoch)

    def new_schedulers(self, later: int = HOUR) -> None:
        self.epoch += later
        for rank in range(RANKS):
            self.server.restart_scheduler(rank, self.epoch)

    def new_server(self) -> None:
        """Both, seconds apart."""
        self.new_controller()
        self.new_schedulers(SECOND)

    def settle(self) -> None:
        """All that is known is said, nothing is on its way."""
        self.take_in()
        self.query()
        self.report()

    def expect(self) -> None:
        """The sidecar knows exactly what is in flight."""
        self.query()
        assert in_flight(self.instance) == [s.queue for s in self.server.schedulers]

    def expect_exact_from_here(self) -> None:
        self.settle()
        assert in_flight(self.instance) == [0] * RANKS
        self.send(0, 0, 1)
        self.expect()
        self.settle()
        assert in_flight(self.instance) == [0] * RANKS


def busy() -> Play:
    """A server that has served for a while, with requests in flight."""
    play = Play()
    play.send(0, 1, 2, *[0] * 40, *[1] * 30)
    play.settle()
    play.send(0, 0, 2)
    play.expect()
    return play


def test_new_sidecar_before_any_report_sees_no_load_of_the_past() -> None:
    play = busy()
    play.server.sent = [100_000] * RANKS
    play.new_sidecar()
    play.query()
    assert in_flight(play.instance) == [0] * RANKS
    assert play.instance.view.total == 0


@pytest.mark.parametrize("first", ["query", "report"])
def test_new_sidecar_is_exact_after_one_report_a_rank(first: str) -> None:
    play = busy()
    for scheduler, sent in zip(play.server.schedulers, play.server.sent, strict=True):
        scheduler.received = 100_000 + sent - scheduler.queue
    play.server.sent = [100_000 + sent for sent in play.server.sent]
    play.new_sidecar()
    getattr(play, first)()
    play.query()
    play.report()
    assert in_flight(play.instance) == [2, 0, 1]
    play.expect_exact_from_here()


def test_new_sidecar_counts_what_it_decides_before_the_first_report() -> None:
    play = busy()
    play.new_sidecar()
    play.query()
    play.instance.assign(1, 10)
    play.server.send(1, 10)
    assert in_flight(play.instance) == [0, 1, 0]
    play.report()
    assert in_flight(play.instance) == [2, 1, 1]


def test_schedulers_alone() -> None:
    play = busy()
    play.new_schedulers()  # what was in flight to the old ones is gone
    play.report()
    assert in_flight(play.instance) == [0] * RANKS
    play.expect_exact_from_here()


def test_schedulers_alone_after_a_decision_that_no_query_confirmed_yet() -> None:
    play = busy()
    play.settle()
    play.instance.assign(1, 10)
    play.send(1)
    play.new_schedulers()
    play.report()
    play.query()
    assert in_flight(play.instance) == [0] * RANKS
    play.expect_exact_from_here()


def test_one_scheduler_alone() -> None:
    play = busy()
    play.server.restart_scheduler(0, 2)
    play.report()
    play.query()
    assert in_flight(play.instance) == [0, 0, 1]
    play.expect_exact_from_here()


def test_controller_alone() -> None:
    play = busy()
    play.settle()
    play.new_controller()
    play.query()
    play.report()
    assert in_flight(play.instance) == [0] * RANKS
    play.expect_exact_from_here()


def test_controller_alone_with_requests_in_flight() -> None:
    """Whose they were is not known; no load may be left of them."""
    play = busy()
    play.new_controller()
    for _ in range(3):
        play.query()
        play.report()
        play.send(0, 1, 2)
        play.settle()
        assert in_flight(play.instance) == [0] * RANKS


def test_controller_alone_while_a_rank_is_down() -> None:
    play = busy()
    live = {"ranks": [0, 1]}
    play.take_in()
    play.report()
    play.new_controller()
    play.instance.apply_query(play.server.query(**live, sent=[0, 0], sent_tokens=[0, 0]), 1.0)
    play.query()  # rank 2 is back, sent nothing by this controller
    play.send(2, 2)
    play.expect()
    play.expect_exact_from_here()


@pytest.mark.parametrize("reports_first", [False, True])
@pytest.mark.parametrize("sends", [0, 5])
def test_the_whole_server(reports_first: bool, sends: int) -> None:
    play = busy()
    play.new_server()
    steps: list[Callable[[], None]] = [lambda: play.send(*[1] * sends), play.query]
    for step in (play.report, *steps) if reports_first else (*steps, play.report):
        step()
    assert in_flight(play.instance) == [0, sends, 0]
    play.expect_exact_from_here()


def test_the_whole_server_while_the_sidecar_is_new() -> None:
    play = busy()
    play.new_server()
    play.new_sidecar()
    play.send(1, 1)
    play.report()
    play.expect()
    play.expect_exact_from_here()


@pytest.mark.parametrize("reports_first", [False, True])
@pytest.mark.parametrize("later", [SECOND, -SECOND])
def test_the_whole_server_again_within_minutes(reports_first: bool, later: int) -> None:
    """As after a crash at its start, or with its clock stepped back; heard of under load."""
    play = busy()
    play.settle()
    play.now += 2 * STALE_SECONDS
    play.epoch += later
    play.server.restart_controller(play.epoch)
    play.new_schedulers(later)
    play.send(0, 0, 1)
    play.take_in()
    play.send(0, 0, 0, 2)
    for step in (play.report, play.query) if reports_first else (play.query, play.report):
        step()
    assert in_flight(play.instance) == [3, 0, 1]
    play.expect_exact_from_here()


@pytest.mark.parametrize("side", ["controller", "schedulers"])
def test_one_side_within_minutes_and_the_other_later(side: str) -> None:
    """Each is seen to work with the one that was there before it: two restarts, not one."""
    play = busy()
    play.settle()
    for one in (side, {"controller": "schedulers", "schedulers": "controller"}[side]):
        play.epoch += SECOND
        if one == "controller":
            play.server.restart_controller(play.epoch)
        else:
            play.new_schedulers(SECOND)
        play.expect_exact_from_here()
        play.send(0, 1, 1, 2)
        play.settle()


KINDS = ["controller", "schedulers", "server, query first", "server, reports first", "sidecar"]


def restart(play: Play, kind: str) -> None:
    """Restart something, then let everybody speak once."""
    if kind == "sidecar":
        play.new_sidecar()
    if kind == "controller":
        play.new_controller()
    if kind == "schedulers":
        play.new_schedulers()
    if kind.startswith("server"):
        play.new_server()
        play.send(1)
    for step in (play.query, play.report) if "query" in kind else (play.report, play.query):
        step()


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_two_restarts_far_apart(first: str, second: str) -> None:
    """The second finds no trace of the first: hours of work lie between."""
    play = busy()
    play.settle()
    restart(play, first)
    for _ in range(20):
        play.send(0, 1, 2, 2)
        play.settle()
    restart(play, second)
    play.expect_exact_from_here()


@given(st.lists(st.sampled_from([*KINDS, "send", "take_in", "query", "report"]), max_size=25))
def test_in_flight_returns_to_zero_after_any_history(history: list[str]) -> None:
    play = busy()
    for step in history:
        if step in KINDS:
            play.settle()
            restart(play, step)
        elif step == "send":
            play.send(0, 2)
        else:
            getattr(play, step)()
        assert all(n >= 0 for n in play.instance.view.requests)
    play.settle()
    assert in_flight(play.instance) == [0] * RANKS
