"""The hook's own Chooser and client while sidecar processes replace one another, under load."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.replace import RANKS, SESSIONS, Traffic, gaps, moved
from sglang_hook.peer import Peer
from tests.processes import (
    PATIENCE,
    Sidecar,
    free_port,
    gone,
    short_directory,
    sidecar_process,
    wait_for,
)

REPLACEMENTS = 4
# A guard that lets nobody go: a session that moves is then the replacement's doing, not that of a
# machine on which reports come late.
STAY = "--kv-affinity-move-tokens=1e9"


@pytest.fixture
def endpoint() -> Iterator[str]:
    with short_directory() as path:
        yield f"ipc://{path}/q"


class Load(Traffic):
    """Requests as fast as they go, until a condition holds."""

    def until(self, condition: Callable[[], Any]) -> Any:
        def step() -> Any:
            for _ in range(10):
                self.request()
                self.report()
            return condition()

        return wait_for(step, PATIENCE * 3, pause=0.0)

    def decided_by_another_than(self, boot: int | None) -> bool:
        return self.decisions[-1].boot not in (None, boot)

    def begin(self) -> None:
        """Meet the sidecar; what it decided before it knew of the load is forgotten."""
        self.meet()
        self.until(self.settled)
        del self.decisions[: -2 * SESSIONS]

    def settled(self) -> bool:
        """Whether the last requests were all decided by one sidecar."""
        last = {decision.boot for decision in self.decisions[-2 * SESSIONS :]}
        return len(last) == 1 and None not in last


def ranks_of(sidecar: Sidecar) -> list[dict[str, Any]]:
    (instance,) = json.loads(sidecar.http("/status")[1])["instances"]
    return list(instance["ranks"])


def exact(sidecar: Sidecar, load: Load) -> bool:
    """Whether it knows of every rank what the hook sent there and what the rank holds."""
    sent, _ = load.chooser.sent.of(range(RANKS))
    load.report()
    return [(r["sent"], r["running"], r["in_flight"]) for r in ranks_of(sidecar)] == [
        (count, load.held, 0) for count in sent
    ]


def test_replaced_again_and_again(endpoint: str) -> None:
    port = f"--admin-port={free_port()}"
    load = Load(endpoint, held=3)
    with sidecar_process(endpoint, port, STAY) as first:
        running = first
        load.begin()
        try:
            for _ in range(REPLACEMENTS):
                boot = load.decisions[-1].boot
                new = Sidecar(endpoint, port, STAY, "--take-over")
                try:
                    load.until(lambda old=running: old.process.poll() is not None)
                    assert running.wait() == 0, running.log()
                    assert running.lines(f"handed over to pid {new.pid}")
                finally:
                    running.end()
                    running = new
                load.until(lambda boot=boot: load.decided_by_another_than(boot))
                load.until(load.settled)
            wait_for(lambda: running.lines("http on"))
            boot = load.decisions[-1].boot
            wait_for(lambda: exact(running, load))
            assert load.decisions[-1].boot == boot
        finally:
            running.end()
            load.close()
    assert None not in {decision.rank for decision in load.decisions}
    assert moved(load.decisions) == 0
    assert len(gaps(load.decisions)) == REPLACEMENTS
    assert set(load.chooser.bypassed) <= {"unreachable", "deadline", "breaker_open"}


def test_sigusr2_under_load(endpoint: str) -> None:
    """The same, by the process itself; the one that takes over is no child of ours."""
    load = Load(endpoint)
    lock = Path(endpoint.removeprefix("ipc://") + ".lock")
    with sidecar_process(endpoint, STAY) as first:
        load.begin()
        boot = load.decisions[-1].boot
        first.signal(signal.SIGUSR2)
        try:
            load.until(lambda: load.decided_by_another_than(boot))
            assert first.wait() == 0
        finally:
            successor = int(lock.read_text())
            load.close()
            if successor != first.pid:
                os.kill(successor, signal.SIGTERM)
                wait_for(lambda: gone(successor))
    assert None not in {decision.rank for decision in load.decisions}
    assert moved(load.decisions) == 0


# ---- the hook's socket, when its connection goes at a bad moment


def test_a_socket_that_failed_to_send_is_made_anew(endpoint: str) -> None:
    """libzmq may send the next message of a REQ socket without its envelope: the answer to that
    would end the connection for good."""
    load = Load(endpoint)
    now = [1000.0]
    peer: Peer = load.client._peer
    peer.clock = lambda: now[0]  # stands still: no socket is made anew because of its age
    try:
        with sidecar_process(endpoint) as sidecar:
            load.begin()
            before = peer.socket()
            sidecar.kill()
            load.until(lambda: load.chooser.bypassed["unreachable"])
            made = peer.socket()
            assert made is not before
            assert before.closed
            # Once is enough: the new one has sent nothing yet.
            for _ in range(100):
                load.request()
            assert peer.socket() is made
        with sidecar_process(endpoint):
            load.until(load.settled)
    finally:
        load.close()
    assert moved(load.decisions) == 0
