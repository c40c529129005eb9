"""Upgrades under `sglang-dp-sidecar run`: the successor is its child, whoever started it."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import Sidecar, gone, running, short_directory, wait_for
from tests.test_run import Run, nothing_left, run


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


def another(process: Run, before: int) -> psutil.Process | None:
    """A child of `run` that is a sidecar, is not `before`, and holds the endpoint."""
    lock = Path(process.endpoint.removeprefix("ipc://") + ".lock")
    pid = int(lock.read_text() or 0)
    children = {child.pid: child for child in psutil.Process(process.pid).children()}
    return children.get(pid) if pid != before else None


def test_sigusr2_replaces_the_sidecar_and_not_the_server(directory: Path) -> None:
    with run(directory, "--on-signal=0") as process:
        before, _ = process.both()
        for _ in range(2):
            process.signal(signal.SIGUSR2)
            sidecar = wait_for(lambda before=before: another(process, before))
            wait_for(lambda before=before: gone(before))
            assert process.lines(f"handed over to pid {sidecar.pid}")
            wait_for(lambda pid=sidecar.pid: process.lines(f"the sidecar is pid {pid} now"))
            assert process.answered()
            before = sidecar.pid
        assert not process.lines("the sidecar ended")
        assert not process.lines("WARNING", "sglang-dp-sidecar")
        # SIGHUP reaches the one that serves now, and so does the end.
        process.signal(signal.SIGHUP)
        wait_for(lambda: process.lines("reload"))
        assert process.stop() == 0
        assert process.record()["signals"] == ["SIGTERM"], "the server heard of nothing"
        assert nothing_left(process)


def test_a_successor_that_fails_changes_nothing(directory: Path) -> None:
    config = directory / "c.toml"
    config.write_text("")
    with run(directory, "--on-signal=0", flags=(f"--config={config}",)) as process:
        before, _ = process.both()
        config.write_text("[serve]\nstale_seconds = 0\n")
        process.signal(signal.SIGUSR2)
        wait_for(lambda: process.lines("the successor ended with 2; the sidecar serves on"))
        assert process.answered()
        assert wait_for(process.sidecar).pid == before
        config.write_text("")
        process.signal(signal.SIGUSR2)
        assert wait_for(lambda: another(process, before))
        assert process.stop() == 0
        assert nothing_left(process)


def test_a_stop_while_the_successor_starts(directory: Path) -> None:
    with run(directory, "--on-signal=0") as process:
        process.both()
        process.signal(signal.SIGUSR2)
        assert process.stop() == 0
        assert nothing_left(process)


def test_one_that_took_over_from_outside_is_replaced_by_a_child(directory: Path) -> None:
    """Else nobody would end it with the server, and SIGHUP would not reach it."""
    with run(directory, "--on-signal=0") as process:
        before, _ = process.both()
        command = [sys.executable, "-m", "sidecar", "serve", "--take-over"]
        command += [f"--endpoint={process.endpoint}", "--admin-port=0"]
        with running(command) as outsider:
            assert outsider.wait() == 0, outsider.log()
            sidecar = wait_for(lambda: another(process, before))
            assert outsider.lines(f"handed over to pid {sidecar.pid}")
        assert process.answered()
        assert process.stop() == 0
        assert nothing_left(process)


def test_sigusr2_to_the_sidecar_itself_ends_with_a_child_too(directory: Path) -> None:
    with run(directory, "--on-signal=0") as process:
        before, _ = process.both()
        os.kill(before, signal.SIGUSR2)
        sidecar = wait_for(lambda: another(process, before))
        assert process.answered()
        assert wait_for(process.sidecar).pid == sidecar.pid
        assert process.stop() == 0
        wait_for(lambda: nothing_left(process))


def test_a_crash_while_a_successor_starts(directory: Path) -> None:
    """Whichever of the two that start serves, there is one, and it is a child."""
    with run(directory, "--on-signal=0") as process:
        before, _ = process.both()
        process.signal(signal.SIGUSR2)
        os.kill(before, signal.SIGKILL)
        assert wait_for(lambda: another(process, before))
        assert process.answered()
        assert process.stop() == 0
        assert nothing_left(process)


def test_two_of_one_endpoint_do_not_take_it_from_each_other(directory: Path) -> None:
    with run(directory, "--on-signal=0") as process:
        before, _ = process.both()
        other = Sidecar(process.endpoint)
        try:
            assert other.wait() == 69
        finally:
            other.end()
        assert wait_for(process.sidecar).pid == before
        assert process.stop() == 0
