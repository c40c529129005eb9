"""Who reaches the port but has no business there, and a hook that was kept out for long."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from sglang_hook.peer import Peer
from tests.processes import PATIENCE, Asker, sidecar_process, wait_for
from tests.tcp import client_keys, failures, flags, hooked, tcp, two_deployments


@pytest.fixture(scope="module")
def keys() -> Iterator[Path]:
    with two_deployments() as path:
        yield path


def hears_the_end(knocker: socket.socket) -> None:
    """Read until the other end hangs up."""
    knocker.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        while knocker.recv(999):
            pass


def test_whoever_only_knocks(keys: Path) -> None:
    """A port check, somebody who never speaks, and a web client: counted and let go."""
    endpoint = tcp()
    address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
    with sidecar_process(endpoint, *flags(keys)) as sidecar:
        socket.create_connection(address).close()
        wait_for(lambda: failures(sidecar, cause="broken_off"))
        with socket.create_connection(address) as web, socket.create_connection(address) as silent:
            web.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 5)
            hears_the_end(web)
            hears_the_end(silent)
        with hooked(endpoint, client_keys(keys)) as hook:
            hook.meet()


def test_a_crowd_with_unknown_keys(keys: Path) -> None:
    endpoint = tcp()
    with sidecar_process(endpoint, *flags(keys)) as sidecar:
        with contextlib.ExitStack() as stack, hooked(endpoint, client_keys(keys)) as hook:
            context = stack.enter_context(zmq.Context())
            context.linger = 0
            for _ in range(200):
                stranger = stack.enter_context(context.socket(zmq.REQ))
                client_keys(keys, own="others").apply(stranger)
                stranger.connect(endpoint)
            hook.meet()
            wait_for(lambda: failures(sidecar, cause="client_key") >= 200)
            hook.meet()
        assert len(sidecar.lines("serve.curve_client_keys_file")) <= 3


def test_a_hook_that_was_idle_with_wrong_keys_for_hours(keys: Path) -> None:
    """Unread news of failures stop libzmq's thread; the next use must free it, and never hang."""
    endpoint = tcp()
    fast = {int(zmq.RECONNECT_IVL): 1, int(zmq.RECONNECT_IVL_MAX): 1}
    wrong = client_keys(keys, server="others")
    peer = Peer(zmq.REQ, endpoint, fast, keys=wrong, watch=True)
    with sidecar_process(endpoint, *flags(keys)) as sidecar:
        peer.socket()
        wait_for(lambda: failures(sidecar) >= 1001, timeout=60, pause=0.2)
        # In a thread: if it hangs, then in libzmq, where no timeout reaches.
        dropping = threading.Thread(target=peer._drop, daemon=True)
        dropping.start()
        dropping.join(PATIENCE)
        assert not dropping.is_alive()
        peer.keys = client_keys(keys)
        assert peer.socket().poll(10_000, zmq.POLLOUT)
        peer.close()


def test_a_bare_socket_learns_nothing(keys: Path) -> None:
    """Without keys nothing is answered, not even that it was refused."""
    endpoint = tcp()
    with sidecar_process(endpoint, *flags(keys)) as sidecar:
        with Asker(endpoint) as asker:
            asker.send(b"x")
            wait_for(lambda: failures(sidecar, socket="query"))
            assert asker.receive(0.1) is None
        assert not sidecar.metric("rejected_messages_total")
