"""The hook's end of a socket to the sidecar: made lazily in the process that uses it."""

import errno
import logging
import os
import time
from collections.abc import Callable, Mapping

import zmq

from sglang_hook.handshakes import Handshakes
from sidecar import trust
from sidecar.curve import ClientKeys
from sidecar.wire import MAX_MESSAGE_BYTES

logger = logging.getLogger("sglang_hook")

# libzmq gives up an address for good after one protocol error there (a foreign program, an answer
# over the bound): a socket that reached nobody for this long is made anew.
REMAKE_SECONDS = 2.0
# Over TCP, milliseconds. A node that is gone says nothing: the connection to it is given up after
# PING + PONG, and each attempt at a new one after these; the kernel's own bounds are minutes.
PING_MS, PONG_MS, CONNECT_MS, HANDSHAKE_MS = 1_000, 3_000, 1_000, 2_000
# Milliseconds between attempts to connect, the second and all later ones. Over a Unix socket an
# attempt costs microseconds, and how fast a restarted sidecar is found is how fast it decides again
# (sidecar/pump.py waits for it); over TCP it is a packet on the network.
RECONNECT_MS, RECONNECT_IPC_MS, RECONNECT_TCP_MS = 20, 40, 200
_EVENTS, _POLLOUT = int(zmq.EVENTS), int(zmq.POLLOUT)


class Peer:
    """One socket, used from one thread; a forked child makes its own.

    options: socket options beyond those below; clock: monotonic seconds; keys: for a tcp://
    endpoint; watch: tell by `refused` what keeps a tcp:// endpoint from being reached.
    """

    def __init__(
        self,
        kind: int,
        endpoint: str,
        options: Mapping[int, int],
        clock: Callable[[], float] = time.monotonic,
        *,
        keys: ClientKeys | None = None,
        watch: bool = False,
    ) -> None:
        self.kind = kind
        self.endpoint = endpoint
        self.options = options
        self.clock = clock
        self.keys = keys
        self.watch = watch
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._pid = -1
        self._failing_since: float | None = None
        self._fault = ""
        """Why another user could be at the endpoint, as the log was told."""
        self._handshakes: Handshakes | None = None
        self.may_break = False
        """Whether the socket is one that a failed send may leave useless: a REQ that has sent. Seen
        in one reconnect of sixteen: it connects again, and no answer ever comes. Why is inferred
        (a message cut off between its frames, the next one sent without its envelope)."""
        self._refused_at = float("-inf")

    def socket(self) -> "zmq.Socket[bytes]":
        """The connected socket. Raises zmq.ZMQError if it cannot be made."""
        if self._socket is not None and self._pid == os.getpid():
            return self._socket
        self._check_place()
        if self._context is None or self._pid != os.getpid():
            self._context, self._pid = zmq.Context(), os.getpid()
        made = self._context.socket(self.kind)
        # IMMEDIATE: with nobody connected a send fails at once instead of queueing.
        made.setsockopt(zmq.IMMEDIATE, 1)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, self._slowest_ms())
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        for option, value in self.options.items():
            made.setsockopt(option, value)
        if self.endpoint.startswith("tcp://"):
            self._prepare_tcp(made)
        made.connect(self.endpoint)
        self._socket = made
        return made

    def _slowest_ms(self) -> int:
        return RECONNECT_TCP_MS if self.endpoint.startswith("tcp://") else RECONNECT_IPC_MS

    def reachable(self) -> bool:
        """Whether a send would succeed now: somebody is connected, and takes what comes.

        Raises zmq.ZMQError.
        """
        return bool(int(self.socket().get(_EVENTS)) & _POLLOUT)

    def _check_place(self) -> None:
        """Raise zmq.ZMQError where another user may listen at an ipc:// endpoint; told once."""
        local = self.endpoint.startswith("ipc://")
        fault = trust.fault(self.endpoint.removeprefix("ipc://"), meet=True) if local else ""
        told, self._fault = self._fault, fault
        if fault:
            if fault != told:
                logger.error("dp_sidecar: not connected, SGLang goes on without: %s", fault)
            raise zmq.ZMQError(errno.EACCES)

    def _prepare_tcp(self, made: "zmq.Socket[bytes]") -> None:
        for option, value in (
            (zmq.HEARTBEAT_IVL, PING_MS),
            (zmq.HEARTBEAT_TIMEOUT, PONG_MS),
            (zmq.CONNECT_TIMEOUT, CONNECT_MS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.IPV6, int(self.endpoint.startswith("tcp://["))),
        ):
            made.setsockopt(option, value)
        if self.keys is not None:
            self.keys.apply(made)
        if self.watch:
            self._handshakes = Handshakes(made)

    def worked(self) -> None:
        """The peer took or gave something."""
        self._failing_since = None

    def refused(self) -> bool:
        """Whether somebody was connected to lately, but not by a handshake that succeeded.

        Never waits; for when nobody is reached.
        """
        if self._handshakes is not None and self._handshakes.failed():
            self._refused_at = self.clock()
        # After a refused key libzmq tries again only when the socket is made anew.
        return self.clock() - self._refused_at < 2 * REMAKE_SECONDS

    def failed(self, error: zmq.ZMQError) -> None:
        """Nobody took it; drops a socket that is broken, may be, or has failed for long."""
        now = self.clock()
        if self._failing_since is None:
            self._failing_since = now
        long = now - self._failing_since > REMAKE_SECONDS
        if error.errno != zmq.EAGAIN or self.may_break or long:
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
        handshakes, self._handshakes = self._handshakes, None
        self.may_break = False
        # A socket inherited through fork belongs to the parent.
        if socket is not None and self._pid == os.getpid():
            if handshakes is not None:
                handshakes.close()
            socket.close(0)
