"""SIGUSR2: a sidecar starts its own successor; what systemd is told of it."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.outside import distribution, sound
from tests.processes import (
    Asker,
    Sidecar,
    clean_env,
    gone,
    short_directory,
    sidecar_process,
    wait_for,
)
from tests.support import keyed
from tests.test_takeover import TAKE, answered, end, holder


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def endpoint(directory: Path) -> str:
    return f"ipc://{directory}/q"


def successor_of(sidecar: Sidecar, directory: Path) -> psutil.Process:
    assert sidecar.wait() == 0, sidecar.log()
    wait_for(lambda: holder(directory) not in (0, sidecar.pid))
    return psutil.Process(holder(directory))


def test_sigusr2_starts_a_successor_with_the_same_settings(endpoint: str, directory: Path) -> None:
    config = directory / "c.toml"
    config.write_text('[log]\nformat = "json"\n')
    env = clean_env(DP_SIDECAR_STALE_SECONDS="7")
    with sidecar_process(endpoint, "--policy=round_robin", config=config, env=env) as old:
        old.signal(signal.SIGUSR2)
        successor = successor_of(old, directory)
        try:
            command = successor.cmdline()
            assert command[1:5] == ["-m", "sidecar", "serve", TAKE]
            assert f"--config={config}" in command
            assert "--policy=round_robin" in command
            assert successor.environ()["DP_SIDECAR_STALE_SECONDS"] == "7"
            with Asker(endpoint) as asker:
                assert asker.query([keyed("a")]).policy == "round_robin"
            assert old.lines(f"handed over to pid {successor.pid}")
            wait_for(lambda: old.lines('"ready: version', f"pid {successor.pid}"))
            # and again, without growing
            before = successor.pid
            os.kill(before, signal.SIGUSR2)
            wait_for(lambda: holder(directory) not in (0, before))
            second = psutil.Process(holder(directory))
            assert second.cmdline() == command
            wait_for(lambda: gone(before))
            assert answered(endpoint)
        finally:
            end(holder(directory))


def test_a_successor_that_cannot_start_changes_nothing(endpoint: str, directory: Path) -> None:
    config = directory / "c.toml"
    config.write_text("")
    with sidecar_process(endpoint, config=config) as old:
        config.write_text('[policy]\nname = "best"\n')
        old.signal(signal.SIGUSR2)
        wait_for(lambda: old.lines("upgrade: the successor", "ended with 2", "serves on"))
        assert answered(endpoint)
        config.write_text("")
        old.signal(signal.SIGUSR2)
        end(successor_of(old, directory).pid)


# ---- systemd


@pytest.fixture
def told(directory: Path) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Where a supervisor listens, and what it has heard next."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"{directory}/notify")
        listener.settimeout(10)
        yield f"{directory}/notify", lambda: listener.recv(4096).decode().split("\n")


def test_systemd_is_told_whom_to_follow(
    endpoint: str, directory: Path, told: tuple[str, Callable[[], list[str]]]
) -> None:
    address, heard = told
    with sidecar_process(endpoint, env=clean_env(NOTIFY_SOCKET=address)) as old:
        assert heard() == ["READY=1", f"MAINPID={old.pid}"]
        old.signal(signal.SIGUSR2)
        successor = successor_of(old, directory).pid
        # One from each, in whatever order; both before the older one ended.
        both = [heard(), heard()]
        assert sorted(both) == [[f"MAINPID={successor}"], ["READY=1", f"MAINPID={successor}"]]
        end(successor)
        assert heard() == ["STOPPING=1"]


def test_an_abstract_address_and_a_supervisor_that_is_gone(endpoint: str) -> None:
    name = f"dps-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(10)
        with sidecar_process(endpoint, env=clean_env(NOTIFY_SOCKET=f"@{name}")) as sidecar:
            assert listener.recv(4096).startswith(b"READY=1\n")
            listener.close()
            assert sidecar.stop() == 0
            assert not sidecar.lines("Traceback")


def test_a_successor_waits_for_one_that_still_looks_for_policies(directory: Path) -> None:
    (directory / "dps_slow.py").write_text("import time\ntime.sleep(4)\n" + sound())
    distribution(directory, "dps-slow", {"mine": "dps_slow:Mine"})
    env = clean_env(PYTHONPATH=str(directory))
    flags = (f"ipc://{directory}/q", "--admin-port=0")
    with sidecar_process(*flags, ready=False, env=env) as old:
        wait_for(lambda: old.lines("ready:"))
        assert not old.lines("control on")
        with sidecar_process(*flags, "--take-over", ready=False, env=env) as new:
            wait_for(lambda: new.lines("ready:") or new.process.poll() is not None)
            assert new.lines("took over from pid", str(old.pid)), new.log()
            assert old.wait() == 0
