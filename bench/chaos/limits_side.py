"""Faults of what the sidecar lives on: descriptors, memory, disk, its log, its files."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil

from bench.chaos.disk import fill, small_disk
from bench.chaos.faults import fault
from bench.chaos.outcome import Bounds
from bench.chaos.process import Impossible, SidecarProcess, Stuck, until
from bench.chaos.rig import Rig


@contextlib.contextmanager
def limited(sidecar: SidecarProcess, kind: int, soft: int) -> Iterator[None]:
    """A limit of the running process, within the block."""
    process = psutil.Process(sidecar.pid)
    before = process.rlimit(kind)
    process.rlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(kind, before)


def revive(rig: Rig) -> float:
    """Start the sidecar again if it has died, as a supervisor would; when it could serve."""
    if rig.sidecar.dead:
        rig.notes.append(f"ended with {rig.sidecar.process.returncode}, started again")
        return rig.restart()
    return time.monotonic()


@contextlib.contextmanager
def connections(path: str, count: int) -> Iterator[int]:
    """Connections to a Unix socket that never say anything; how many could be made."""
    with contextlib.ExitStack() as stack:
        for made in range(count):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            try:
                until(partial(_connected, one, path), "room for a connection", 5.0)
            except (OSError, Stuck):
                yield made
                return
        yield count


def _connected(one: socket.socket, path: str) -> bool:
    with contextlib.suppress(BlockingIOError):  # the listener's queue is full
        one.connect(path)
        return True
    return False


@fault("descriptors", "out of file descriptors, and 50 connections more", bounds=Bounds(waits=6))
def descriptors(rig: Rig, seconds: float) -> float:
    in_use = psutil.Process(rig.sidecar.pid).num_fds()
    with (
        limited(rig.sidecar, psutil.RLIMIT_NOFILE, in_use + 2),
        connections(rig.sidecar.path, 50) as made,
    ):
        rig.notes.append(f"{made} connections made")
        time.sleep(seconds)
        return revive(rig)


@fault(
    "memory",
    "memory limit reached (RLIMIT_DATA) while sessions are new",
    bounds=Bounds(waits=20, sidecar_mib=32),
)
def memory(rig: Rig, seconds: float) -> float:
    # Below what it has: from now on it gets nothing from the kernel.
    with limited(rig.sidecar, psutil.RLIMIT_DATA, 1 << 20), rig.attack("grow"):
        time.sleep(seconds)
        if not rig.sidecar.dead:
            refused = rig.sidecar.metric('rejected_messages_total{socket="query",cause="internal"')
            rig.notes.append(f"{refused:.0f} queries refused")
    since = time.monotonic()
    # It may be about to end.
    until(lambda: rig.sidecar.dead or rig.remote_since(since), "an end or a decision")
    return revive(rig)


@contextlib.contextmanager
def small_memory(pid: int, slack: int) -> Iterator[None]:
    """A cgroup (v1) in which the process gets `slack` bytes more. Raises Impossible."""
    group = Path(f"/sys/fs/cgroup/memory/dps-chaos-{pid}")
    try:
        group.mkdir()
    except OSError as error:
        raise Impossible(f"no memory cgroup can be made here: {error.strerror}") from None
    try:
        (group / "memory.limit_in_bytes").write_text(str(slack))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(OSError):
            group.rmdir()


@fault("oom", "killed by the kernel for its memory (cgroup)", bounds=Bounds(waits=6))
def oom(rig: Rig, seconds: float) -> float:
    # What it has already is not charged to the new group, what it touches from now on is.
    with small_memory(rig.sidecar.pid, 1 << 20), rig.attack("grow"):
        until(lambda: rig.sidecar.dead, "the end by the kernel", 20.0)
    return revive(rig)


@fault("disk", "disk of the decision log full", bounds=Bounds(waits=6))
def disk(rig: Rig, seconds: float) -> float:
    stack = contextlib.ExitStack()
    rig.defer(stack.close)
    folder = stack.enter_context(small_disk(rig.folder / "log", 256))
    rig.sidecar.kill()
    rig.restart(f"--decision-log-directory={folder / 'decisions'}")
    rig.wait_remote(time.monotonic())
    ballast = fill(folder)
    until(lambda: dropped(rig) > 0, "decisions that are not in the log")
    time.sleep(seconds)
    rig.notes.append(f"{dropped(rig):.0f} decisions not in the log, and counted")
    ballast.unlink()
    return time.monotonic()


def dropped(rig: Rig) -> float:
    """Decisions that the decision log lacks, as the metric says."""
    return rig.sidecar.metric("decision_log_dropped_total{")


@fault(
    "socket-disk",
    "disk of the socket directory full, sidecar restarted",
    bounds=Bounds(waits=6),
    small_sockets=True,
)
def socket_disk(rig: Rig, seconds: float) -> float:
    rig.sidecar.kill()
    for each in rig.sockets.iterdir():
        each.unlink()
    fill(rig.sockets)
    time.sleep(seconds)
    return rig.restart()


@fault("log", "standard error is a pipe that is full and that nobody reads", bounds=Bounds(waits=6))
def log(rig: Rig, seconds: float) -> None:
    reading, writing = os.pipe()
    rig.defer(lambda: os.close(reading))
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    rig.sidecar.kill()
    rig.start_sidecar("--log-level=debug", wait=False, stderr=writing)
    os.close(writing)
    rig.wait_remote(rig.sidecar.wait_listening())
    with rig.attack("noise"):  # it gives cause to complain
        time.sleep(seconds)


@fault("deleted", "socket files deleted under it, then another hook comes", bounds=Bounds(waits=6))
def deleted(rig: Rig, seconds: float) -> None:
    begun = time.monotonic()
    for suffix in ("", ".reports", ".control", ".lock"):
        os.unlink(rig.sidecar.path + suffix)
    came = rig.start_controller("late", instance="late")
    met = rig.wait_remote(begun, "late")
    rig.notes.append(f"met {met - begun:.2f} s after the deletion")
    os.kill(came, signal.SIGKILL)
    time.sleep(seconds)


@fault(
    "directory",
    "socket directory unreadable (chmod 000), sidecar restarted",
    bounds=Bounds(waits=6),
    obeys_modes=True,
)
def directory(rig: Rig, seconds: float) -> float:
    rig.sockets.chmod(0)
    begun = time.monotonic()
    time.sleep(seconds / 2)
    rig.notes.append(f"decided remotely while unreadable: {rig.remote_since(begun) is not None}")
    rig.sidecar.kill()
    refused = rig.start_sidecar(wait=False)
    until(lambda: refused.dead, "a sidecar that refuses to start")
    rig.notes.append(f"a start meanwhile: exit {refused.process.returncode}")
    time.sleep(seconds / 2)
    rig.sockets.chmod(0o700)
    return rig.restart()
