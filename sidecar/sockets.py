"""Binding: one sidecar an address, mode 0600, stale files taken over, other people's files kept."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket

import zmq

from sidecar.errors import EndpointError
from sidecar.wire import (
    MAX_IPC_PATH_BYTES,
    MAX_MESSAGE_BYTES,
    check_endpoint,
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
    """The ROUTER for queries and the PULL for load reports."""

    def __init__(self, endpoint: str, *, allow_tcp: bool) -> None:
        self.endpoint = check_endpoint(endpoint, allow_tcp=allow_tcp)
        self.context = zmq.Context()
        self.router: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self.pull: zmq.Socket[bytes] = self.context.socket(zmq.PULL)
        self._lock: Lock | None = None
        self._bound: list[str] = []

    def bind(self) -> None:
        """Bind both. Raises EndpointError; nothing stays bound then."""
        for socket in (self.router, self.pull):
            # Enough for the last replies to reach their peers, little enough to exit within 2 s.
            socket.linger = 200
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        path = self.endpoint.removeprefix("ipc://") if self.endpoint.startswith("ipc://") else None
        try:
            if path is not None:
                prepare_directory(path)
                self._lock = Lock(path)
                self._lock.acquire()
            self._bind_one(self.router, self.endpoint)
            self._bind_one(self.pull, report_endpoint(self.endpoint))
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

    def _bind_one(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        path = endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else None
        if path is not None:
            clear_stale(path)
        try:
            with private():
                socket.bind(endpoint)
            if path is not None:
                self._bound.append(path)
        except zmq.ZMQError as error:
            raise EndpointError(f"{endpoint}: {error.strerror}") from None


class Listener:
    """The control socket, a plain one. Its path may be anything that the operator chose, so it has
    a lock of its own, and a socket that somebody listens on is kept, whoever that is."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = Lock(path)
        self._socket: Socket | None = None

    def listen(self) -> Socket:
        """Bind and listen. Raises EndpointError; nothing stays bound then."""
        size = len(os.fsencode(self.path))
        if not self.path.startswith("/") or "\0" in self.path:
            raise EndpointError(f"{self.path!r}: serve.control needs an absolute path")
        if size > MAX_IPC_PATH_BYTES:
            raise EndpointError(
                f"{self.path}: the path has {size} bytes, a Unix socket at most "
                f"{MAX_IPC_PATH_BYTES}; see --control"
            )
        prepare_directory(self.path, "--control")
        self._lock.acquire()
        try:
            refuse_listening(self.path)
            clear_stale(self.path, "--control")
            return self._bind()
        except EndpointError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the file, close the socket, release the lock; safe to call twice."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            self._socket.close()
            self._socket = None
        self._lock.release()

    def _bind(self) -> Socket:
        listener = Socket(AF_UNIX)
        try:
            listener.setblocking(False)
            with private():
                listener.bind(self.path)
            self._socket = listener
            listener.listen()
        except OSError as error:
            listener.close()
            raise EndpointError(f"{self.path}: {error.strerror}") from None
        return listener


def refuse_listening(path: str) -> None:
    """Raise EndpointError if a process listens on the socket at `path`."""
    with Socket(AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return  # nothing there, a dead socket, or a file of another kind: see clear_stale
        except BlockingIOError:
            pass  # its queue of connections is full
        except OSError as error:
            raise EndpointError(f"{path}: {error.strerror}; choose another --control") from None
    raise EndpointError(f"{path}: another process listens there, choose another --control")
