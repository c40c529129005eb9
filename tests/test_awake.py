"""A process that was stopped has old reports before it: it hears them before it decides."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from sidecar import wire
from sidecar.awake import SLEPT_SECONDS, TICK_SECONDS, Awake
from sidecar.pump import Pump
from sidecar.sockets import Sockets
from tests.processes import Asker, Clock, short_directory, sidecar_process, wait_for
from tests.support import keyless, report

OLD_REPORTS = 400
"""Of each rank: more than one burst takes, less than ZeroMQ holds for a process that is stopped."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.mark.parametrize(("passed", "slept"), [(SLEPT_SECONDS / 2, False), (60.0, True)])
def test_time_that_passed_unseen_is_sleep(passed: float, slept: bool) -> None:
    clock = Clock()
    awake = Awake(clock)
    clock.now += passed
    assert awake.slept() is slept
    assert not awake.slept(), "it is told once"


def test_ticks_see_time_pass_and_keep_what_they_found() -> None:
    clock = Clock()
    awake = Awake(clock)

    async def call() -> None:
        loop = asyncio.get_running_loop()
        clock.now += 60.0
        awake.start(loop)
        assert not awake.slept(), "time before the start does not count"
        for _ in range(3):
            clock.now += SLEPT_SECONDS / 2
            seen = awake._timer
            while awake._timer is seen:
                await asyncio.sleep(TICK_SECONDS / 10)
        assert not awake.slept()
        clock.now += 60.0
        seen = awake._timer
        while awake._timer is seen:
            await asyncio.sleep(TICK_SECONDS / 10)
        assert awake.slept(), "though a tick has seen the time since"
        awake.stop()

    asyncio.run(call())


def test_the_newest_report_counts_after_a_stop(directory: Path) -> None:
    """While it was stopped the loads of two ranks changed places."""
    flags = ("--policy=total_requests", "--stale-seconds=60")
    endpoint = f"ipc://{directory}/q"
    with (
        sidecar_process(endpoint, *flags) as sidecar,
        Asker(endpoint) as asker,
        Asker(endpoint + ".reports", zmq.PUSH) as push,
    ):

        def tell(seq: int, loads: tuple[int, int]) -> None:
            for rank, load in enumerate(loads):
                push.send(wire.encode(report(rank, seq, running=load)))

        def decided() -> list[int]:
            return list(asker.query([keyless()], ranks=[0, 1]).ranks)

        tell(1, (0, 50))
        wait_for(lambda: sidecar.metric("load_reports_total") == 2)
        assert decided() == [0]
        sidecar.freeze()
        until = time.monotonic() + 2 * SLEPT_SECONDS
        for seq in range(2, OLD_REPORTS):
            tell(seq, (0, 50))
        tell(OLD_REPORTS, (50, 0))
        wait_for(lambda: time.monotonic() > until)
        sidecar.signal(signal.SIGCONT)
        assert decided() == [1]
        assert sidecar.metric("load_reports_total") == 2 * OLD_REPORTS


@pytest.mark.parametrize("again", [False, True])
def test_a_second_stop_while_it_catches_up(
    directory: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Its time for reports alone has passed unused, if it was stopped meanwhile."""
    done: list[str] = []
    bursts, sleeps = iter([True, True]), iter([again])

    def take(pump: Pump) -> bool:
        done.append("reports")
        return next(bursts, False)

    def serve(pump: Pump) -> bool:
        done.append("queries")
        return False

    monkeypatch.setattr(Pump, "_take_burst", take)
    monkeypatch.setattr(Pump, "_serve_burst", serve)

    async def catch_up() -> None:
        sockets = Sockets(f"ipc://{directory}/q", allow_tcp=False)
        nobody: Any = SimpleNamespace(handshake=None)
        pump = Pump(sockets, nobody, nobody)
        monkeypatch.setattr(pump._awake, "slept", lambda: next(sleeps, False))
        pump._catching_up_until = time.monotonic() - 1
        pump._catch_up()
        while "queries" not in done:
            await asyncio.sleep(0)
        sockets.close()

    asyncio.run(catch_up())
    assert done.index("queries") == (4 if again else 2)
