"""A ZeroMQ peer that keeps none of the rules: ZMTP 3.0 by hand, rfc.zeromq.org/spec/23."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

MORE, LONG = 1, 2
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def ready(kind: bytes) -> bytes:
    """The command that ends the NULL handshake."""
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return b"\x04" + bytes([len(body)]) + body


def frame(payload: bytes, *, more: bool = False) -> bytes:
    """One frame of a message."""
    if len(payload) < 256:
        return bytes([MORE * more, len(payload)]) + payload
    return bytes([LONG | MORE * more]) + len(payload).to_bytes(8, "big") + payload


def shake_hands(raw: socket.socket, kind: bytes) -> None:
    """Greet whoever is at the other end. kind: the socket type that we claim to be."""
    raw.sendall(GREETING)
    with contextlib.suppress(TimeoutError):
        got = b""
        while len(got) < 64:
            piece = raw.recv(64 - len(got))
            if not piece:
                raise ConnectionResetError("nobody greets")
            got += piece
        raw.sendall(ready(kind))
        raw.recv(4096)


@contextlib.contextmanager
def raw_peer(path: str, kind: bytes, timeout: float = 10.0) -> Iterator[socket.socket]:
    """A connection to the socket at `path`, its handshake done."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(timeout)
        raw.connect(path)
        shake_hands(raw, kind)
        yield raw


class Pourer:
    """Listens, greets as a `kind`, and says `piece` again and again until nobody takes it."""

    def __init__(self, path: Path, kind: bytes, piece: bytes, most: int) -> None:
        self.piece, self.most, self.kind = piece, most, kind
        self.sent = 0
        self.blocked = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(60)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Pourer":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        with self._listener.accept()[0] as raw, contextlib.suppress(OSError):
            raw.settimeout(1.0)
            shake_hands(raw, self.kind)
            while self.sent < self.most:
                raw.sendall(self.piece)
                self.sent += len(self.piece)
        self.blocked.set()
