"""A new sidecar beside a server of which one part is younger than the other, if only by minutes."""

import pytest

from tests.support import in_flight, keyless
from tests.test_budget_restarts import RANKS, SECOND, Play, busy

MINUTE = 60 * SECOND


def much(play: Play) -> None:
    """Serve for a while."""
    for _ in range(700):
        play.send(0, 0, 1, 2)
    play.settle()


@pytest.mark.parametrize("first", ["query", "report"])
@pytest.mark.parametrize("later", [2 * MINUTE, 9 * MINUTE])
def test_a_scheduler_that_joined_alone_leaves_no_load_behind(first: str, later: int) -> None:
    """What its predecessor received was never in flight to it."""
    play = busy()
    much(play)
    play.server.restart_scheduler(1, play.epoch + later)
    play.settle()
    much(play)
    play.new_sidecar()
    getattr(play, first)()
    play.settle()
    assert in_flight(play.instance) == [0] * RANKS
    play.expect_exact_from_here()


@pytest.mark.parametrize("first", ["query", "report"])
@pytest.mark.parametrize("later", [2 * MINUTE, 9 * MINUTE])
def test_a_controller_that_joined_alone_hides_no_load(first: str, later: int) -> None:
    """What its predecessor sent was received too, and must not be set against what it sends."""
    play = busy()
    much(play)
    much(play)
    play.take_in()
    play.epoch += later
    play.server.restart_controller(play.epoch)
    much(play)
    play.new_sidecar()
    getattr(play, first)()
    play.settle()
    play.expect_exact_from_here()


@pytest.mark.parametrize("first", ["query", "report"])
@pytest.mark.parametrize("later", [-30 * SECOND, 0, 5 * MINUTE])
def test_parts_of_one_start_are_exact_under_load(first: str, later: int) -> None:
    """Later: of the controller, after the schedulers."""
    play = Play()
    play.epoch = 10 * MINUTE
    play.server.restart_controller(play.epoch)
    for rank in range(RANKS):
        play.server.restart_scheduler(rank, play.epoch - later)
    much(play)
    play.send(0, 0, 2)
    play.new_sidecar()
    getattr(play, first)()
    play.query()
    play.report()
    assert in_flight(play.instance) == [2, 0, 1]
    play.expect_exact_from_here()


class Flow(Play):
    """A server under steady load; a little is in flight at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 10 * MINUTE
        self.server.restart_controller(self.epoch)
        for rank in range(RANKS):
            self.server.restart_scheduler(rank, self.epoch)

    def step(self, queries: int = 3) -> None:
        """Each rank takes in what it was sent, reports, and is sent more."""
        self.take_in()
        self.report()
        for _ in range(queries):
            self.ask()
            self.send(0, 1, 2)

    def report(self) -> None:
        """Between two queries that follow one another at once."""
        for rank in range(RANKS):
            self.instance.apply_report(self.server.report(rank), self.now)

    def ask(self) -> None:
        """A query with a request, half a millisecond after the one before."""
        self.now += 0.0005
        self.instance.apply_query(self.server.query([keyless()]), self.now)

    def expect_in_flight(self) -> None:
        self.report()
        self.query()
        assert in_flight(self.instance) == [one.queue for one in self.server.schedulers]

    def join(self, side: str) -> None:
        """One side is an hour younger, and a new sidecar meets them as they work."""
        for _ in range(50):
            self.step()
        if side == "controller":
            self.new_controller()
        else:
            self.take_in()
            self.new_schedulers()
        for _ in range(50):
            self.step()
        self.new_sidecar()


@pytest.mark.parametrize("side", ["controller", "schedulers"])
def test_what_was_in_flight_as_a_new_sidecar_met_them_is_counted_soon(side: str) -> None:
    """At first it is forgotten; less than nothing in flight then says how much it was."""
    play = Flow()
    play.join(side)
    play.report()
    play.query()
    assert in_flight(play.instance) == [0] * RANKS
    for _ in range(3):
        play.step()
    play.expect_in_flight()
    assert max(in_flight(play.instance)) > 0
    play.expect_exact_from_here()


@pytest.mark.parametrize("side", ["controller", "schedulers"])
def test_what_was_received_before_it_was_told_is_forgotten_soon(side: str) -> None:
    """The first query was on its way while the hook decided alone: it tells too little."""
    play = Flow()
    play.join(side)
    early = play.server.query([keyless()])
    play.send(0, 0, 1)
    play.take_in()
    play.report()
    play.instance.apply_query(early, play.now)
    play.query()
    assert in_flight(play.instance) == [2, 1, 0]  # all of it received
    while play.now < 3.0:
        play.now += 0.02
        play.step()
    play.expect_in_flight()
    play.expect_exact_from_here()


@pytest.mark.parametrize("query", ["late", "probe"])
def test_a_query_that_may_be_old_corrects_nothing(query: str) -> None:
    """The sidecar was stopped: what it reads first is older than the reports."""
    play = Flow()
    play.join("schedulers")
    while play.now < 3.0:
        play.now += 0.02
        play.step()
    requests = [keyless()] if query == "late" else []
    old = play.server.query(requests)
    for _ in range(5):
        play.send(0, 1, 2)
        play.take_in()
        play.report()
    for _ in range(3):
        play.now += 0.0001 if query == "probe" else 0.006
        play.instance.apply_query(old, play.now)
    play.expect_exact_from_here()


def test_a_rank_that_takes_in_nothing_for_long_stays_loaded() -> None:
    """If it is sure when counting began, nothing explains away what it has not received."""
    play = Flow()
    play.settle()
    play.send(*[0] * 5)
    while play.now < 10.0:
        play.now += 0.02
        play.report()
        play.query()
    assert in_flight(play.instance) == [5, 0, 0]
