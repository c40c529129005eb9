"""What is done to a rig's controller and ranks, and what became of the sessions."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from bench.chaos.process import until
from bench.chaos.records import KEYLESS, Record
from bench.chaos.rig import Rig
from sidecar.hashing import key_hash, preferred

RANK = 3
"""The one that something happens to."""


def home(session: int, ranks: int) -> int:
    """The rank that a session's key prefers by its hash."""
    return preferred(key_hash(f"session-{session}".encode()), range(ranks))


def kill_rank(rig: Rig, rank: int) -> None:
    """kill -9; what it ran is gone, as with SGLang alone."""
    rig.died.append((time.monotonic(), rank))
    _kill(rig.ranks[rank])


def kill_controller(rig: Rig) -> None:
    _kill(rig.controllers["controller"])


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not _there(pid), "the end of a process")


def _there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def restart_server(rig: Rig, clock_step: float = 0.0) -> float:
    """The controller and every rank again, as SGLang is restarted; when they are there."""
    kill_controller(rig)
    for rank in rig.ranks:
        kill_rank(rig, rank)
    for rank in list(rig.ranks):
        rig.start_rank(rank, clock_step=clock_step)
    rig.start_controller(clock_step=clock_step)
    return time.monotonic()


@contextlib.contextmanager
def stopped(rig: Rig, *ranks: int) -> Iterator[None]:
    """The schedulers of these ranks do nothing within the block."""
    for rank in ranks:
        os.kill(rig.ranks[rank], signal.SIGSTOP)
    try:
        yield
    finally:
        for rank in ranks:
            os.kill(rig.ranks[rank], signal.SIGCONT)


def decided(rig: Rig, reason: str) -> int:
    """Requests that this sidecar decided for that reason."""
    told = rig.sidecar.status(rig.cast.instance) or {"decisions": {}}
    return sum(reasons.get(reason, 0) for reasons in told["decisions"].values())


def changes(records: list[Record], since: float) -> list[tuple[int, int]]:
    """(from, to) of each request since then with a key on another rank than its key's last."""
    last: dict[int, int] = {}
    found = []
    for record in records:
        if record.session == KEYLESS or record.rank < 0:
            continue
        before = last.get(record.session, record.rank)
        last[record.session] = record.rank
        if before != record.rank and record.at >= since:
            found.append((before, record.rank))
    return found


def away(rig: Rig) -> int:
    """Requests that a sidecar of this rig sent elsewhere than to the home of their key."""
    ranks = rig.cast.ranks
    mine = [record for record in rig.records() if record.boot and record.session != KEYLESS]
    return sum(record.rank != home(record.session, ranks) for record in mine)


def note_changes(rig: Rig, since: float) -> None:
    """Tell how many sessions went where, and how many of these the sidecar has a reason for."""
    found = changes(rig.records(), since)
    left = sum(before == RANK for before, _ in found)
    back = sum(after == RANK for _, after in found)
    skips = decided(rig, "stale_skip")
    rig.notes.append(
        f"{left} moves from rank {RANK}, {back} to it, {len(found) - left - back} others; "
        f"{skips} requests stale_skip, {decided(rig, 'spill')} spill"
    )


def wait_stale(rig: Rig, ranks: int) -> None:
    """Until so many live ranks are stale. Raises Stuck."""
    line = f'sglang_dp_sidecar_stale_ranks{{instance="{rig.cast.instance}"}} {ranks}'
    until(lambda: line in (rig.sidecar.get("/metrics") or ""), f"{ranks} stale ranks")


def cpu(pids: list[int]) -> list[float]:
    """Seconds of processor time of each process so far."""
    tick = os.sysconf("SC_CLK_TCK")
    spent = []
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            fields = stat.read().rpartition(")")[2].split()
        spent.append((int(fields[11]) + int(fields[12])) / tick)
    return spent
