"""Load reports over real sockets: whatever the listener does, a scheduler never waits."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from sglang_hook import peer
from sglang_hook.reporter import SEND_QUEUE, Reporter, Sample, Tokens
from sidecar import wire
from sidecar.wire import LoadReport
from tests.processes import (
    FOREIGN_GREETING,
    PATIENCE,
    Clock,
    Spy,
    in_fork,
    short_directory,
    sidecar_process,
    wait_for,
)

INTERVAL, HEARTBEAT = 5.0, 250.0
STATE = (1, 2)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with short_directory() as path:
        yield f"ipc://{path}/q.reports"


class Scheduler:
    """A Reporter whose clock moves one interval a step."""

    def __init__(self, endpoint: str) -> None:
        self.clock = Clock()
        self.reporter = Reporter(endpoint, "i", 3, INTERVAL, HEARTBEAT, clock=self.clock)

    def step(self, state: object = STATE, running: int = 1, waiting: int = 2) -> bool:
        self.clock.now += INTERVAL
        return self.reporter.push(state, Sample(running, waiting, self.reporter.received))

    def spy(self) -> Spy:
        spy = Spy(self.reporter._peer.socket())
        self.reporter._peer._socket = spy
        return spy


@contextlib.contextmanager
def scheduler(endpoint: str) -> Iterator[Scheduler]:
    made = Scheduler(endpoint)
    try:
        yield made
    finally:
        made.reporter.close()


class Listener:
    """A PULL socket that reads when told to."""

    def __init__(self, endpoint: str, **options: int) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.bind(endpoint)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close(0)
        self.context.term()

    def next(self) -> LoadReport:
        assert self.socket.poll(PATIENCE * 1000), "no report"
        return wire.decode_report(self.socket.recv())


def test_delivery(endpoint: str) -> None:
    with Listener(endpoint) as listener, scheduler(endpoint) as made:
        reporter = made.reporter
        reporter.count(100)
        reporter.count(11)
        reporter.tokens = Tokens(100, 1, 2, 3, 4)
        wait_for(made.step)
        first = listener.next()
        assert (first.instance, first.rank, first.epoch) == ("i", 3, reporter.epoch)
        assert (first.received, first.received_tokens) == (2, 100)
        assert (first.running, first.waiting) == (1, 2)
        told = (first.tokens, first.capacity_tokens, first.max_running)
        assert (*told, first.waiting_uncached_tokens) == (1, 2, 3, 4)
        reporter.count(1)
        assert made.step(running=7, waiting=0)
        second = listener.next()
        assert (second.running, second.waiting, second.received) == (7, 0, 3)
        assert (second.epoch, second.seq) == (first.epoch, first.seq + 1)


def test_what_the_prefix_cache_held_is_delivered(endpoint: str) -> None:
    with Listener(endpoint) as listener, scheduler(endpoint) as made:
        reporter = made.reporter
        reporter.admit(100, 60)
        reporter.admit(10, 11)
        reporter.admit(1, -5)
        assert (reporter.admitted_tokens, reporter.cached_tokens) == (111, 70), "within the prompt"
        reporter.flush()
        wait_for(lambda: reporter.push(STATE, Sample(1, 2, 3, 4, 5, 6)))
        first = listener.next()
        assert (first.running, first.waiting, first.received) == (1, 2, 3)
        told = (first.prefilling_tokens, first.admitted_tokens, first.cached_tokens)
        assert (*told, first.flushes) == (4, 5, 6, 1)


def test_a_flush_makes_a_report_due_at_once(endpoint: str) -> None:
    with Listener(endpoint), scheduler(endpoint) as made:
        wait_for(made.step)
        assert not made.reporter.due(STATE)
        made.reporter.flush()
        assert made.reporter.due(STATE), "within the interval, and although nothing else changed"
        assert made.step()
        assert not made.reporter.due(STATE)


def test_it_is_due_after_a_change_or_a_heartbeat(endpoint: str) -> None:
    with Listener(endpoint), scheduler(endpoint) as made:
        reporter, clock = made.reporter, made.clock
        assert reporter.due(STATE)
        wait_for(made.step)
        assert not reporter.due("other")
        clock.now += INTERVAL
        assert not reporter.due(STATE)
        assert reporter.due("other")
        reporter.count(1)
        assert reporter.due(STATE)
        assert made.step()
        clock.now += HEARTBEAT - 1
        assert not reporter.due(STATE)
        clock.now += 1
        assert reporter.due(STATE)


def test_case_29_nobody_listens(endpoint: str) -> None:
    with scheduler(endpoint) as made:
        spy = made.spy()
        for _ in range(5000):
            assert made.step() is False
            assert not made.reporter.due(STATE)
            made.clock.now += INTERVAL
            assert made.reporter.due(STATE)
        assert (spy.waits, spy.sends) == (0, 0)
        with Listener(endpoint) as listener:
            wait_for(made.step)
            # Nothing was kept for the listener to come: all that is old is worthless.
            assert listener.next().seq == made.reporter._seq > 5000
            assert not listener.socket.poll(0)
            made.clock.now += INTERVAL
            assert not made.reporter.due(STATE)


def test_the_listener_does_not_read(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A socket made anew would lose what is queued in the old one.
    monkeypatch.setattr(peer, "REMAKE_SECONDS", float("inf"))
    with Listener(endpoint, RCVHWM=1, RCVBUF=4096) as listener, scheduler(endpoint) as made:
        spy = made.spy()
        wait_for(made.step)
        taken = 1
        while made.step():
            taken += 1
            assert taken < 100_000, "no bound to what is queued"
        for _ in range(1000):
            sent = made.step()
            assert not made.reporter.due(STATE)
            made.clock.now += INTERVAL
            assert sent or made.reporter.due(STATE)
        assert spy.waits == 0
        seen = [listener.next().seq for _ in range(spy.sends)]
        assert seen == sorted(set(seen))
        wait_for(made.step)
        assert listener.next().seq == made.reporter._seq


def test_the_queue_is_short(endpoint: str) -> None:
    with scheduler(endpoint) as made:
        assert made.reporter._peer.socket().get(zmq.SNDHWM) == SEND_QUEUE


def test_a_stopped_sidecar_blocks_nobody(endpoint: str) -> None:
    queries = endpoint.removesuffix(".reports")
    with sidecar_process(queries) as sidecar, scheduler(endpoint) as made:
        spy = made.spy()
        wait_for(made.step)
        sidecar.freeze()
        for _ in range(20_000):
            made.step()
        assert spy.waits == 0
        assert made.step() is False
        sidecar.signal(signal.SIGCONT)
        wait_for(made.step)
        # Old reports may be lost, the newest state may not.
        newest = {"instance": "i", "dp_rank": "3"}
        wait_for(
            lambda: made.step(running=99) and sidecar.metric("running_requests", **newest) == 99
        )
        assert sidecar.metric("rejected_messages_total") is None


def test_a_sidecar_that_dies_and_returns(endpoint: str) -> None:
    with scheduler(endpoint) as made:
        for _ in range(2):
            wait_for(lambda: made.step() is False)
            with sidecar_process(endpoint.removesuffix(".reports")) as sidecar:
                wait_for(made.step)
                wait_for(
                    lambda sidecar=sidecar: (
                        made.step() and sidecar.metric("waiting_requests", instance="i") == 2
                    )
                )
                sidecar.kill()


def test_close_and_push_again(endpoint: str) -> None:
    with Listener(endpoint) as listener, scheduler(endpoint) as made:
        wait_for(made.step)
        context = made.reporter._peer.socket().context
        made.reporter.close()
        made.reporter.close()
        assert context.closed
        wait_for(made.step)
        assert listener.next().seq < listener.next().seq


def test_a_forked_child_has_a_socket_of_its_own(endpoint: str) -> None:
    with Listener(endpoint) as listener, scheduler(endpoint) as made:
        wait_for(made.step)
        assert listener.next().running == 1
        inherited = made.reporter._peer._socket

        def child() -> str:
            def step() -> bool:
                made.step(running=77)
                return read.exists()

            wait_for(step)
            assert made.reporter._peer._socket is not inherited
            made.reporter.close()
            return "pushed"

        def parent() -> None:
            wait_for(lambda: listener.next().running == 77)
            read.touch()

        read = Path(endpoint.removeprefix("ipc://") + ".read")
        assert in_fork(child, meanwhile=parent) == "pushed"
        assert in_fork(lambda: made.reporter.close() or "closed") == "closed"
        assert made.reporter._peer._socket is inherited
        assert made.step(running=55)
        wait_for(lambda: listener.next().running == 55)


def test_a_stranger_at_the_address(endpoint: str) -> None:
    """It goes, the sidecar comes, and reports reach it from a scheduler that goes on."""
    path = endpoint.removeprefix("ipc://")
    with scheduler(endpoint) as made:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(path)
            stranger.listen()
            stranger.settimeout(PATIENCE)
            assert made.step() is False
            with stranger.accept()[0] as connection:
                connection.settimeout(PATIENCE)
                connection.sendall(FOREIGN_GREETING)
                while connection.recv(4096):
                    pass
            assert made.step() is False
        Path(path).unlink()
        with Listener(endpoint) as listener:
            wait_for(made.step, 5)
            assert listener.next().rank == 3
