"""Ranks in step: a real coordinator, ranks as threads, no clock."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.model.steps import StepTimes, Work
from bench.simulated.coordinator import Coordinator, Round
from bench.simulated.pace import (
    MAX_LAG_SECONDS,
    Alone,
    Hello,
    Idle,
    Member,
    Step,
    StepCounts,
    Timeline,
)

TIMES = StepTimes()
DECODE, PREFILL = Work(False, 1, 0.0, 100), Work(True, 1024, 1e6, 0)


def never() -> bool:
    return False


def joined(ranks: int) -> Round:
    together = Round(TIMES, 1.0)
    for rank in range(ranks):
        together.join(Hello(rank, ranks))
    return together


# What the coordinator decides


def test_a_step_begins_when_every_rank_has_spoken() -> None:
    together = joined(2)
    assert together.say(1, DECODE) == set()
    assert not together.complete
    together.say(0, None)
    assert together.complete
    step = together.close(0.0)
    assert step == Step(1, TIMES.seconds([None, DECODE]), 0.0)
    assert not together.complete, "the next step needs new words"


def test_nothing_begins_before_all_ranks_have_come() -> None:
    together = Round(TIMES, 1.0)
    together.join(Hello(0, 2))
    together.say(0, DECODE)
    assert not together.complete
    together.join(Hello(1, 2))
    together.say(1, None)
    assert together.complete


def test_prefill_on_one_rank_lengthens_the_step_of_all() -> None:
    together = joined(2)
    together.say(0, DECODE)
    together.say(1, PREFILL)
    step = together.close(0.0)
    assert isinstance(step, Step)
    assert step.seconds == TIMES.seconds([DECODE, PREFILL]) > 2 * TIMES.seconds([DECODE, None])


def test_the_first_word_after_all_were_idle_wakes_the_others_once() -> None:
    together = joined(3)
    for rank in range(3):
        assert together.say(rank, None) == set()
    assert together.close(0.0) == Idle()
    assert together.say(1, DECODE) == {0, 2}
    assert together.say(2, None) == set()
    assert not together.complete
    together.say(0, None)
    assert isinstance(together.close(7.0), Step)


def test_a_rank_that_left_is_idle_for_ever() -> None:
    together = joined(3)
    together.say(0, DECODE)
    together.say(1, DECODE)
    together.leave(2)
    assert together.complete
    step = together.close(0.0)
    assert isinstance(step, Step)
    assert step.seconds == TIMES.seconds([DECODE, DECODE, None])
    together.leave(0)
    together.leave(1)
    assert not together.complete


def test_time_between_steps_is_hidden_behind_them() -> None:
    line = Timeline(2.0)
    assert (line.begin(0.1, 10.0), line.ends) == (0.0, pytest.approx(10.2))
    assert (line.begin(0.1, 10.21), line.ends) == (0.0, pytest.approx(10.4))
    line.pause()
    assert (line.begin(0.1, 10.41), line.ends) == (0.0, pytest.approx(10.61))


def test_what_cannot_be_made_up_is_told() -> None:
    line = Timeline(1.0)
    line.begin(0.1, 0.0)
    assert line.begin(0.1, 5.0) == pytest.approx(4.9 - MAX_LAG_SECONDS)
    assert line.ends == pytest.approx(5.1 - MAX_LAG_SECONDS)


# Ranks and a coordinator


class Ranks:
    """Members of one group; each call of `step` is a thread of its own."""

    def __init__(self, path: str, count: int) -> None:
        self.members = [Member(path, rank, count) for rank in range(count)]
        self.pool = ThreadPoolExecutor(count)

    def step(self, *works: Work | None) -> list[Step | None]:
        return list(self.pool.map(lambda m, w: m.step(w, never), self.members, works))

    def close(self) -> None:
        for member in self.members:
            member.close()
        self.pool.shutdown()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Ranks]]:
    path = str(tmp_path / "b")
    made: list[Ranks] = []

    def make(count: int) -> Ranks:
        made.append(Ranks(path, count))
        return made[-1]

    with Coordinator(path, TIMES, 0.0):
        yield make
        for ranks in made:
            ranks.close()


def test_all_ranks_agree_on_number_and_duration(start: Callable[[int], Ranks]) -> None:
    ranks = start(8)
    works: list[Work | None] = [DECODE, PREFILL, *[None] * 6]
    for number in range(1, 30):
        steps = ranks.step(*works)
        assert [step and step.number for step in steps] == [number] * 8
        assert {step and step.seconds for step in steps} == {TIMES.seconds(works)}
        works = [*works[1:], works[0]]


def test_no_rank_is_ahead_of_another(start: Callable[[int], Ranks]) -> None:
    ranks = start(4)
    ended: list[int] = []
    lock = threading.Lock()

    def run(member: Member) -> None:
        for _ in range(50):
            step = member.step(DECODE, never)
            assert step is not None
            with lock:
                ended.append(step.number)

    list(ranks.pool.map(run, ranks.members))
    # A rank may end step n + 1 before another has noted step n, but not step n + 2.
    assert all(later >= max(ended[:at], default=0) - 1 for at, later in enumerate(ended))
    assert sorted(ended) == sorted([*range(1, 51)] * 4)


def test_idle_ranks_are_silent_until_a_request_reaches_any_of_them(
    start: Callable[[int], Ranks],
) -> None:
    ranks = start(3)
    assert ranks.step(None, None, None) == [None] * 3
    for _ in range(3):
        assert ranks.step(None, None, None) == [None] * 3
    wake_me = ranks.members[0]

    def sleeper(member: Member) -> Step | None:
        step = None
        while step is None:
            step = member.step(None, never)
        return step

    sleeping = [ranks.pool.submit(sleeper, member) for member in ranks.members[1:]]
    step = wake_me.step(DECODE, never)
    assert step is not None
    assert step.number == 1, "no step was taken while all were idle"
    assert [each.result() for each in sleeping] == [step, step]
    assert ranks.step(None, None, None) == [None] * 3
    assert [step and step.number for step in ranks.step(DECODE, DECODE, DECODE)] == [2] * 3


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_a_rank_that_dies_is_waited_for_no_more(start: Callable[[int], Ranks], dies: int) -> None:
    ranks = start(3)
    ranks.step(DECODE, DECODE, DECODE)
    left = [member for rank, member in enumerate(ranks.members) if rank != dies]
    waiting = [ranks.pool.submit(member.step, DECODE, never) for member in left]
    ranks.members[dies].close()
    for number in range(2, 5):
        steps = [each.result() for each in waiting]
        assert [step and step.number for step in steps] == [number, number]
        waiting = [ranks.pool.submit(member.step, DECODE, never) for member in left]
    assert waiting[0].result() == waiting[1].result()


def test_a_rank_that_waits_for_one_that_hangs_sees_the_order_to_stop(
    start: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.simulated.pace.OVERDUE_SECONDS", 0.001)
    ranks = start(2)
    asked = iter([False, False, True])
    assert ranks.members[0].step(DECODE, lambda: next(asked)) is None
    assert list(asked) == []


def test_without_a_coordinator_ranks_fail_loudly(tmp_path: Path) -> None:
    path = str(tmp_path / "b")
    with Coordinator(path, TIMES, 0.0):
        ranks = Ranks(path, 2)
        ranks.step(DECODE, DECODE)
        waiting = ranks.pool.submit(ranks.members[0].step, DECODE, never)
    with pytest.raises(ConnectionError):
        waiting.result()
    with pytest.raises(OSError):
        ranks.members[1].step(DECODE, never)
    ranks.close()


def test_a_rank_of_plain_dp_waits_for_nobody() -> None:
    alone = Alone(TIMES, 0.0)
    assert alone.step(None, never) is None
    assert alone.step(PREFILL, never) == Step(1, TIMES.seconds([PREFILL]), 0.0)


def test_counts_tell_idle_prefill_and_decode_apart() -> None:
    counts = StepCounts()
    for work, seconds in ((None, 1.0), (DECODE, 2.0), (DECODE, 5.0), (PREFILL, 7.0)):
        counts.add(work, Step(1, seconds, 0.5))
    assert counts == StepCounts(4, 15.0, 1, 2, 14.0, 7.0, 5.0, 2.0)
