"""The sidecar's TCP side: who may connect (CURVE, ZAP), who is gone, which handshakes failed.

ZAP is libzmq's way to ask the application about a client's key, rfc.zeromq.org/spec/27: a request
over inproc for each handshake. It is answered from the server's loop, between queries; who is not
answered yet waits in the handshake and costs nobody anything.
"""

import asyncio
from collections.abc import Callable

import zmq

from sidecar.curve import ServerKeys

# Messages of one kind before the loop looks after queries again: some 20 us each.
BURST = 32
# Milliseconds. A peer whose node is gone is let go after PING + PONG; 320 ranks make 64 pings a
# second. A handshake takes one or two round trips.
PING_MS, PONG_MS, HANDSHAKE_MS = 5_000, 10_000, 5_000
ZAP_ADDRESS = "inproc://zeromq.zap.01"
CAUSES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "client_key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "broken_off",
}
_EXPLAINED = {
    "client_key": "its key is not in serve.curve_client_keys_file",
    "protocol": "it has another key for this sidecar, or only one of the two has keys",
    "broken_off": "it left or fell silent: a port check, or no client of ours",
}
_NOBLOCK = int(zmq.NOBLOCK)
Serve = Callable[[list[bytes]], None]


class Gate:
    """Guards the TCP addresses of a context.

    failed: told the socket's name, the cause (of CAUSES) and an explanation of each handshake that
    failed.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: ServerKeys | None) -> None:
        self.context = context
        self.keys = keys
        self.failed: Callable[[str, str, str], None] = lambda socket, cause, text: None
        self._zap: zmq.Socket[bytes] | None = None
        self._guarding: list[tuple[zmq.Socket[bytes], Serve]] = []
        """Made, and not yet watched."""
        self._watched: list[tuple[zmq.Socket[bytes], Serve]] = []
        self._refused = ""
        """Address of the client whose key was refused last."""
        self._guarded: set[str] = set()

    def guard(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        """Set what each address that `socket` binds from now on has. Raises zmq.ZMQError."""
        if name in self._guarded:
            return
        self._guarded.add(name)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PONG_MS)
        if self.keys is not None:
            self._open_zap()
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.own.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, name.encode())
            # Nobody gets in because nobody could be asked.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        # libzmq's network thread waits for the reader of these events once 2,000 are unread: the
        # loop takes them in as they come.
        monitor = socket.get_monitor_socket(sum(CAUSES))
        self._guarding.append((monitor, lambda frames: self._on_event(name, frames)))

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer and count from `loop`, for the addresses guarded since the last call."""
        self._watched += self._guarding
        served, self._guarding = self._guarding, []
        for socket, serve in served:
            loop.add_reader(socket.fileno(), self._turn, loop, socket, serve)
            # The FD is edge-triggered: what came before the reader was added must be asked for.
            loop.call_soon(self._turn, loop, socket, serve)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop it; to be called before the context is destroyed."""
        for socket, _ in self._watched:
            if not socket.closed:
                loop.remove_reader(socket.fileno())

    def _open_zap(self) -> None:
        if self._zap is None:
            self._zap = self.context.socket(zmq.REP)
            self._zap.bind(ZAP_ADDRESS)
            self._guarding.append((self._zap, self._on_zap))

    def _turn(
        self, loop: asyncio.AbstractEventLoop, socket: "zmq.Socket[bytes]", do: Serve
    ) -> None:
        for _ in range(BURST):
            if socket.closed:
                return
            try:
                do(socket.recv_multipart(_NOBLOCK))
            except zmq.Again:
                return
        loop.call_soon(self._turn, loop, socket, do)

    def _on_zap(self, frames: list[bytes]) -> None:
        """[version, request, domain, address, identity, mechanism, raw public key] -> verdict."""
        if self._zap is None or self.keys is None or len(frames) < 2:
            return
        known = len(frames) == 7 and frames[5] == b"CURVE" and frames[6] in self.keys.clients
        if not known and len(frames) > 3:
            self._refused = frames[3].decode(errors="replace")
        verdict = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._zap.send_multipart([frames[0], frames[1], *verdict, b"", b""], _NOBLOCK)

    def _on_event(self, name: str, frames: list[bytes]) -> None:
        cause = CAUSES.get(int.from_bytes(frames[0][:2], "little"), "broken_off")
        whose = f" of {self._refused}" if cause == "client_key" and self._refused else ""
        self.failed(name, cause, f"a handshake{whose} failed: {_EXPLAINED[cause]}")
