"""Faults of the wire: peers of the sidecar that do harm, and one in the sidecar's place."""

import contextlib
import os
import signal
import socket
import time
from functools import partial

from bench.chaos.faults import fault
from bench.chaos.impostor import WAYS
from bench.chaos.limits_side import connections, revive
from bench.chaos.outcome import Bounds
from bench.chaos.rig import Rig
from bench.chaos.sidecar_side import STALE_SECONDS

SILENT = 1000


def _attacked(rig: Rig, seconds: float, name: str) -> float:
    begun = time.monotonic()
    with rig.attack(name):
        time.sleep(seconds)
    ended = revive(rig)
    remote = sum(record.boot != 0 for record in rig.records() if record.at >= begun)
    rig.notes.append(f"{remote} decided remotely meanwhile")
    return ended


for _name, _title, _bounds in (
    ("noise", "random bytes to both sockets", Bounds(waits=6)),
    ("disorder", "valid messages in the wrong order, place and envelope", Bounds(waits=6)),
    ("huge", "messages of 100 MB to both sockets", Bounds(waits=20)),
    ("flood", "queries of a stranger as fast as they are answered", Bounds(waits=20)),
):
    fault(_name, _title, bounds=_bounds)(partial(_attacked, name=_name))


@fault(
    "reports", "10,000 reports/s of ranks and instances that do not exist", bounds=Bounds(waits=20)
)
def reports(rig: Rig, seconds: float) -> float:
    with rig.beside("attacks", "reports", rig.endpoint, rig.cast.instance):
        time.sleep(seconds)
    return revive(rig)


def _silent(rig: Rig, seconds: float, where: str) -> float:
    path = rig.sidecar.path + {"query": "", "report": ".reports", "control": ".control"}[where]
    with connections(path, SILENT) as made:
        rig.notes.append(f"{made} connections made")
        time.sleep(seconds)
    return revive(rig)


for _where in ("query", "report", "control"):
    fault(
        f"silent-{_where}",
        f"1,000 silent connections to the {_where} socket",
        bounds=Bounds(waits=6),
    )(partial(_silent, where=_where))


@fault("silent-http", "1,000 silent connections to HTTP", bounds=Bounds(waits=6))
def silent_http(rig: Rig, seconds: float) -> float:
    with contextlib.ExitStack() as stack:
        for _ in range(SILENT):
            stack.enter_context(socket.create_connection(("127.0.0.1", rig.sidecar.port), 5))
        rig.notes.append(f"{SILENT} connections made")
        time.sleep(seconds)
    return revive(rig)


def _impostor(rig: Rig, seconds: float, way: str) -> float:
    """It takes the sidecar's place, and gives it back."""
    rig.sidecar.kill()
    begun = time.monotonic()
    with rig.beside("impostor", way, rig.sidecar.path):
        time.sleep(seconds)
    asked = [record.cause for record in rig.records() if record.at >= begun]
    rig.notes.append(f"{asked.count('')} decided by it")
    return rig.restart()


# It is asked again and again: late answers close the breaker, until it is held off.
for _way in WAYS:
    fault(
        f"answers-{_way}",
        f"another process answers: {_way.replace('-', ' ')}",
        bounds=Bounds(waits=40, recovery=5.5),
    )(partial(_impostor, way=_way))


@fault(
    "two-controllers",
    "a second controller of the same instance, younger, that goes again",
    bounds=Bounds(waits=40, recovery=1.0 + STALE_SECONDS),
    sidecar_flags=(f"--stale-seconds={STALE_SECONDS}",),
)
def two_controllers(rig: Rig, seconds: float) -> float:
    """The older is refused, and accepted again once the younger has been silent for long."""
    pid = rig.start_controller("younger")
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()
