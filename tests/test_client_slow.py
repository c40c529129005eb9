"""A sidecar that lives but answers too late: requests must not pay a deadline each."""

import zmq

from sglang_hook.client import LONGEST_HOLD_OFF, RECOVERED_AFTER, SidecarClient
from sidecar import wire
from sidecar.wire import Reply, Want
from tests.support import query


class Late:
    """A socket whose answers come after the deadline, or in time while `fast`."""

    def __init__(self) -> None:
        self.fast = False
        self.boot = 1
        self.waits = 0
        self.pending: bytes | None = None

    def send(self, data: bytes, flags: int) -> None:
        seq = wire.decode_query(data).seq
        self.pending = wire.encode(Reply(1, seq, self.boot, "test", 1, [], [], Want()))

    def recv(self, flags: int = 0) -> bytes:
        if flags == 0:
            self.waits += 1
        if self.pending is None or (flags == 0 and not self.fast):
            raise zmq.Again
        data, self.pending = self.pending, None
        return data

    def get(self, option: int) -> int:
        return int(zmq.POLLIN) if self.pending is not None else 0


class Play:
    def __init__(self) -> None:
        self.now, self.seq, self.socket = 0.0, 0, Late()
        self.client = SidecarClient("ipc:///x", 5, 1, 0.05, self.probe, lambda: self.now)
        self.client._peer.socket = lambda: self.socket  # type: ignore[method-assign]

    def probe(self) -> bytes:
        self.seq += 1
        return wire.encode(query(seq=self.seq))

    def ask(self, times: int = 1, every: float = 0.004) -> list[object]:
        answers = []
        for _ in range(times):
            self.now += every
            self.seq += 1
            answers.append(self.client.ask(wire.encode(query(seq=self.seq)), self.seq))
        return answers


def test_few_requests_wait_for_a_sidecar_that_is_always_late() -> None:
    play = Play()
    answers = play.ask(5000)  # 20 seconds
    assert {"deadline", "breaker_open"} == set(answers)
    assert play.socket.waits == answers.count("deadline") <= 12
    before = play.socket.waits
    play.ask(5000)
    assert play.socket.waits - before <= 20 / LONGEST_HOLD_OFF + 1


def test_one_that_recovered_is_asked_at_once_after_a_lone_miss() -> None:
    play = Play()
    play.ask(5000)
    play.socket.fast = True
    play.ask(round(LONGEST_HOLD_OFF / 0.004) + 10)
    assert all(isinstance(answer, Reply) for answer in play.ask(RECOVERED_AFTER + 1))
    play.socket.fast = False
    assert play.ask() == ["deadline"]
    play.socket.fast = True
    assert isinstance(play.ask()[0], Reply), "the late answer closed the breaker"


def test_a_new_sidecar_is_not_held_off_for_the_one_before_it() -> None:
    play = Play()
    play.ask(5000)
    play.socket.fast = True
    soon = round(0.1 / 0.004)  # two probe intervals
    assert not [answer for answer in play.ask(soon) if isinstance(answer, Reply)]
    play.socket.boot = 2
    assert isinstance(play.ask(soon)[-1], Reply)
    assert all(isinstance(answer, Reply) for answer in play.ask(100))
