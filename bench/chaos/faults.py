"""What a fault is, the list of all, and how one is run under load."""

import os
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from bench.chaos.outcome import Bounds, Outcome, figures, growth, moves
from bench.chaos.process import Stuck
from bench.chaos.rig import Rig

SETTLE = 0.5
"""Seconds of load before a fault, and after its recovery."""

Run = Callable[[Rig, float], float | None]
"""Does the fault, for about so many seconds; returns when (monotonic seconds) it was over, or None:
now. The sidecar is able to serve again by then."""


class Fault(Struct, frozen=True):
    """One row of the table."""

    name: str
    title: str
    run: Run
    seconds: float
    """As the bench runs it."""
    bounds: Bounds
    rig: dict[str, Any] = field(default_factory=dict)
    """Arguments of the rig."""

    @property
    def module(self) -> str:
        """Where it is made."""
        return str(getattr(self.run, "func", self.run).__module__)


FAULTS: dict[str, Fault] = {}


def fault(
    name: str,
    title: str,
    seconds: float = 2.0,
    bounds: Bounds | None = None,
    **rig: Any,
) -> Callable[[Run], Run]:
    """Register a function as the fault of that name."""

    def register(run: Run) -> Run:
        FAULTS[name] = Fault(name, title, run, seconds, bounds or Bounds(), rig)
        return run

    return register


def measure(
    one: Fault,
    rate: float = 200.0,
    seconds: float | None = None,
    settle: float = SETTLE,
    **rig: Any,
) -> Outcome:
    """Run a fault under load. seconds: of the fault instead of its own; rig: over its own."""
    with Rig(**{**one.rig, **rig}) as stage:
        load(stage, rate)
        time.sleep(settle)
        return under_load(stage, one, one.seconds if seconds is None else seconds, settle)


def load(rig: Rig, rate: float) -> None:
    """Start the load, and wait until the sidecar decides and knows the truth. Raises Stuck."""
    rig.board.rate = rate
    rig.wait_remote(time.monotonic())
    rig.wait_exact()


def under_load(rig: Rig, one: Fault, seconds: float, settle: float) -> Outcome:
    """Run a fault on a rig whose load is on. Raises Stuck."""
    hook, sidecar, pid = rig.hook_weight(), rig.sidecar_weight(), rig.sidecar.pid
    rig.notes.clear()
    moved = _moved(rig)
    begun = time.monotonic()
    ended = one.run(rig, seconds) or time.monotonic()
    remote, exact = _recovery(rig, ended)
    time.sleep(settle)
    returned = rig.quiet()
    hook_mib, hook_descriptors = growth(hook, rig.hook_weight())
    same = rig.sidecar.pid == pid and not rig.sidecar.dead
    mib, descriptors = growth(sidecar, rig.sidecar_weight()) if same else (None, None)
    rows = [row for name in rig.controllers for row in rig.records(name)]
    outcome = Outcome(
        name=one.name,
        title=one.title,
        seconds=round(ended - begun, 3),
        load=round(os.getloadavg()[0], 1),
        moved=_moved(rig) - moved,
        first_remote_ms=remote,
        exact_ms=exact,
        returned=returned,
        hook_mib=hook_mib,
        hook_descriptors=hook_descriptors,
        sidecar_mib=mib,
        sidecar_descriptors=descriptors,
        notes=list(rig.notes),
        **figures([row for row in rows if row.at >= begun], rig.cast.deadline_ms / 1000),
    )
    outcome.judge(one.bounds)
    return outcome


def _recovery(rig: Rig, ended: float) -> tuple[float | None, float | None]:
    """Milliseconds from then to the first remote decision, and to the true loads."""
    remote = exact = None
    try:
        remote = round((rig.wait_remote(ended) - ended) * 1000, 1)
        exact = round((rig.wait_exact() - ended) * 1000, 1)
    except Stuck as error:
        rig.notes.append(f"{error}: {rig.sidecar.tail()}")
    return remote, exact


def _moved(rig: Rig) -> int:
    return sum(moves(rig.records(name), rig.died) for name in rig.controllers)
