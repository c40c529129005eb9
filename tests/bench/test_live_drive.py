import asyncio

import pytest

from bench.live.apis import Answer
from bench.live.client import Result
from bench.live.drive import Drive, DriveError
from bench.workloads.base import Call, Fork, Send, Source


def call(number, session=0, turn=0):
    return Call(number, session, turn, "", (1,), 1, 1)


def script(session, *delays):
    for turn, delay in enumerate(delays):
        yield Send(call(session * 100 + turn, session, turn), delay)


class Server:
    """Answers after a few turns of the loop; remembers the order and how many are open."""

    def __init__(self, failing=()):
        self.order, self.open, self.most = [], 0, 0
        self.failing = failing

    async def __call__(self, call):
        self.order.append(call.id)
        self.open += 1
        self.most = max(self.most, self.open)
        for _ in range(3):
            await asyncio.sleep(0)
        self.open -= 1
        return Result(0.0, 1.0, 2.0, Answer(error="broken" if call.id in self.failing else ""))


def run(source, server, **options):
    drive = Drive(source, server, **{"scale": 0.0, **options})
    return asyncio.run(drive.run())


def test_an_open_loop_goes_by_time():
    starts = [(0.0, script(1, 0.0, 9.0)), (3.0, script(2, 0.0)), (5.0, script(3, 0.0))]
    server = Server()
    run(Source(starts), server)
    assert server.order == [100, 200, 300, 101]


def test_who_thinks_longer_sends_later():
    server = Server()
    run(Source([(0.0, script(1, 0.0, 5.0)), (0.0, script(2, 0.0, 1.0))], slots=2), server)
    assert server.order == [100, 200, 201, 101]


def test_a_closed_loop_never_exceeds_its_slots_and_ends_all():
    server = Server()
    done = run(Source(((0.0, script(i, 0.0, 0.0)) for i in range(20)), slots=3), server)
    assert server.most == 3
    assert len(done) == 40
    assert sorted(server.order) == sorted(i * 100 + turn for i in range(20) for turn in (0, 1))


def test_turns_of_a_session_follow_each_other():
    server = Server()
    run(Source(((0.0, script(i, *[1.0] * 4)) for i in range(5)), slots=5), server)
    for session in range(5):
        turns = [each for each in server.order if each // 100 == session]
        assert turns == sorted(turns)


def test_a_fork_is_over_when_its_branches_are():
    def parent():
        yield Send(call(1))
        yield Fork([script(1, 0.0, 0.0), script(2, 0.0)])
        yield Send(call(2))

    server = Server()
    run(Source([(0.0, parent())], slots=1), server)
    assert server.order[0] == 1
    assert server.order[-1] == 2
    assert server.most == 2


def test_with_real_time_all_are_sent_too():
    server = Server()
    done = run(Source([(0.0, script(1, 0.0, 1.0)), (0.5, script(2, 0.0))]), server, scale=0.001)
    assert len(done) == 3


def test_an_empty_source():
    assert run(Source([]), Server()) == []


def test_a_failure_is_a_result_and_the_session_goes_on():
    done = run(Source([(0.0, script(1, 0.0, 0.0, 0.0))]), Server(failing={101}))
    assert [each.result.error for each in done] == ["", "broken", ""]


def test_failures_one_after_another_end_the_run():
    server = Server(failing=range(1000))
    with pytest.raises(DriveError, match="3 requests failed one after another; the last: broken"):
        run(Source([(0.0, script(1, *[0.0] * 9))]), server, max_failures=3)
    assert len(server.order) == 3


def test_failures_with_successes_between_them_do_not():
    done = run(Source([(0.0, script(1, *[0.0] * 9))]), Server(failing={100, 102}), max_failures=2)
    assert len(done) == 9


def test_a_bug_is_raised_and_nothing_is_left_running():
    cancelled = []

    async def broken(call):
        if call.id == 200:
            raise KeyError("bug")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(call.id)
            raise

    with pytest.raises(KeyError, match="bug"):
        run(Source([(0.0, script(1, 0.0)), (0.0, script(2, 0.0))]), broken)
    assert cancelled == [100]
