"""deploy/systemd: read by systemd's own tools, and its filter laid on a real sidecar."""

import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar import config
from sidecar.cli import parser
from tests.deploy.unit import DROP_IN, SERVICE, SYSTEMD, allowed_calls, analyze, settings
from tests.processes import (
    PATIENCE,
    Running,
    Sidecar,
    clean_env,
    free_port,
    short_directory,
    wait_for,
)

MOST_EXPOSURE = 1.1
"""systemd 252 says 1.0 on a scale from 0 (sealed) to 10; 0.5 of it is the network."""


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Our units, and a sglang.service, where every program that they start exists."""
    shutil.copytree(SYSTEMD, tmp_path, dirs_exist_ok=True)
    text = SERVICE.read_text()
    program = settings(SERVICE)["ExecStart"][0].split()[0]
    (tmp_path / SERVICE.name).write_text(text.replace(program, shutil.which("true") or ""))
    (tmp_path / "sglang.service").write_text("[Service]\nUser=sglang\nExecStart=/bin/true\n")
    return tmp_path


@pytest.mark.parametrize("unit", [SERVICE.name, "sglang.service"])
def test_systemd_finds_no_fault(units: Path, unit: str) -> None:
    result = analyze(
        "verify", "--man=no", str(units / unit), env={"SYSTEMD_UNIT_PATH": f"{units}:"}
    )
    # A machine may have faulty units of its own.
    lines = (result.stdout + result.stderr).splitlines()
    assert not [line for line in lines if "sglang" in line or str(units) in line]
    assert result.returncode == 0


def test_a_fault_would_be_found(units: Path) -> None:
    unit = units / SERVICE.name
    unit.write_text(unit.read_text().replace("[Service]", "[Service]\nNoSuchKey=yes"))
    result = analyze("verify", "--man=no", str(unit))
    assert "NoSuchKey" in result.stderr


def test_exposure_is_low() -> None:
    result = analyze(
        "security",
        "--offline=yes",
        "--no-pager",
        f"--threshold={MOST_EXPOSURE * 10:g}",
        str(SERVICE),
    )
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", result.stdout)
    assert exposure, result.stdout + result.stderr
    assert result.returncode == 0
    assert float(exposure[1]) <= MOST_EXPOSURE


def test_sglang_wants_it_and_never_requires_it() -> None:
    drop_in = settings(DROP_IN)
    assert drop_in["Wants"] == [SERVICE.name]
    assert drop_in["After"] == [SERVICE.name]
    assert not {"Requires", "BindsTo", "Requisite", "PartOf"} & {*drop_in, *settings(SERVICE)}
    assert "Restart=always" in SERVICE.read_text().splitlines()


def test_both_sides_mean_the_same_socket() -> None:
    default = config.Config().serve.endpoint
    assert settings(DROP_IN)["Environment"] == [f"DP_SIDECAR_ENDPOINT={default}"]
    unit = settings(SERVICE)
    directory = Path(default.removeprefix("ipc://")).parent
    assert directory == Path("/run") / unit["RuntimeDirectory"][0]
    assert unit["RuntimeDirectoryMode"] == ["0700"]


def test_the_command_line_is_one_that_we_have() -> None:
    program, *arguments = settings(SERVICE)["ExecStart"][0].split()
    assert Path(program).name == "sglang-dp-sidecar"
    assert vars(parser().parse_args(arguments))["verb"] == "serve"


def test_reload_and_stop_fit_the_sidecar() -> None:
    unit = settings(SERVICE)
    assert unit["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert float(unit["TimeoutStopSec"][0]) > config.Config().serve.drain_seconds


def test_systemd_follows_a_successor() -> None:
    unit = settings(SERVICE)
    # The old process names the new one; nobody else in the unit may speak for it.
    assert (unit["Type"], unit["NotifyAccess"]) == (["notify"], ["main"])


class Sandboxed(Sidecar):
    """A sidecar under the unit's system call filter, without any capability."""

    def __init__(self, endpoint: str, calls: set[str], **env: str) -> None:
        self.endpoint, self.path = endpoint, Path(endpoint.removeprefix("ipc://"))
        self.port = free_port()
        serve = [sys.executable, "-m", "sidecar", "serve"]
        serve += [f"--endpoint={endpoint}", f"--admin-port={self.port}"]
        sandbox = [sys.executable, "-m", "tests.deploy.sandbox", ",".join(sorted(calls))]
        Running.__init__(self, sandbox + serve, env=clean_env(**env))


def test_it_serves_reloads_and_stops_under_its_filter() -> None:
    calls = allowed_calls(SERVICE)
    assert {"read", "execve"} <= calls
    assert not {"mount", "ptrace", "reboot", "setpriority", "bpf"} & calls
    with short_directory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(f"{directory}/notify")
        told.settimeout(PATIENCE)
        sidecar = Sandboxed(f"ipc://{directory}/q", calls, NOTIFY_SOCKET=f"{directory}/notify")
        try:
            assert f"READY=1\nMAINPID={sidecar.pid}" in told.recv(1024).decode()
            sidecar.wait_ready()
            status = Path(f"/proc/{sidecar.pid}/status").read_text()
            assert re.search(r"Seccomp:\t2\n", status)
            assert re.search(r"CapEff:\t0+\n", status)
            show = [sys.executable, "-m", "sidecar", "policy", "show"]
            subprocess.run(
                [*show, f"--endpoint={sidecar.endpoint}"], check=True, capture_output=True
            )
            sidecar.signal(signal.SIGHUP)
            wait_for(lambda: sidecar.lines("reloaded"))
            assert sidecar.metric("last_reload_successful") == 1
            assert sidecar.stop() == 0, sidecar.log()
        finally:
            sidecar.end()


def test_the_filter_of_that_test_bites() -> None:
    calls = allowed_calls(SERVICE) - {"sched_setscheduler"}
    with short_directory() as directory:
        sidecar = Sandboxed(f"ipc://{directory}/q", calls)
        try:
            assert sidecar.wait() != 0
        finally:
            sidecar.end()
