"""Schedulers of a real SGLang server that stop and die, under load. In the order of the file.

A server of its own, plain DP: under DP attention a rank that stops holds up all the others, and one
that dies ends the server (from 0.5.22 on). Its last test ends it.
"""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import psutil
import pytest

from sidecar.hashing import key_hash, preferred
from tests.processes import is_stopped, metric, wait_for

from .conftest import Live, eventually, serving

RANKS = 3
STUCK = 1
STALE_SECONDS = "3"
PATIENCE = 60.0
TEXT = "the of and to " * 50


class Faulty(Live):
    """A server with few ranks, and what is done to it."""

    size = RANKS

    def pid(self, rank: int) -> int:
        return self.server.pids()["schedulers"][rank]

    @contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        """The rank's scheduler does nothing within the block."""
        process = psutil.Process(self.pid(rank))
        process.suspend()
        try:
            wait_for(lambda: is_stopped(process.pid), PATIENCE)
            yield
        finally:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def where(self, key: str | None) -> int:
        return self.rank_of(self.chat(key, TEXT))

    def stale(self) -> float:
        return metric(self.metrics(), "stale_ranks") or 0

    def decided(self, reason: str) -> int:
        counts = self.status().get("decisions", {})
        return sum(reasons.get(reason, 0) for reasons in counts.values())


def key_of(rank: int, name: str) -> str:
    """A routing key whose preferred rank is `rank`."""
    return next(
        key
        for key in (f"{name}-{i}" for i in range(1000))
        if preferred(key_hash(key.encode()), range(RANKS)) == rank
    )


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DP_SIDECAR_STALE_SECONDS", STALE_SECONDS)
        with serving(folder, RANKS, "--plain-dp") as found:
            yield Faulty(found.server, found.sidecar, found.journal)


def test_sessions_avoid_a_stopped_scheduler_and_return(faulty):
    """Nothing is lost, also of what was sent to it before anybody could know that it stopped."""
    homes = {key_of(rank, f"session-{i}"): rank for rank in range(RANKS) for i in range(2)}
    assert {key: faulty.where(key) for key in homes} == homes
    assert faulty.settle()
    assert faulty.decided("stale_skip") == 0
    with ThreadPoolExecutor(8) as pool:
        with faulty.stopped(STUCK):
            waiting = [pool.submit(faulty.where, key_of(STUCK, f"early-{i}")) for i in range(4)]
            eventually(lambda: faulty.stale() == 1, PATIENCE)
            assert faulty.where(key_of(STUCK, "new")) != STUCK
            at = {key: faulty.where(key) for key in homes}
            assert STUCK not in at.values()
            assert {k: r for k, r in at.items() if homes[k] != STUCK} == {
                k: r for k, r in homes.items() if r != STUCK
            }
            assert faulty.decided("stale_skip") >= 3, "each move has its reason"
        assert STUCK in [chat.result(PATIENCE) for chat in waiting]
    assert eventually(lambda: not faulty.stale(), PATIENCE)
    assert {key: faulty.where(key) for key in homes} == homes, "each is back at its cache"
    assert faulty.settle()


def test_the_sidecar_dies_while_a_scheduler_is_stopped(faulty):
    """Then nobody knows that it is: what is sent to it waits, and is answered."""
    others = {key_of(rank, "other"): rank for rank in range(RANKS) if rank != STUCK}
    moved = key_of(STUCK, "moved")
    assert faulty.where(moved) == STUCK
    with ThreadPoolExecutor(8) as pool:
        with faulty.stopped(STUCK):
            eventually(lambda: faulty.stale() == 1, PATIENCE)
            refuge = faulty.where(moved)
            assert refuge != STUCK
            faulty.sidecar.kill()
            assert faulty.where(moved) == refuge, "the hook remembers where it went"
            waiting = [pool.submit(faulty.where, key_of(STUCK, f"late-{i}")) for i in range(3)]
            assert {key: faulty.where(key) for key in others} == others
            faulty.sidecar.start()
            assert eventually(lambda: faulty.where(next(iter(others))) >= 0 and decides(faulty))
            assert {key: faulty.where(key) for key in others} == others
        assert [chat.result(PATIENCE) for chat in waiting] == [STUCK] * len(waiting)
    assert faulty.where(moved) == STUCK
    assert faulty.settle()
    assert set(faulty.status()["bypassed"]) <= {"unreachable", "deadline", "breaker_open"}


def decides(faulty: Faulty) -> bool:
    return bool(faulty.status().get("decisions"))


def test_a_dead_scheduler_is_avoided(faulty):
    """SGLang does not notice: without us every third request would wait for ever."""
    homes = {key_of(rank, "last"): rank for rank in range(RANKS)}
    assert {key: faulty.where(key) for key in homes} == homes
    psutil.Process(faulty.pid(STUCK)).send_signal(signal.SIGKILL)
    eventually(lambda: faulty.stale() == 1, PATIENCE)
    skipped = faulty.decided("stale_skip")
    assert STUCK not in [faulty.where(key_of(STUCK, f"after-{i}")) for i in range(3)]
    assert STUCK not in [faulty.where(None) for _ in range(2 * RANKS)]
    at = {key: faulty.where(key) for key in homes}
    assert [key for key in homes if at[key] != homes[key]] == [key_of(STUCK, "last")]
    assert faulty.decided("stale_skip") >= skipped + 4, "each move has its reason"


def test_the_server_dies_with_its_controller_as_without_us(faulty):
    """SGLang ends itself then, and we neither keep it from that nor complain."""
    tree = faulty.server._tree()
    [controller] = faulty.server.pids()["controller"]
    psutil.Process(controller).send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(tree, timeout=PATIENCE)
    assert not alive
    log = faulty.server.log_path.read_text()
    assert "crashed with exit code" in log
    assert not [line for line in log.splitlines() if "dp_sidecar:" in line and "ERROR" in line]
    assert faulty.sidecar.process.poll() is None
