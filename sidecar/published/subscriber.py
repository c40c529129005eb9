"""The SUB sockets, one a rank: connected, and again whenever the scheduler is back."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import zmq

from sidecar.errors import EndpointError
from sidecar.published.settings import Publisher
from sidecar.published.stat import FRAMES, MAX_STAT_BYTES, TOPIC

Take = Callable[[Publisher, list[bytes], int], None]
"""Given a publisher, the frames of its newest message, and how many came before it."""

AT_ONCE = 32
"""Messages of one rank before the loop looks after queries: a hundred microseconds."""
HIGH_WATER = 128
"""Messages kept a rank while the loop is busy: one to two seconds of a rank in prefill; what is
newer than a full queue is lost until the next."""
RENEW_SECONDS = 5.0
"""Who was silent for so long, five of SGLang's heartbeats, gets a new socket. libzmq never connects
again after a message that was too large, or to a peer that once did not speak ZeroMQ."""
_OPTIONS = {
    zmq.LINGER: 0,
    zmq.RCVHWM: HIGH_WATER,
    zmq.MAXMSGSIZE: MAX_STAT_BYTES,
    # Milliseconds, the first twice as long each time.
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2_000,
}
# As the gate does on our own sockets: a peer that vanished is dropped, and looked for anew.
_TCP_OPTIONS = {zmq.HEARTBEAT_IVL: 5_000, zmq.HEARTBEAT_TIMEOUT: 15_000}

_NOBLOCK = int(zmq.NOBLOCK)


class Subscriber:
    """Reads what `publishers` tell, from a loop that `start` is given."""

    def __init__(self, publishers: Sequence[Publisher], take: Take) -> None:
        self._publishers = publishers
        self._take = take
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        self._heard: set[int] = set()
        """Who told something, or got a new socket, since it was looked after."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connect, and read from now on. Raises EndpointError; nothing is connected then."""
        self._context = zmq.Context()
        # One more than there are: what is closed is gone a moment later.
        self._context.set(zmq.MAX_SOCKETS, 2 * len(self._publishers) + 1)
        try:
            for publisher in self._publishers:
                self._sockets.append(self._connected(self._context, publisher.endpoint))
        except EndpointError:
            self.stop(loop)
            raise
        for index in range(len(self._sockets)):
            self._listen(loop, index)
        self._look_after(loop, 0)

    def stop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read no more; safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for socket in self._sockets:
            self._close(loop, socket)
        self._sockets = []
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _listen(self, loop: asyncio.AbstractEventLoop, index: int) -> None:
        self._heard.add(index)
        loop.add_reader(self._sockets[index].fileno(), self._read, index)
        # The FD is edge-triggered: what came before the reader was added must be asked for.
        loop.call_soon(self._read, index)

    def _look_after(self, loop: asyncio.AbstractEventLoop, index: int) -> None:
        """Give a publisher a new socket if it was silent, and look after the next one soon: not
        after all at once, as queries wait meanwhile."""
        if self._context is None or not self._sockets:
            return
        if index not in self._heard:
            self._renew(loop, self._context, index)
        self._heard.discard(index)
        following = (index + 1) % len(self._sockets)
        pause = RENEW_SECONDS / len(self._sockets)
        self._timer = loop.call_later(pause, self._look_after, loop, following)

    def _renew(
        self, loop: asyncio.AbstractEventLoop, context: "zmq.Context[zmq.Socket[bytes]]", index: int
    ) -> None:
        try:
            renewed = self._connected(context, self._publishers[index].endpoint)
        except EndpointError:
            return  # out of descriptors, say; the next time, then
        self._close(loop, self._sockets[index])
        self._sockets[index] = renewed
        self._listen(loop, index)

    @staticmethod
    def _close(loop: asyncio.AbstractEventLoop, socket: "zmq.Socket[bytes]") -> None:
        with contextlib.suppress(ValueError, OSError, zmq.ZMQError):
            loop.remove_reader(socket.fileno())
        socket.close(linger=0)

    @staticmethod
    def _connected(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
        try:
            socket: zmq.Socket[bytes] = context.socket(zmq.SUB)
        except zmq.ZMQError as error:
            raise EndpointError(f"{endpoint}: {error.strerror}") from None
        options = _OPTIONS
        if endpoint.startswith("tcp://"):
            options = options | _TCP_OPTIONS | {zmq.IPV6: int(endpoint.startswith("tcp://["))}
        try:
            for option, value in options.items():
                socket.setsockopt(option, value)
            socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise EndpointError(f"{endpoint}: {error.strerror}") from None
        return socket

    def _read(self, index: int) -> None:
        """Take the newest of what has come."""
        if index >= len(self._sockets):
            return  # stopped since it was called for
        socket, newest, count = self._sockets[index], None, 0
        try:
            while count < AT_ONCE:
                newest = _receive(socket)
                count += 1
            asyncio.get_running_loop().call_soon(self._read, index)
        except zmq.Again:
            pass
        if newest is not None:
            self._heard.add(index)
            self._take(self._publishers[index], newest, count - 1)


def _receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """The frames of one message. Raises zmq.Again if there is none.

    Of one with more frames than a sound one has, the next call begins with the rest: no message
    takes long, however many it has.
    """
    frames: list[bytes] = []
    more = True
    while more and len(frames) <= FRAMES:
        part = socket.recv(_NOBLOCK, copy=False)
        more = part.more
        frames.append(part.bytes)
    return frames
