"""Binding: one sidecar an address, mode 0600, stale files taken over, other people's files kept."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import zmq

from sidecar.curve import ServerKeys
from sidecar.errors import EndpointError
from sidecar.gate import Gate
from sidecar.wire import (
    MAX_MESSAGE_BYTES,
    check_endpoint,
    check_report_endpoint,
    report_endpoint,
)

# Plain integers: pyzmq's enumerations cost a microsecond each time they are looked at.
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


def receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """The frames of one message to a ROUTER. Raises zmq.Again if there is none.

    The first frame, the peer's identity, is always followed by another. A Frame knows whether more
    follow; recv_multipart asks the socket each time, which costs twice as much.
    """
    frames = [socket.recv(_NOBLOCK)]
    more = True
    while more:
        part = socket.recv(_NOBLOCK, copy=False)
        frames.append(part.bytes)
        more = part.more
    return frames


def send(socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
    """Send the frames as one message, without waiting. Raises zmq.ZMQError."""
    for frame in frames[:-1]:
        socket.send(frame, _SNDMORE)
    socket.send(frames[-1], _NOBLOCK)


class Lock:
    """Exclusive use of an ipc path: a second bind would silently steal it (libzmq 2059)."""

    def __init__(self, path: str) -> None:
        self.path = path + ".lock"
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock. Raises EndpointError if another sidecar holds it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise EndpointError(f"{self.path}: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise EndpointError(f"{self.path}: held by another sidecar, pid {holder}") from None
        os.truncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def free(self) -> bool:
        """Whether nobody holds it now; a lock that cannot be looked at counts as free."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def release(self) -> None:
        """Let go; safe to call twice. The file stays: removing it would race with a successor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def prepare_directory(path: str, flag: str = "--endpoint") -> None:
    """Make the directory of a socket, mode 0700, if it is missing. Raises EndpointError.

    flag: what chooses the path.
    """
    directory = Path(path).parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EndpointError(
            f"{directory}: {error.strerror}; the sidecar keeps its sockets there, see {flag}"
        ) from None


def clear_stale(path: str, flag: str = "--endpoint") -> None:
    """Remove the socket file of a dead sidecar. Raises EndpointError for any other file."""
    try:
        mode = os.lstat(path).st_mode
        if not stat.S_ISSOCK(mode):
            raise EndpointError(f"{path}: is not a socket; it is kept, choose another {flag}")
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise EndpointError(f"{path}: {error.strerror}") from None


@contextlib.contextmanager
def private() -> Iterator[None]:
    """A socket file gets mode 0600 when it is made: there is no moment at which it is open."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


class Sockets:
    """The ROUTER for queries and the PULL for load reports.

    reports_tcp: a second address for reports, or empty; keys: with them every tcp:// address is a
    CURVE one. Raises EndpointError for an address that cannot be.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        allow_tcp: bool,
        reports_tcp: str = "",
        keys: ServerKeys | None = None,
    ) -> None:
        allow_tcp = allow_tcp or keys is not None
        self.endpoint = check_endpoint(endpoint, allow_tcp=allow_tcp)
        self.reports_tcp = reports_tcp and check_report_endpoint(reports_tcp, allow_tcp=allow_tcp)
        if reports_tcp and not reports_tcp.startswith("tcp://"):
            raise EndpointError(f"{reports_tcp}: serve.reports_tcp is a tcp:// address, or empty")
        self.context = zmq.Context()
        self.gate = Gate(self.context, keys)
        self.router: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self.pull: zmq.Socket[bytes] = self.context.socket(zmq.PULL)
        self._lock: Lock | None = None
        self._bound: list[str] = []

    def bind(self) -> None:
        """Bind both. Raises EndpointError; nothing stays bound then."""
        self.bind_reports()
        self.bind_queries()

    def bind_reports(self) -> None:
        """Take the lock, and the addresses of load reports. Raises EndpointError as `bind`."""
        for socket in (self.router, self.pull):
            # Enough for the last replies to reach their peers, little enough to exit within 2 s.
            socket.linger = 200
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        path = self.endpoint.removeprefix("ipc://") if self.endpoint.startswith("ipc://") else None
        with self._or_close():
            if path is not None:
                prepare_directory(path)
                self._lock = Lock(path)
                self._lock.acquire()
            self._bind_one(self.pull, report_endpoint(self.endpoint), "report")
            if self.reports_tcp:
                self._bind_one(self.pull, self.reports_tcp, "report")

    def bind_queries(self) -> None:
        """Take the address of queries, after that of reports. Raises EndpointError as `bind`."""
        with self._or_close():
            self._bind_one(self.router, self.endpoint, "query")

    @contextlib.contextmanager
    def _or_close(self) -> Iterator[None]:
        try:
            yield
        except EndpointError:
            self.close()
            raise

    def close(self) -> None:
        """Close sockets, remove their files, release the lock; safe to call twice."""
        self.context.destroy()
        # libzmq leaves the files behind; while the lock is held they cannot be a successor's.
        while self._bound:
            with contextlib.suppress(OSError):
                os.unlink(self._bound.pop())
        if self._lock is not None:
            self._lock.release()

    def _bind_one(self, socket: "zmq.Socket[bytes]", endpoint: str, name: str) -> None:
        path = endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else None
        if path is not None:
            clear_stale(path)
        try:
            if path is None:
                # Options hold for later binds only: an ipc:// address bound before stays open.
                self.gate.guard(socket, name)
                # Not for names: one may have an address of each kind.
                socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))
            with private():
                socket.bind(endpoint)
            if path is not None:
                self._bound.append(path)
        except zmq.ZMQError as error:
            raise EndpointError(f"{endpoint}: {error.strerror}") from None
