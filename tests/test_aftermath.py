"""What happens to a decision after the reply: in order, in slices, bounded, whoever fails."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sidecar import aftermath as module
from sidecar.aftermath import Aftermath, ShadowSeat
from sidecar.policies import make_policy
from sidecar.wire import LoadReport, Query, Reply
from tests.support import keyed, make_dispatcher, query, report


class Observer:
    """Notes what it is told; yields after each request."""

    def __init__(self, fault: BaseException | None = None) -> None:
        self.heard: list[Any] = []
        self.fault = fault

    def follow(self, query: Query, reply: Reply, now: float) -> Iterator[None]:
        for facts in query.requests:
            self.heard.append((query.seq, facts.routing_key))
            yield
        if self.fault:
            raise self.fault

    def report(self, report: LoadReport, now: float) -> None:
        self.heard.append(report.seq)
        if self.fault:
            raise self.fault


class Bench:
    """An aftermath, its observers, its faults and what it left out."""

    def __init__(self, **observers: Observer) -> None:
        self.errors: list[tuple[str, Exception]] = []
        self.skipped: list[int] = []
        self.aftermath = Aftermath(
            lambda name, error: self.errors.append((name, error)), self.skipped.append
        )
        self.aftermath.observers = dict(observers)

    def decide(self, seq: int, requests: int = 1, size: int = 100) -> None:
        asked = query([keyed(f"k{i}") for i in range(requests)], seq=seq)
        self.aftermath.decided(asked, Reply(1, seq, 1, "p", 1, [], [], None), 0.0, size)  # type: ignore[arg-type]


def run(act: Callable[[], None], done: Callable[[], bool]) -> None:
    """`act` in a loop, until `done`."""

    async def main() -> None:
        act()
        for _ in range(100_000):
            if done():
                return
            await asyncio.sleep(0)
        raise AssertionError("never done")

    asyncio.run(main())


def test_in_order_and_not_at_once() -> None:
    observer = Observer()
    bench = Bench(one=observer)

    def act() -> None:
        bench.decide(1, 2)
        bench.aftermath.reported(report(0, 77), 0.0)
        bench.decide(2)
        assert not observer.heard, "nothing while the query is being answered"

    run(act, lambda: len(observer.heard) == 4)
    assert observer.heard == [(1, b"k0"), (1, b"k1"), 77, (2, b"k0")]
    assert not bench.errors


def test_others_run_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_NS", 1)
    observer = Observer()
    bench, turns = Bench(one=observer), []

    async def main() -> None:
        bench.decide(1, 500)
        while len(observer.heard) < 500:
            turns.append(len(observer.heard))
            await asyncio.sleep(0)

    asyncio.run(main())
    assert len(turns) > 100


@pytest.mark.parametrize("drawn", [False, True])
def test_one_that_fails_stops_nobody(*, drawn: bool) -> None:
    bad, good = Observer(RuntimeError("bug")), Observer()
    bench = Bench(bad=bad, good=good)

    def act() -> None:
        for seq in range(1, 6):
            bench.decide(seq)
            bench.aftermath.reported(report(0, seq), 0.0)
        if drawn:
            bench.aftermath.drain()

    run(act, lambda: len(good.heard) == 10)
    assert len(bench.errors) == 10
    assert {name for name, _ in bench.errors} == {"bad"}
    assert bench.aftermath._requests == bench.aftermath._bytes == 0


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    observer = Observer()
    bench = Bench(one=observer)

    def act() -> None:
        for seq in range(module.MAX_REQUESTS // 100 + 5):
            bench.decide(seq, 100)
        assert sum(bench.skipped) == 500
        bench.skipped.clear()
        bench.aftermath.drain()
        bench.decide(1, 1, module.MAX_BYTES)
        bench.decide(2, 3, 1)
        assert bench.skipped == [3]
        for seq in range(5 * module.MAX_REQUESTS):
            bench.aftermath.reported(report(0, seq), 0.0)
        assert len(bench.aftermath._waiting) <= 4 * module.MAX_REQUESTS + 2
        bench.aftermath.drain()
        observer.heard.clear()
        bench.decide(9)

    run(act, lambda: observer.heard == [(9, b"k0")])


def test_without_observers_nothing_waits() -> None:
    bench = Bench()

    async def main() -> None:
        bench.decide(1)
        bench.aftermath.reported(report(0, 1), 0.0)
        assert not bench.aftermath._waiting

    asyncio.run(main())


def test_the_shadow_at_the_time() -> None:
    dispatcher = make_dispatcher("kv_affinity")
    bench = Bench()
    bench.aftermath.observers = {"shadow": ShadowSeat(dispatcher)}

    def decide() -> None:
        asked = query([keyed("a")])
        reply = dispatcher.handle(asked, 1.0)
        bench.aftermath.decided(asked, reply, 1.0, 100)
        bench.aftermath.reported(report(0, 5), 1.0)

    def counted() -> int:
        found = dispatcher.shadow.comparisons if dispatcher.shadow else {}
        return sum(one.agreed + one.disagreed for one in found.values())

    async def main() -> None:
        decide()
        bench.aftermath.drain()
        dispatcher.set_shadow(make_policy("round_robin"))
        decide()
        bench.aftermath.drain()
        assert counted() == 1
        # It ends and another begins while decisions wait.
        decide()
        dispatcher.set_shadow(None)
        bench.aftermath.drain()
        decide()
        dispatcher.set_shadow(make_policy("total_tokens"))
        bench.aftermath.drain()
        assert counted() == 0
        decide()
        bench.aftermath.drain()
        assert counted() == 1
        assert not bench.errors

    asyncio.run(main())
