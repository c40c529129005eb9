"""The hook's end of a socket to the sidecar: made lazily in the process that uses it."""

import os
import time
from collections.abc import Callable, Mapping

import zmq

from sidecar.wire import MAX_MESSAGE_BYTES

# libzmq gives up an address for good after one protocol error there (a foreign program, an answer
# over the bound): a socket that reached nobody for this long is made anew.
REMAKE_SECONDS = 2.0


class Peer:
    """One socket, used from one thread; a forked child makes its own.

    options: socket options beyond those below; clock: monotonic seconds.
    """

    def __init__(
        self,
        kind: int,
        endpoint: str,
        options: Mapping[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self.endpoint = endpoint
        self.options = options
        self.clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._pid = -1
        self._failing_since: float | None = None

    def socket(self) -> "zmq.Socket[bytes]":
        """The connected socket. Raises zmq.ZMQError if it cannot be made."""
        if self._socket is not None and self._pid == os.getpid():
            return self._socket
        if self._context is None or self._pid != os.getpid():
            self._context, self._pid = zmq.Context(), os.getpid()
        made = self._context.socket(self.kind)
        # IMMEDIATE: with nobody connected a send fails at once instead of queueing.
        made.setsockopt(zmq.IMMEDIATE, 1)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, 20)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        for option, value in self.options.items():
            made.setsockopt(option, value)
        made.connect(self.endpoint)
        self._socket = made
        return made

    def worked(self) -> None:
        """The peer took or gave something."""
        self._failing_since = None

    def failed(self, error: zmq.ZMQError) -> None:
        """Nobody took it; drops a socket that is broken or has failed for long."""
        now = self.clock()
        if self._failing_since is None:
            self._failing_since = now
        if error.errno != zmq.EAGAIN or now - self._failing_since > REMAKE_SECONDS:
            self._failing_since = None
            self._drop()

    def close(self) -> None:
        """Let go of everything; the next use makes it anew."""
        self._drop()
        context, self._context = self._context, None
        if context is not None and self._pid == os.getpid():
            context.destroy(linger=0)

    def _drop(self) -> None:
        socket, self._socket = self._socket, None
        # A socket inherited through fork belongs to the parent.
        if socket is not None and self._pid == os.getpid():
            socket.close(0)
