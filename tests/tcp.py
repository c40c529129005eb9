"""Hooks and sidecars that meet over TCP, with keys."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser, Dispatch
from sglang_hook.reporter import Reporter
from sidecar.curve import ClientKeys, Pair
from sidecar.keygen import keygen
from sidecar.wire import Reply
from tests.processes import Sidecar, Spy, free_port, short_directory, wait_for

RANKS = [0, 1, 2, 3]
LONG_MS = 3000  # for answers that do come


@contextlib.contextmanager
def two_deployments() -> Iterator[Path]:
    """A directory with the keys of ours and of others."""
    with short_directory() as path:
        keygen(str(path / "ours"))
        keygen(str(path / "others"))
        yield path


def flags(keys: Path, whose: str = "ours") -> list[str]:
    return [
        f"--curve-secret-key-file={keys}/{whose}/sidecar.key_secret",
        f"--curve-client-keys-file={keys}/{whose}/hook.key",
    ]


def client_keys(keys: Path, server: str = "ours", own: str = "ours") -> ClientKeys:
    public = (keys / server / "sidecar.key").read_bytes().strip()
    return ClientKeys(Pair((keys / own / "hook.key_secret").read_bytes().strip()), public)


def tcp() -> str:
    """An address whose port and the next are free."""
    return f"tcp://127.0.0.1:{wait_for(_two_ports)}"


def _two_ports() -> int:
    first, second = free_port(), free_port()
    return first if second == first + 1 else 0


class Hook:
    """A controller's end: it asks, and decides by itself where it must."""

    def __init__(self, endpoint: str, keys: ClientKeys | None) -> None:
        self.chooser = Chooser("i", 1, {}, lambda: RANKS, 1000)
        self.client = SidecarClient(endpoint, LONG_MS, 1, 0.001, self.chooser.probe, keys=keys)
        self.client.heard = self.chooser.heard
        self.chooser.ask = self._ask
        self.causes: list[str] = []
        self.spy: Spy | None = None

    def _ask(self, query: bytes, seq: int) -> Reply | str:
        answer = self.client.ask(query, seq)
        if isinstance(answer, str):
            self.causes.append(answer)
        return answer

    def send(self) -> str:
        """Place a request; the cause if it was decided here, else empty."""
        before = len(self.causes)
        rank = self.chooser.choose_one(Dispatch("key", [1, 2, 3], ()))
        assert rank in RANKS
        return self.causes[-1] if len(self.causes) > before else ""

    def meet(self) -> None:
        """Send until the sidecar decides."""
        wait_for(lambda: not self.send())

    def is_kept_out(self) -> None:
        """Send until the hook knows that it is kept out; it waits for nobody and never asks."""
        watched = Spy(self.client._peer.socket())
        self.client._peer._socket = watched  # type: ignore[assignment]
        wait_for(lambda: self.send() == "handshake")
        assert set(self.causes) <= {"unreachable", "handshake"}
        assert self.chooser.bypassed["handshake"] >= 1
        assert watched.waits == watched.sends == 0


@contextlib.contextmanager
def hooked(endpoint: str, keys: ClientKeys | None) -> Iterator[Hook]:
    hook = Hook(endpoint, keys)
    try:
        yield hook
    finally:
        hook.client.close()


@contextlib.contextmanager
def reporting(endpoint: str, keys: ClientKeys | None, rank: int = 3) -> Iterator[Reporter]:
    made = Reporter(endpoint, "i", rank, 0.0, 0.0, keys=keys)
    try:
        yield made
    finally:
        made.close()


def failures(sidecar: Sidecar, **labels: str) -> float:
    return sidecar.metric("handshake_failures_total", **labels) or 0.0
