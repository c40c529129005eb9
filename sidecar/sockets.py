"""Binding: one sidecar an address, and staying reachable there."""

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import zmq

from sidecar.curve import ServerKeys
from sidecar.errors import EndpointError
from sidecar.files import Lock, clear_stale, identity, prepare_directory, private
from sidecar.gate import HANDSHAKE_MS, Gate
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


class Bound(NamedTuple):
    """A socket file that we have made."""

    path: str
    file: tuple[int, int] | None
    socket: "zmq.Socket[bytes]"
    name: str


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
        self._bound: list[Bound] = []

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
            # Whoever never greets is let go.
            socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            # Beside the mode of the files: by what the kernel says of who connects (SO_PEERCRED).
            for user in {0, os.geteuid()}:
                socket.setsockopt(zmq.IPC_FILTER_UID, user)
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

    def close(self, linger: int | None = None) -> None:
        """Close sockets, remove their files, release the lock; safe to call twice.

        linger: milliseconds for what is not sent yet; None: as set when binding.
        """
        self.context.destroy(linger)
        # libzmq leaves the files behind; while the lock is held they cannot be a successor's.
        while self._bound:
            bound = self._bound.pop()
            if bound.file == identity(bound.path):
                with contextlib.suppress(OSError):
                    os.unlink(bound.path)
        if self._lock is not None:
            self._lock.release()

    def mend(self) -> list[str]:
        """Make the files again that somebody removed; who is connected stays so. Their paths.

        Raises EndpointError if the place is another's by now, or cannot be had.
        """
        if self._lock is not None and self._lock.lost():
            path = self.endpoint.removeprefix("ipc://")
            prepare_directory(path)
            lock = Lock(path)
            lock.acquire()
            self._lock.release()
            self._lock = lock
        taken = [one for one in self._bound if one.file != identity(one.path)]
        for one in taken:
            if identity(one.path) is not None:
                raise EndpointError(
                    f"{one.path}: is no longer our socket, so nobody new reaches us; remove it"
                )
        for one in taken:
            # Beside the listener that lost its file: to stop it would end its connections.
            self._bind_one(one.socket, f"ipc://{one.path}", one.name)
            self._bound.remove(one)
        return [one.path for one in taken]

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
                self._bound.append(Bound(path, identity(path), socket, name))
        except zmq.ZMQError as error:
            raise EndpointError(f"{endpoint}: {error.strerror}") from None
