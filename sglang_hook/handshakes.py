"""Which handshakes of a socket failed, as libzmq tells; looked at while nobody is reached."""

import zmq

_EVENTS = int(
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_NOBLOCK = int(zmq.NOBLOCK)


class Handshakes:
    """The monitor of one socket, to be made before it connects.

    libzmq's network thread, which serves this socket only, stops while 1,000 events are unread, and
    goes on when they are read. That takes minutes without any use of the socket, since a handshake
    fails five times a second at most.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._events: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 1)
        self._events.setsockopt(zmq.LINGER, 0)
        address = f"inproc://handshakes-{id(self._events)}"
        socket.monitor(address, _EVENTS)
        self._events.connect(address)

    def failed(self) -> bool:
        """Whether any failed since the last look; reads all there is, at most some 3 ms of it."""
        found = False
        try:
            while True:
                self._events.recv(_NOBLOCK)
                found = True
        except zmq.ZMQError:  # nothing more
            return found

    def close(self) -> None:
        """Stop it, before its socket is closed."""
        # First: to stop it waits for the network thread, which must not wait for us.
        self.failed()
        self._socket.disable_monitor()
        self._events.close(0)
