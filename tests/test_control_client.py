"""The client of the control socket, where no sidecar answers, or somebody else does."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from sidecar.control import Control
from sidecar.errors import ControlError, RefusedError
from sidecar.listener import control_path
from tests.processes import short_directory


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as directory:
        yield f"{directory}/q.control"


@pytest.mark.parametrize(
    ("endpoint", "given", "path"),
    [
        ("ipc:///run/q", "", "/run/q.control"),
        ("ipc:///run/q", "/x", "/x"),
        ("tcp://127.0.0.1:9000", "", ""),
        ("tcp://127.0.0.1:9000", "/x", "/x"),
    ],
)
def test_where_the_socket_is(endpoint: str, given: str, path: str) -> None:
    assert control_path(endpoint, given) == path


def test_nobody_listens(path: str) -> None:
    with pytest.raises(ControlError, match="no sidecar listens"):
        Control(path).show()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with pytest.raises(ControlError, match="no sidecar listens"):
        Control(path).set_policy("round_robin")
    for wrong in ("/" + "x" * 200, "\0", "/a\0b"):
        with pytest.raises(ControlError):
            Control(wrong).show()


STRANGERS = {
    "text": b"hello\r\n\r\n",
    "nothing": b"",
    "half": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{",
    "other JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
    "no error": b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\n{}",
    "error": b'HTTP/1.1 500 No\r\nContent-Length: 14\r\n\r\n{"error": "no"}',
    "utf8": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xff",
    "long": b"HTTP/1.1 200 " + b"x" * 70_000,
}


@pytest.mark.parametrize("case", STRANGERS)
def test_a_stranger_answers(path: str, case: str) -> None:
    def answer() -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            peer.recv(1 << 16)
            peer.sendall(STRANGERS[case])

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ControlError, match=path) as caught:
            Control(path).show()
        thread.join()
    assert not isinstance(caught.value, RefusedError)


def test_a_peer_that_is_silent(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(ControlError, match="no answer within"):
            Control(path, timeout=0.01).show()
        with pytest.raises(ControlError, match="it may still be done"):
            Control(path, timeout=0.01).set_policy("round_robin")
