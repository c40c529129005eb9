"""Faults of SGLang's processes under load, with real processes: counts and states, no times.

`python -m bench.chaos` has the figures. A busy machine may hold up a process so long that its rank
looks overloaded or silent: so what is asserted of moves is that each has a reason that was counted.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from bench.chaos.hands import (
    away,
    changes,
    decided,
    home,
    kill_controller,
    kill_rank,
    restart_server,
    stopped,
    wait_stale,
)
from bench.chaos.process import until
from bench.chaos.records import KEYLESS, Record
from bench.chaos.rig import Rig
from bench.chaos.sglang_side import HASHED, HOUR, MINUTE
from sidecar import wire
from tests.processes import Asker
from tests.support import keyed, query

RANKS, SESSIONS, RANK = 4, 12, 2
HOMES = [home(session, RANKS) for session in range(SESSIONS)]
assert RANK in HOMES


@contextmanager
def playing(*flags: str) -> Iterator[Rig]:
    """A rig under load, seen exactly."""
    flags = ("--stale-seconds=1.5", *flags)
    with Rig(ranks=RANKS, sessions=SESSIONS, deadline_ms=500, sidecar_flags=flags) as rig:
        rig.board.rate = 60.0
        rig.wait_remote(time.monotonic())
        rig.wait_exact()
        yield rig


def since(rig: Rig, begun: float) -> list[Record]:
    return [record for record in rig.records() if record.at >= begun]


def keyed_since(rig: Rig, begun: float) -> list[Record]:
    return [record for record in since(rig, begun) if record.session != KEYLESS]


def settles(rig: Rig, ended: float) -> None:
    """The sidecar decides again, on true loads, nothing was lost and nothing is left."""
    rig.wait_remote(ended)
    rig.wait_exact()
    assert not [record for record in rig.records() if record.lost]
    assert rig.quiet()


@pytest.mark.parametrize("clock_step", [0.0, -HOUR])
def test_controller_restarted_with_the_same_name(clock_step: float) -> None:
    """With an older clock it is refused, as one of two, for as long as the other may live."""
    with playing() as rig:
        kill_controller(rig)
        begun = time.monotonic()
        rig.start_controller(clock_step=clock_step)
        settles(rig, begun)
        refused = [record for record in since(rig, begun) if record.cause == "refused"]
        assert bool(refused) == bool(clock_step)
        first = rig.remote_since(begun)
        assert first is not None
        assert not [record for record in refused if record.at > first.at], "not for ever"


@pytest.mark.parametrize("clock_step", [-MINUTE, -HOUR])
def test_server_restarted_with_the_same_name(clock_step: float) -> None:
    """Its sessions are where they were, by their hash, whoever decides it."""
    with playing(*HASHED) as rig:
        begun = restart_server(rig, clock_step)
        settles(rig, begun)
        alone = [record for record in keyed_since(rig, begun) if not record.boot]
        assert all(record.rank == HOMES[record.session] for record in alone)
        assert away(rig) <= decided(rig, "spill") + decided(rig, "stale_skip")


def test_sessions_leave_a_stopped_rank_and_return() -> None:
    with playing(*HASHED) as rig:
        with stopped(rig, RANK):
            until(lambda: decided(rig, "stale_skip"), "a session that left")
            left = time.monotonic()
            until(lambda: len(keyed_since(rig, left)) > 2 * SESSIONS, "more requests")
            assert RANK not in [record.rank for record in keyed_since(rig, left)]
        ended = time.monotonic()
        wait_stale(rig, 0)
        until(lambda: RANK in [r.rank for r in keyed_since(rig, ended)], "a session that is back")
        settles(rig, ended)
        assert away(rig) <= decided(rig, "spill") + decided(rig, "stale_skip")


def test_sessions_leave_a_dead_rank_and_find_it_after_a_restart() -> None:
    with playing(*HASHED) as rig:
        kill_rank(rig, RANK)
        until(lambda: decided(rig, "stale_skip"), "a session that left")
        left = time.monotonic()
        until(lambda: len(since(rig, left)) > 2 * SESSIONS, "more requests")
        assert RANK not in [record.rank for record in since(rig, left)]
        begun = restart_server(rig)
        settles(rig, begun)
        until(lambda: RANK in [r.rank for r in keyed_since(rig, begun)], "its sessions")
        assert away(rig) <= decided(rig, "spill") + decided(rig, "stale_skip")


def test_a_flapping_rank_is_left_once() -> None:
    """Its sessions stay where their new cache is, and nobody is sent to a rank that is down."""
    with playing() as rig:
        begun, every = time.monotonic(), rig.board.live
        for _ in range(8):
            for live in ([rank for rank in every if rank != RANK], every):
                rig.board.live = live
                asked = time.monotonic()
                until(lambda asked=asked: len(since(rig, asked)) > 3, "requests")
        ended = time.monotonic()
        records = since(rig, begun)
        for record, after in pairwise(records):
            assert (int(record.live) | int(after.live)) >> record.rank & 1 or record.rank < 0
        from_healthy = [move for move in changes(rig.records(), begun) if move[0] != RANK]
        assert len(from_healthy) <= decided(rig, "spill") + decided(rig, "stale_skip")
        settles(rig, ended)


def test_no_rank_is_live() -> None:
    """Nobody is asked in vain; a sidecar that is asked all the same says why it has no answer."""
    with playing() as rig:
        every, rig.board.live = rig.board.live, []
        begun = time.monotonic()
        until(lambda: len(since(rig, begun)) > 20, "requests")
        assert {record.rank for record in since(rig, begun)[2:]} == {-1}
        with Asker(rig.endpoint) as asker:
            answer = asker.query([keyed("k")], ranks=[], instance="bench", epoch=2**62)
            assert isinstance(answer, wire.Refusal)
            assert answer.cause == "no_live_rank"
            assert asker.ask(wire.encode(query(ranks=[], instance="other"))).ranks == []
        rig.board.live = every
        settles(rig, time.monotonic())
        told = rig.sidecar.status("bench")
        assert told is not None
        assert told["bypassed"]["no_live_rank"] >= 18


def test_all_ranks_stop_and_go_on() -> None:
    """Ranks that fall silent together are not stuck: no session moves for that."""
    with playing(*HASHED) as rig:
        with stopped(rig, *range(RANKS)):
            wait_stale(rig, RANKS)
            begun = time.monotonic()
            until(lambda: len(keyed_since(rig, begun)) > 2 * SESSIONS, "more requests")
        ended = time.monotonic()
        assert all(r.rank == HOMES[r.session] for r in keyed_since(rig, begun) if r.at < ended)
        settles(rig, ended)
        assert decided(rig, "stale_skip") == 0
        assert away(rig) <= decided(rig, "spill")
