"""Other users of the machine: real processes of another user, on sockets that somebody opened."""

import contextlib
import logging
import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from sglang_hook.peer import Peer
from sidecar import trust, wire
from sidecar.control import Control
from sidecar.errors import ControlError
from tests.processes import (
    NOBODY,
    Asker,
    in_fork,
    short_directory,
    sidecar_process,
    wait_for,
)
from tests.support import keyed, query, report

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
NO_HTTP = "--admin-port=0"


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def endpoint(directory: Path) -> str:
    return f"ipc://{directory}/q"


def as_nobody(task: Callable[[], Any]) -> str:
    """What `task` gives in a process of another user."""

    def become() -> Any:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        return task()

    return in_fork(become)


def opened(directory: Path) -> None:
    """What no sidecar does: every socket is open to everybody."""
    directory.chmod(0o755)
    for path in directory.iterdir():
        if stat.S_ISSOCK(path.stat().st_mode):
            path.chmod(0o666)


# ---- at the sidecar's sockets


@as_root
def test_a_socket_of_mode_0600_keeps_another_user_out(directory: Path, endpoint: str) -> None:
    with sidecar_process(endpoint, NO_HTTP):
        directory.chmod(0o755)
        for suffix in ("", ".reports", ".control"):

            def connect(path: str = f"{directory}/q{suffix}") -> str:
                with contextlib.closing(socket.socket(socket.AF_UNIX)) as raw:
                    raw.connect(path)
                return "connected"

            assert "PermissionError" in as_nobody(connect)


@as_root
def test_the_control_socket_asks_the_kernel_who_comes(directory: Path, endpoint: str) -> None:
    path = f"{directory}/q.control"

    def order() -> str:
        with pytest.raises(ControlError) as shown:
            Control(path).show()
        with pytest.raises(ControlError) as changed:
            Control(path).set_policy("round_robin")
        return f"{shown.value}; {changed.value}"

    with sidecar_process(endpoint, NO_HTTP) as sidecar:
        wait_for(lambda: sidecar.lines("control on"))
        opened(directory)
        told = as_nobody(order)
        assert told.count(f"HTTP status 403: user {NOBODY} may not, only user 0 may") == 2, told
        assert Control(path).show().name == "kv_affinity"
        assert sidecar.lines("WARNING", f"user {NOBODY} was refused")


@as_root
def test_the_query_socket_does_so_too(directory: Path, endpoint: str) -> None:
    def ask() -> str:
        with Asker(endpoint) as asker:
            asker.send(wire.encode(query([keyed("k")])))
            return str(asker.receive(1.0))

    with sidecar_process(endpoint, NO_HTTP):
        opened(directory)
        assert as_nobody(ask) == "None"
        with Asker(endpoint) as asker:
            assert len(asker.query([keyed("k")]).ranks) == 1


@as_root
def test_the_report_socket_does_so_too(directory: Path, endpoint: str) -> None:
    def push(running: int) -> str:
        with Asker(endpoint + ".reports", zmq.PUSH, IMMEDIATE=1, SNDTIMEO=1000) as asker:
            asker.send(wire.encode(report(1, seq=running, running=running)))
            asker.socket.close(1000)
        return "sent"

    with sidecar_process(endpoint) as sidecar:
        opened(directory)
        assert as_nobody(lambda: push(77)) != "sent"
        assert push(5) == "sent"
        wait_for(lambda: sidecar.metric("running_requests", dp_rank="1") == 5)
        assert sidecar.metric("load_reports_total") == 1


# ---- directories


def refused(endpoint: str) -> str:
    with sidecar_process(endpoint, NO_HTTP, ready=False) as sidecar:
        assert sidecar.wait() == 69, sidecar.log()
        return sidecar.log()


@pytest.mark.parametrize("mode", [0o703, 0o2777])
def test_a_directory_that_all_may_write_to_is_refused(directory: Path, mode: int) -> None:
    place = directory / "open"
    place.mkdir()
    place.chmod(mode)
    log = refused(f"ipc://{place}/q")
    assert f"mode {mode:04o}, any user can put another socket there; chmod 700" in log
    assert "Traceback" not in log
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o2770, 0o1777])
def test_these_directories_serve(directory: Path, mode: int) -> None:
    """Readable; a group's, as the operator chose; sticky, as /tmp is."""
    place = directory / "place"
    place.mkdir()
    place.chmod(mode)
    with sidecar_process(f"ipc://{place}/q", NO_HTTP) as sidecar, Asker(sidecar.endpoint) as asker:
        assert len(asker.query([keyed("k")]).ranks) == 1
        with contextlib.closing(Peer(zmq.REQ, sidecar.endpoint, {})) as peer:
            assert peer.socket().poll(5000, zmq.POLLOUT)


def test_a_control_socket_is_not_put_there_either(directory: Path, endpoint: str) -> None:
    place = directory / "open"
    place.mkdir()
    place.chmod(0o777)
    with sidecar_process(endpoint, NO_HTTP, f"--control={place}/c") as sidecar:
        wait_for(lambda: sidecar.lines("WARNING", "no control socket", "any user can put"))


@as_root
def test_what_kubernetes_mounts_serves(directory: Path) -> None:
    """An emptyDir is root's, mode 0777, and nobody's but the pod's."""
    volume = directory / "volume"
    volume.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "mode=0777,size=1m", "none", str(volume)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with sidecar_process(f"ipc://{volume}/q", NO_HTTP) as sidecar:
            with Asker(sidecar.endpoint) as asker:
                assert len(asker.query([keyed("k")]).ranks) == 1
            assert trust.fault(f"{volume}/q", meet=True) == ""
    finally:
        subprocess.run(["umount", "-l", str(volume)], check=True)


def test_the_rule(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{directory}/q"
    assert trust.fault(path) == trust.fault(path, meet=True) == ""
    assert trust.fault("/nonexistent/q", meet=True) == "", "nobody can be there"
    directory.chmod(0o777)
    assert "mode 0777" in trust.fault(path) and "mode 0777" in trust.fault(path, meet=True)
    monkeypatch.setattr(os.path, "ismount", lambda name: True)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert bool(trust.fault(path)) is (os.getuid() != 0), "a mount point of root's"
    directory.chmod(0o1777)
    assert trust.fault(path, meet=True) == "", "nobody is there yet"
    Path(path).touch()
    assert trust.fault(path) == ""
    assert bool(trust.fault(path, meet=True)) is (os.getuid() not in (0, 4711))


# ---- at the hook


def connects(peer: Peer, timeout: int = 5000) -> bool:
    """Whether the socket reaches anybody."""
    try:
        return bool(peer.socket().poll(timeout, zmq.POLLOUT))
    except zmq.ZMQError as error:
        peer.failed(error)
        return False


def impostor(endpoint: str) -> str:
    """Bind there as another user, open to all; the file stays."""

    def bind() -> str:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as raw:
            raw.bind(endpoint.removeprefix("ipc://"))
            os.chmod(endpoint.removeprefix("ipc://"), 0o666)
        return "bound"

    return as_nobody(bind)


@as_root
def test_the_hook_connects_to_no_socket_of_another_user(
    directory: Path, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory.chmod(0o1777)
    assert impostor(endpoint) == "bound"
    peer = Peer(zmq.REQ, endpoint, {})
    with contextlib.closing(peer), caplog.at_level(logging.INFO):
        assert not any(connects(peer, 0) for _ in range(50))
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 1, "one line, however often it is tried"
        assert f"{directory}/q: belongs to user {NOBODY}" in told[0]
        assert told[0].startswith("dp_sidecar: ")
        (directory / "q").unlink()
        with sidecar_process(endpoint, NO_HTTP):
            wait_for(lambda: connects(peer))
    assert len(caplog.records) == 1


def test_nor_in_a_directory_that_all_may_write_to(
    directory: Path, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Peer(zmq.REQ, endpoint, {})
    with contextlib.closing(peer), sidecar_process(endpoint, NO_HTTP):
        directory.chmod(0o777)
        assert not connects(peer, 0)
        assert "any user can put another socket there" in caplog.text
        directory.chmod(0o700)
        assert connects(peer)
