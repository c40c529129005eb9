"""Faults of the sidecar's process and of the clock."""

import os
import signal
import time
from functools import partial

from bench.chaos.faults import fault
from bench.chaos.outcome import Bounds
from bench.chaos.patches import WallClock, of_version
from bench.chaos.process import until
from bench.chaos.rig import Rig

HOUR = 3600.0
STALE_SECONDS = 1.0
"""Where a fault waits for it; the default is five."""


@fault("none", "no fault (the noise of the machine)")
def none(rig: Rig, seconds: float) -> None:
    time.sleep(seconds)


@fault("kill", "killed with -9, started again")
def kill(rig: Rig, seconds: float) -> float:
    rig.sidecar.kill()
    time.sleep(seconds)
    return rig.restart()


# One wait for each time it dies in the middle of a query.
@fault("restart-loop", "killed with -9 and started again, over and over", 10.0, Bounds(waits=60))
def restart_loop(rig: Rig, seconds: float) -> float:
    ends = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < ends or rounds < 2:
        rig.sidecar.kill()
        rig.wait_remote(rig.restart())
        rounds += 1
    rig.notes.append(f"{rounds} times")
    rig.sidecar.kill()
    return rig.restart()


def _stopped(rig: Rig, seconds: float) -> float:
    with rig.sidecar.frozen():
        time.sleep(seconds)
    return time.monotonic()


for _ms in (1, 10, 100, 1_000, 10_000, 60_000):
    _told = f"{_ms} ms" if _ms < 1000 else f"{_ms // 1000} s"
    fault(f"stop-{_ms}ms", f"stopped (SIGSTOP) for {_told}", _ms / 1000)(_stopped)


@fault("take-over", "replaced by another version (serve --take-over)")
def take_over(rig: Rig, seconds: float) -> float:
    older = rig.sidecar
    env = of_version("99.0", rig.folder / "version")
    newer = rig.start_sidecar("--take-over", wait=False, env=env)
    until(lambda: older.dead, "the end of the older")
    ended = newer.wait_listening()
    until(lambda: '"version":"99.0"' in (newer.get("/status") or ""), "the newer version")
    return ended


def _clock(rig: Rig, seconds: float, step: float) -> float:
    """The clock steps under a running sidecar; then it is restarted; then a rank is, which joins a
    controller that counts from another time; then the server is, as much earlier as the step."""
    clock = WallClock(rig.folder)
    rig.sidecar.kill()
    rig.wait_remote(rig.restart(env=clock.env))
    clock.set(step)
    time.sleep(seconds)
    rig.sidecar.kill()
    rig.wait_remote(rig.restart(env=clock.env))
    rig.wait_exact()
    _restart_ranks(rig, [0], step)
    rig.wait_exact()
    # What it was sent while it was away came all at once, and may have driven sessions away.
    rig.died.append((time.monotonic(), 0))
    _restart_ranks(rig, list(rig.ranks), step, controller=True)
    return time.monotonic()


def _restart_ranks(rig: Rig, ranks: list[int], step: float, *, controller: bool = False) -> None:
    """Kill them, and start them once the sidecar calls them stale: a model takes longer to load."""
    rate, rig.board.rate = rig.board.rate, rig.board.rate * (not controller)
    for pid in [rig.ranks[r] for r in ranks] + list(rig.controllers.values()) * controller:
        os.kill(pid, signal.SIGKILL)
    time.sleep(1.2 * STALE_SECONDS)
    for rank in ranks:
        rig.start_rank(rank, clock_step=step)
    if controller:
        rig.start_controller(clock_step=step)
        rig.board.rate = rate


for _name, _step in (("forward", HOUR), ("back", -HOUR)):
    fault(
        f"clock-{_name}",
        f"clock moved an hour {_name}; sidecar, a rank and the server restarted",
        bounds=Bounds(waits=6, hook_descriptors=4),
        sidecar_flags=(f"--stale-seconds={STALE_SECONDS}",),
    )(partial(_clock, step=_step))
