"""The sidecar's process: started, stopped, killed, looked at."""

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.live.children import die_with_parent
from bench.simulated.launch import free_port
from sidecar.metrics import PREFIX

PATIENCE = 60.0
"""Seconds within which everything here happens, or never."""


class Stuck(RuntimeError):
    """Something that the rig waited for did not happen."""


class Impossible(RuntimeError):
    """This machine, or this user, cannot do the fault."""


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """The first true value of `condition`. Raises Stuck."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Stuck(f"{what}: not within {seconds:g} s")
        time.sleep(0.002)
    return value


def stopped(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


_LIBC = ctypes.CDLL(None)
_PR_CAPBSET_DROP = 24  # linux/prctl.h
_DAC = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH; linux/capability.h


def child(*, obeys_modes: bool = False) -> Callable[[], None]:
    """For `preexec_fn`: ends with us. obeys_modes: the modes of files hold for it, root or not."""

    def prepare() -> None:
        die_with_parent(signal.SIGKILL)
        for capability in _DAC * obeys_modes:
            _LIBC.prctl(_PR_CAPBSET_DROP, capability)

    return prepare


class SidecarProcess:
    """`python -m sidecar serve` at `endpoint`, with HTTP; logs are added to `log`.

    how: more for Popen, such as `env` or `stderr`; `preexec_fn` is needed, see `child`.
    """

    def __init__(self, endpoint: str, log: Path, *flags: str, **how: Any) -> None:
        self.endpoint = endpoint
        self.path = endpoint.removeprefix("ipc://")
        self.log = log
        self.port = free_port()
        command = [sys.executable, "-m", "sidecar", "serve", f"--endpoint={endpoint}"]
        command += [f"--admin-port={self.port}", *flags]
        with log.open("ab") as out:
            settings = {"stdout": out, "stderr": out, "stdin": subprocess.DEVNULL, **how}
            self.process = subprocess.Popen(command, **settings)
        self.pid = self.process.pid

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None

    def listens(self) -> bool:
        """Whether the query socket takes connections."""
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.settimeout(1.0)
            probe.connect(self.path)
            return True
        return False

    def wait_listening(self) -> float:
        """Wait until it takes connections; monotonic seconds of then. Raises Stuck."""
        until(lambda: self.dead or self.listens(), "a sidecar that listens")
        if self.dead:
            raise Stuck(f"the sidecar ended with {self.process.returncode}: {self.tail()}")
        return time.monotonic()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait(PATIENCE)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped by SIGSTOP within the block."""
        self.signal(signal.SIGSTOP)
        try:
            until(lambda: stopped(self.pid), "a stopped process")
            yield
        finally:
            self.signal(signal.SIGCONT)

    def end(self) -> None:
        """End it, whatever state it is in; safe to call twice."""
        if not self.dead:
            self.process.kill()
        self.process.wait(PATIENCE)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def get(self, path: str, timeout: float = 5.0) -> str | None:
        """The body of an answer with status 200; None: there was none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                body = answer.read().decode()
            except (OSError, http.client.HTTPException):
                return None
        return body if answer.status == 200 else None

    def metric(self, beginning: str) -> float:
        """Sum of the samples that begin so, without the common prefix; 0.0 if there is none."""
        lines = (self.get("/metrics") or "").splitlines()
        found = (line for line in lines if line.startswith(PREFIX + beginning))
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def status(self, instance: str) -> dict[str, Any] | None:
        """What /status says of an instance; None: nothing."""
        body = self.get("/status")
        found = [] if body is None else json.loads(body)["instances"]
        return next((one for one in found if one["instance"] == instance), None)


class Weight:
    """Memory and descriptors of some processes together, those that are gone left out."""

    def __init__(self, pids: list[int]) -> None:
        self.rss = self.descriptors = 0
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                self.rss += process.memory_info().rss
                self.descriptors += process.num_fds()


def environment(**more: str) -> dict[str, str]:
    """Ours without any setting of the sidecar's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DP_SIDECAR")}
    return {**kept, **more}
