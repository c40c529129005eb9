"""Real processes and sockets for the tests: started, waited for by a condition, always ended."""

import contextlib
import ctypes
import http.client
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import zmq
from prometheus_client.parser import text_string_to_metric_families

from sidecar import wire
from sidecar.metrics import PREFIX
from sidecar.wire import RequestFacts
from tests.support import query

ROOT = Path(__file__).parents[1]
PATIENCE = 10.0
"""Longest wait, seconds, for what takes a fraction of it on an idle machine."""
NOBODY = 65534

# Under the range that the kernel takes ports of outgoing connections from.
_ports = itertools.count(20_000 + os.getpid() * 101 % 12_000)


def wait_for(condition: Callable[[], Any], timeout: float = PATIENCE, pause: float = 0.005) -> Any:
    """The first true value of `condition`; AssertionError if there is none in time."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout:g} s"
        time.sleep(pause)


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose name leaves room for a socket's: pytest's own are too long."""
    path = tempfile.mkdtemp(prefix="dps", dir="/tmp")
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def free_port() -> int:
    """A loopback port that nobody listens on."""
    for port in _ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AssertionError("unreachable")


def clean_env(**more: str) -> dict[str, str]:
    """Our environment without any setting of the sidecar's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DP_SIDECAR")}
    return {**kept, **more}


def gone(pid: int) -> bool:
    """Whether the process has ended, buried or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def mentioning(text: str) -> list[psutil.Process]:
    """Living processes whose command line holds `text`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if text in " ".join(process.cmdline()) and not gone(process.pid):
                found.append(process)
    return found


# What a peer says that speaks ZeroMQ with a security mechanism of another name, and what one says
# that speaks something else.
FOREIGN_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"BOGUS".ljust(20, b"\0") + bytes(32)
FOREIGN_TEXT = b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with_parent() -> None:
    """Ask the kernel for a SIGKILL when pytest itself is killed: no `finally` runs then."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Running:
    """A process of ours, its output and its end."""

    def __init__(
        self, command: Sequence[str], *, env: dict[str, str] | None = None, **popen: Any
    ) -> None:
        self.output = tempfile.NamedTemporaryFile(prefix="dps", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            cwd="/",  # not the checkout: it would hide the installed package
            env=clean_env() if env is None else env,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no lock
            **popen,
        )
        self.pid = self.process.pid

    def log(self) -> str:
        return Path(self.output.name).read_text(errors="replace")

    def lines(self, *parts: str) -> list[str]:
        """Lines of the log that hold every part."""
        return [line for line in self.log().splitlines() if all(part in line for part in parts)]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit code; AssertionError with the log if it does not end."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end within {timeout:g} s:\n{self.log()}") from None

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.signal(signal.SIGSTOP)
        wait_for(lambda: is_stopped(self.pid))

    def end(self) -> None:
        """End it and all it started, whatever state they are in; safe to call twice."""
        family = []
        if self.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(self.pid).children(recursive=True)
            self.process.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait(PATIENCE)
        self.output.close()


@contextlib.contextmanager
def running(command: Sequence[str], **popen: Any) -> Iterator[Running]:
    """A process that ends with the block."""
    process = Running(command, **popen)
    try:
        yield process
    finally:
        process.end()


class Sidecar(Running):
    """`python -m sidecar serve` at `endpoint`; `port` is None without HTTP."""

    def __init__(
        self, endpoint: str, *flags: str, config: Path | None = None, **popen: Any
    ) -> None:
        self.endpoint = endpoint
        self.path = Path(endpoint.removeprefix("ipc://"))
        self.port: int | None = free_port()
        self.control_elsewhere = any(flag.startswith("--control") for flag in flags)
        for flag in flags:
            if flag.startswith("--admin-port="):
                self.port = int(flag.partition("=")[2]) or None
        command = [sys.executable, "-m", "sidecar", "serve", f"--endpoint={endpoint}"]
        command += [f"--admin-port={self.port or 0}", *flags]
        command += [f"--config={config}"] if config else []
        super().__init__(command, **popen)

    def http(self, path: str) -> tuple[int, str]:
        """Status and text of a GET."""
        assert self.port
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def metric(self, name: str, **labels: str) -> float | None:
        """Sum of the samples of that name (without our prefix) with these labels; None: none."""
        status, text = self.http("/metrics")
        assert status == 200
        return metric(text, name, **labels)

    def wait_ready(self) -> None:
        """Wait for /readyz, or without HTTP for an answer."""
        wait_for(self._ready)

    def _controllable(self) -> bool:
        """Whether the control socket is there, if it is at its usual place."""
        elsewhere = not self.endpoint.startswith("ipc://") or self.control_elsewhere
        there = Path(f"{self.path}.control").exists()
        return elsewhere or there or bool(self.lines("no control socket"))

    def _ready(self) -> bool:
        code = self.process.poll()
        assert code is None, f"ended with {code}:\n{self.log()}"
        if self.port is None:
            with Asker(self.endpoint) as asker:
                asker.send(b"ready?")
                return asker.receive(0.2) is not None and self._controllable()
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.http("/readyz")[0] == 200
        return False


def metric(text: str, name: str, **labels: str) -> float | None:
    """Sum of the samples of that name (without our prefix) with these labels; None: none."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
    ]
    return sum(found) if found else None


@contextlib.contextmanager
def sidecar_process(
    endpoint: str, *flags: str, config: Path | None = None, ready: bool = True, **popen: Any
) -> Iterator[Sidecar]:
    """A sidecar that is ready, unless told not to wait, and that ends with the block."""
    sidecar = Sidecar(endpoint, *flags, config=config, **popen)
    try:
        if ready:
            sidecar.wait_ready()
        yield sidecar
    finally:
        sidecar.end()


class Asker:
    """A bare client: a REQ socket, or any other kind, without the hook's care."""

    def __init__(self, endpoint: str, kind: int = zmq.REQ, **options: int) -> None:
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(kind)
        self.socket.linger = 0
        if kind == zmq.REQ:
            self.socket.setsockopt(zmq.REQ_RELAXED, 1)
            self.socket.setsockopt(zmq.REQ_CORRELATE, 1)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(endpoint)

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close(0)
        self.context.term()

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, timeout: float = PATIENCE) -> list[bytes] | None:
        """The next message, or None."""
        return self.socket.recv_multipart() if self.socket.poll(timeout * 1000) else None

    def ask(self, *frames: bytes) -> wire.Reply | wire.Refusal:
        """The answer to any bytes; AssertionError if there is none."""
        self.send(*frames)
        answer = self.receive()
        assert answer is not None, "no answer"
        return wire.decode_answer(answer[-1])

    def query(self, requests: Iterable[RequestFacts] = (), **changes: Any) -> Any:
        """The answer to a query of `support.query`."""
        return self.ask(wire.encode(query(requests, **changes)))


class Spy:
    """Stands before a zmq socket and notes what is done to it."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self.sends = 0
        self.waits = 0
        """Calls that may block."""

    def send(self, data: bytes, flags: int = 0) -> None:
        self.waits += not flags & zmq.NOBLOCK
        self.socket.send(data, flags)
        self.sends += 1

    def recv(self, flags: int = 0) -> bytes:
        self.waits += not flags & zmq.NOBLOCK
        return self.socket.recv(flags)

    def poll(self, timeout: int | None = None, flags: int = zmq.POLLIN) -> int:
        self.waits += timeout != 0
        return self.socket.poll(timeout, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def in_fork(
    task: Callable[[], Any],
    meanwhile: Callable[[], Any] = lambda: None,
    timeout: float = PATIENCE,
) -> str:
    """`str(task())` of a forked child, which has so long to return; `meanwhile` runs here."""
    import warnings

    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads: ZeroMQ's are what these tests are about.
        warnings.simplefilter("ignore")
        pid = os.fork()
        if pid == 0:
            text = "no result"
            try:
                text = str(task())
            except BaseException as error:  # noqa: BLE001 - the parent reads it
                text = repr(error)
            finally:
                os.write(sending, text.encode()[:4000])
                os._exit(0)
    os.close(sending)
    try:
        meanwhile()
        wait_for(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, timeout)
        with os.fdopen(receiving) as pipe:
            return pipe.read()
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
