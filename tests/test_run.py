"""`sglang-dp-sidecar run`: the sidecar beside a server, as one command."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sidecar.wire import Reply
from tests.processes import (
    Asker,
    Running,
    clean_env,
    free_port,
    gone,
    mentioning,
    metric,
    short_directory,
    wait_for,
)
from tests.support import keyed


class Run(Running):
    """`run` with tests/fake_server.py as its server."""

    def __init__(
        self,
        directory: Path,
        *server: str,
        flags: tuple[str, ...] = (),
        module: str = "tests.fake_server",
        env: dict[str, str] | None = None,
    ) -> None:
        self.endpoint = f"ipc://{directory}/q"
        self.record_file = directory / "record.json"
        self.port = free_port()
        command = [sys.executable, "-m", "sidecar", "run", f"--endpoint={self.endpoint}"]
        command += [f"--admin-port={self.port}", *flags, f"--server-module={module}"]
        command += ["--", f"--record={self.record_file}", *server]
        super().__init__(command, env=env)

    def record(self) -> dict[str, Any]:
        return json.loads(self.record_file.read_text())

    def ready(self) -> bool:
        """Whether the server waits for signals."""
        assert self.process.poll() is None, self.log()
        return self.record_file.exists() and self.record()["ready"]

    def sidecar(self) -> psutil.Process | None:
        """The sidecar, once it has started the interpreter."""
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.cmdline()[1:4] == ["-m", "sidecar", "serve"]:
                    return child
        return None

    def answered(self) -> bool:
        with Asker(self.endpoint) as asker:
            return isinstance(asker.query([keyed("k")]), Reply)

    def both(self) -> tuple[int, int]:
        """Process ids of sidecar and server, both ready."""
        wait_for(self.ready)
        assert self.answered()
        return wait_for(self.sidecar).pid, self.record()["pid"]


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@contextlib.contextmanager
def run(directory: Path, *server: str, **settings: Any) -> Iterator[Run]:
    """`run`, and nothing of it after the block."""
    process = Run(directory, *server, **settings)
    try:
        yield process
    finally:
        process.end()
        for left in mentioning(str(directory)):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def nothing_left(process: Run) -> bool:
    """Whether neither sidecar nor server runs any more: both were told the directory."""
    return not mentioning(str(process.record_file.parent))


def test_the_server_gets_the_endpoint_and_its_arguments(directory: Path) -> None:
    arguments = ("--tp", "2", "--", "--endpoint=mine", "a b", "", "--help-me")
    with run(directory, "--on-signal=0", *arguments) as process:
        process.both()
        record = process.record()
        assert record["argv"][1:] == ["--on-signal=0", *arguments]
        assert record["endpoint"] == process.endpoint
        assert record["insecure"] is None
        assert process.stop() == 0
        assert nothing_left(process)


def test_the_endpoint_of_the_environment(directory: Path) -> None:
    env = clean_env(DP_SIDECAR_ENDPOINT="ipc:///nowhere/q", DP_SIDECAR_POLICY="round_robin")
    with run(directory, "--on-signal=0", env=env) as process:
        process.both()
        assert process.record()["endpoint"] == process.endpoint
        with Asker(process.endpoint) as asker:
            assert asker.query([keyed("k")]).policy == "round_robin"
        assert process.stop() == 0


@pytest.mark.parametrize(
    ("option", "code"),
    [("--exit=0", 0), ("--exit=3", 3), ("--exit=255", 255), ("--die-by=9", 137)],
)
def test_the_exit_code_passes_through_at_once(directory: Path, option: str, code: int) -> None:
    with run(directory, option) as process:
        assert process.wait() == code, process.log()
        assert "Traceback" not in process.log()
        assert nothing_left(process)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_server_killed_by_a_signal(directory: Path, number: int) -> None:
    with run(directory) as process:
        sidecar, server = process.both()
        os.kill(server, number)
        assert process.wait() == 128 + number
        assert gone(sidecar)
        assert nothing_left(process)


def test_a_module_that_does_not_exist(directory: Path) -> None:
    with run(directory, module="no_such_module_at_all") as process:
        assert process.wait() == 1
        assert "no_such_module_at_all" in process.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_reaches_the_server_once(directory: Path, number: int) -> None:
    with run(directory) as process:
        sidecar, _ = process.both()
        # To the whole process group, as Ctrl-C in a terminal.
        os.killpg(process.pid, number)
        name = signal.Signals(number).name
        wait_for(lambda: process.record()["signals"] == [name])
        # The server has not ended: it may still need the sidecar.
        assert process.answered()
        assert wait_for(process.sidecar).pid == sidecar
        process.signal(signal.SIGUSR1)
        assert process.wait() == 0
        assert process.record()["signals"] == [name, "SIGUSR1"]
        assert nothing_left(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_both(directory: Path, number: int) -> None:
    with run(directory, "--on-signal=7") as process:
        sidecar, server = process.both()
        process.signal(number)
        assert process.wait() == 7
        assert gone(sidecar)
        assert gone(server)
        assert process.record()["signals"] == [signal.Signals(number).name]
        assert "Traceback" not in process.log()


def test_sighup_reloads_the_sidecar(directory: Path) -> None:
    config = directory / "c.toml"
    config.write_text('[policy]\nname = "round_robin"\n')
    with run(directory, "--on-signal=0", flags=(f"--config={config}",)) as process:
        sidecar, _ = process.both()
        config.write_text('[policy]\nname = "total_requests"\n')
        process.signal(signal.SIGHUP)
        with Asker(process.endpoint) as asker:
            wait_for(lambda: asker.query([keyed("k")]).policy == "total_requests")
        assert wait_for(process.sidecar).pid == sidecar
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert process.record()["signals"] == ["SIGTERM"]


def test_a_sidecar_that_dies_is_started_again(directory: Path) -> None:
    with run(directory, "--on-signal=0") as process:
        before, server = process.both()
        for _ in range(2):
            os.kill(before, signal.SIGKILL)
            sidecar = wait_for(
                lambda before=before: (s := process.sidecar()) and s.pid != before and s
            )
            assert process.answered()
            before = sidecar.pid
        assert process.lines("the sidecar ended with -9")
        assert process.record()["pid"] == server
        assert process.stop() == 0
        assert process.record()["signals"] == ["SIGTERM"]
        assert nothing_left(process)


def test_nothing_is_left_when_run_is_killed(directory: Path) -> None:
    with run(directory, "--on-signal=0") as process:
        sidecar, server = process.both()
        process.kill()
        wait_for(lambda: gone(sidecar) and gone(server))
        wait_for(lambda: nothing_left(process))


def test_a_sidecar_that_cannot_start_stops_nobody(directory: Path) -> None:
    (directory / "q").write_text("precious")
    with run(directory, "--on-signal=5") as process:
        wait_for(process.ready)
        wait_for(lambda: len(process.lines("the sidecar ended with 69")) >= 2)
        assert process.lines("not a socket")
        assert process.ready()
        assert process.stop() == 5
        assert (directory / "q").read_text() == "precious"
        assert nothing_left(process)


def test_stopping_while_the_sidecar_hangs(directory: Path) -> None:
    with run(directory, "--on-signal=0") as process:
        sidecar, _ = process.both()
        os.kill(sidecar, signal.SIGSTOP)
        assert process.stop() == 0
        assert gone(sidecar)


def test_metrics_of_the_sidecar(directory: Path) -> None:
    import urllib.request

    with run(directory, "--on-signal=0") as process:
        process.both()
        url = f"http://127.0.0.1:{process.port}/metrics"

        def queries() -> float | None:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as page:
                return metric(page.read().decode(), "queries_total")

        assert wait_for(queries) >= 1
        assert process.stop() == 0


@pytest.mark.parametrize("rest", [[], ["--"]])
def test_without_arguments_it_is_a_usage_error(directory: Path, rest: list[str]) -> None:
    command = [sys.executable, "-m", "sidecar", "run", f"--endpoint=ipc://{directory}/q", *rest]
    process = Running(command)
    try:
        assert process.wait() == 2
        assert "after --" in process.log()
        assert not list(directory.iterdir())
    finally:
        process.end()
