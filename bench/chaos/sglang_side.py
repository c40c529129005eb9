"""Faults of SGLang's processes: its controller, its schedulers, and what it calls live."""

import time

from bench.chaos.faults import fault
from bench.chaos.hands import (
    RANK,
    away,
    cpu,
    decided,
    kill_controller,
    kill_rank,
    note_changes,
    restart_server,
    stopped,
    wait_stale,
)
from bench.chaos.outcome import Bounds
from bench.chaos.process import Stuck
from bench.chaos.rig import Rig

STALE = 5.0
"""Seconds; the sidecar's default."""
HOUR, MINUTE = 3600.0, 60.0
FLAP_SECONDS = 0.1
HASHED = ("--policy=prefix_affinity",)
"""Whose sessions have a home that they return to."""


# ------------------------------------------------------------------ controller


@fault("controller-killed", "controller killed -9, started again at once", 0.0, Bounds(moved=50))
def controller_killed(rig: Rig, _: float) -> float:
    """Its memory of keys is gone with it; so are, in SGLang, server and caches."""
    kill_controller(rig)
    rig.start_controller()
    return time.monotonic()


@fault(
    "controller-clock-back",
    "controller killed -9, started again with its clock an hour back",
    0.0,
    Bounds(moved=50, recovery=STALE + 1),
)
def controller_clock_back(rig: Rig, _: float) -> float:
    """Refused as the older of two of one name until the other is silent for stale_seconds."""
    kill_controller(rig)
    rig.start_controller(clock_step=-HOUR)
    return time.monotonic()


@fault("server-restarted", "controller and schedulers killed -9, started again", 0.0)
def server_restarted(rig: Rig, _: float) -> float:
    return restart_server(rig)


@fault(
    "server-clock-back",
    "controller and schedulers killed -9, started again with their clock a minute back",
    0.0,
    Bounds(recovery=STALE + 1),
)
def server_clock_back(rig: Rig, _: float) -> float:
    return restart_server(rig, -MINUTE)


# ------------------------------------------------------------------- one rank


@fault("rank-stopped", "one scheduler stopped (SIGSTOP), then goes on", STALE + 3)
def rank_stopped(rig: Rig, seconds: float) -> float:
    begun = time.monotonic()
    with stopped(rig, RANK):
        time.sleep(seconds)
        rig.died.append((time.monotonic(), RANK))
        note_changes(rig, begun)
    return time.monotonic()


@fault(
    "rank-stopped-hashed",
    "one scheduler stopped, then goes on; prefix_affinity, whose sessions return",
    STALE + 3,
    Bounds(moved=50),
    sidecar_flags=HASHED,
)
def rank_stopped_hashed(rig: Rig, seconds: float) -> float:
    """Away, and back; where its load drives away others than its own, they return too."""
    begun = time.monotonic()
    with stopped(rig, RANK):
        time.sleep(seconds)
        rig.died.append((time.monotonic(), RANK))
    ended = time.monotonic()
    wait_stale(rig, 0)
    time.sleep(2 * rig.cast.sessions / rig.board.rate)
    note_changes(rig, begun)
    rig.notes.append(f"{away(rig)} requests away from their home, all for one of these reasons")
    if away(rig) > decided(rig, "spill") + decided(rig, "stale_skip"):
        raise Stuck("requests away from home without a reason")
    return ended


@fault("rank-dead", "one scheduler killed -9, unnoticed; then the server is restarted", STALE + 3)
def rank_dead(rig: Rig, seconds: float) -> float:
    """As SGLang's plain DP: only load reports tell."""
    begun = time.monotonic()
    kill_rank(rig, RANK)
    time.sleep(seconds)
    rig.died.append((time.monotonic(), RANK))
    note_changes(rig, begun)
    sent = [record for record in rig.records() if record.rank == RANK and record.at >= begun]
    late = sum(record.at > begun + STALE + 1 for record in sent)
    rig.notes.append(f"{len(sent)} requests sent to it, {late} of them later than {STALE + 1:g} s")
    return restart_server(rig)


@fault("rank-flaps", "a rank down and up every 100 ms", 3.0)
def rank_flaps(rig: Rig, seconds: float) -> float:
    """As the controller's `status` and `_active_workers` say it."""
    begun, every = time.monotonic(), rig.board.live
    while time.monotonic() < begun + seconds:
        rig.board.live = [rank for rank in every if rank != RANK]
        time.sleep(FLAP_SECONDS)
        rig.board.live = every
        time.sleep(FLAP_SECONDS)
    note_changes(rig, begun)
    return time.monotonic()


@fault(
    "rank-reports-flap",
    "a rank whose reports stop and go on again and again",
    6.0,
    sidecar_flags=("--stale-seconds=0.5",),
)
def rank_reports_flap(rig: Rig, seconds: float) -> float:
    begun = time.monotonic()
    while time.monotonic() < begun + seconds:
        with stopped(rig, RANK):
            time.sleep(1.0)
            rig.died.append((time.monotonic(), RANK))
        time.sleep(0.5)
    note_changes(rig, begun)
    return time.monotonic()


# -------------------------------------------------------------------- all ranks


@fault("ranks-down", "no rank is live", 2.0)
def ranks_down(rig: Rig, seconds: float) -> float:
    every, pids = rig.board.live, [rig.controllers["controller"], rig.sidecar.pid]
    rig.board.live = []
    begun, before = time.monotonic(), cpu(pids)
    time.sleep(seconds)
    spent = [round(b - a, 2) for a, b in zip(before, cpu(pids), strict=True)]
    rows = [record for record in rig.records() if record.at >= begun + 0.1]
    placed = sum(record.rank >= 0 for record in rows)
    rig.notes.append(
        f"{len(rows)} requests, {placed} placed; CPU of controller and sidecar {spent} s"
    )
    rig.board.live = every
    return time.monotonic()


@fault(
    "ranks-stopped",
    "every scheduler stopped (SIGSTOP), then goes on",
    STALE + 2,
    Bounds(moved=10),
)
def ranks_stopped(rig: Rig, seconds: float) -> float:
    """All are stale: then affinity is all there is. Those that go on late may be overloaded."""
    begun = time.monotonic()
    with stopped(rig, *rig.ranks):
        time.sleep(seconds)
        note_changes(rig, begun)
    return time.monotonic()
