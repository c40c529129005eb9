"""A process that was stopped has old reports before it: it hears them before it decides."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from sidecar import wire
from sidecar.awake import SLEPT_SECONDS, TICK_SECONDS, Awake
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
