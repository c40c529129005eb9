"""What the figures of a fault count, and which bounds they break."""

import re
from pathlib import Path

import pytest
from msgspec import structs

from bench.chaos.__main__ import HEADER, chosen, markdown, row
from bench.chaos.board import Board
from bench.chaos.faults import FAULTS
from bench.chaos.outcome import ALLOWANCE, Bounds, Outcome, figures, moves
from bench.chaos.records import KEYLESS, Reader, Record

DEADLINE = 0.005
ALL_LIVE = 0b1111


def record(at: float, session: int = 1, rank: int = 0, **more: object) -> Record:
    fields = {"seconds": 0.0001, "waited": 0.0, "live": ALL_LIVE, "boot": 7, "cause": ""}
    return Record(at=at, session=session, rank=rank, **{**fields, **more})


SOUND = Outcome(
    name="x",
    title="X",
    seconds=1.0,
    load=0.0,
    requests=100,
    lost=0,
    waits=0,
    delayed=0,
    worst_ms=1.0,
    worst_wall_ms=1.0,
    alone_us=None,
    moved=0,
    remote=100,
    causes={},
    first_remote_ms=10.0,
    exact_ms=20.0,
    returned=True,
    hook_mib=0.0,
    hook_descriptors=0,
    sidecar_mib=None,
    sidecar_descriptors=None,
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"lost": 1}, "1 lost"),
        ({"waits": 4}, "4 waited, 3 may"),
        ({"delayed": 1}, "1 delayed"),
        ({"moved": 1}, "1 moved"),
        ({"first_remote_ms": None}, "no remote decision"),
        ({"first_remote_ms": 301.0}, "301.0 ms to recover"),
        ({"exact_ms": None}, "no exact view"),
        ({"returned": False}, "does not return to 0"),
        ({"hook_mib": 9.0}, "hook \\+9.0 MiB"),
        ({"sidecar_mib": 17.0}, "sidecar \\+17.0 MiB"),
        ({"hook_descriptors": 1}, "hook \\+1 descriptors"),
        ({"sidecar_descriptors": 5}, "sidecar \\+5 descriptors"),
    ],
)
def test_a_broken_bound_is_named(change: dict[str, object], said: str) -> None:
    outcome = structs.replace(SOUND, **change)
    outcome.judge(Bounds())
    assert len(outcome.broken) == bool(said)
    assert all(re.search(said, text) for text in outcome.broken)


def test_what_the_machine_alone_does_is_allowed_for() -> None:
    outcome = structs.replace(SOUND, waits=6)
    outcome.judge(Bounds(waits=3), noise=0.01)
    assert outcome.broken == []
    outcome.judge(Bounds(waits=3), noise=0.005)
    assert outcome.broken == ["6 waited, 5 may"]


def test_a_session_moves_if_its_rank_lived() -> None:
    stays = [record(1.0), record(2.0), record(3.0, session=2, rank=1)]
    assert moves(stays, []) == 0
    assert moves([*stays, record(4.0, rank=1)], []) == 1
    assert moves([*stays, record(4.0, rank=1), record(5.0, rank=0)], []) == 2


def test_a_session_may_leave_a_rank_that_died() -> None:
    left = [record(1.0), record(2.0, rank=1)]
    assert moves(left, [(1.5, 0)]) == 0
    assert moves(left, [(0.5, 0)]) == 1, "it was there after the death"
    assert moves(left, [(1.5, 1)]) == 1, "another one died"
    assert moves([record(1.0), record(2.0, rank=1, live=0b1110)], []) == 0, "not live any more"


def test_without_a_key_nothing_is_owed_and_nothing_moves() -> None:
    keyless = [record(n, session=KEYLESS, rank=rank) for n, rank in enumerate((0, 1, -1))]
    assert moves(keyless, []) == 0
    assert figures(keyless, DEADLINE)["lost"] == 0


def test_lost_is_a_key_without_a_rank_and_an_exception() -> None:
    lost = [
        record(1.0, rank=-1),
        record(2.0, session=KEYLESS, rank=-1, cause="exception"),
        record(3.0, rank=-1, live=0, cause="no_live_rank"),
    ]
    assert figures(lost, DEADLINE)["lost"] == 2


def test_time_without_a_core_is_no_delay() -> None:
    over = DEADLINE + 2 * ALLOWANCE
    rows = [record(1.0, seconds=over), record(2.0, seconds=over, waited=2 * ALLOWANCE)]
    assert figures(rows, DEADLINE)["delayed"] == 1
    assert figures(rows, DEADLINE)["worst_wall_ms"] == pytest.approx(over * 1000)


def test_records_are_read_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "records"
    first, second = record(1.0, cause="deadline", boot=0), record(2.0, cause="a newer cause")
    reader = Reader(path)
    path.write_bytes(first.pack() + second.pack()[:-3])
    assert reader.read() == [first]
    path.write_bytes(first.pack() + second.pack())
    assert reader.read() == [first, second._replace(cause="other")]
    reader.close()


def test_processes_share_the_board(tmp_path: Path) -> None:
    one, other = Board(tmp_path / "board"), Board(tmp_path / "board")
    one.rate, one.live, one.held_seconds = 200.0, [0, 5, 62], 0.03
    one.tell(5, 7, 2)
    assert (other.rate, other.live, other.held_seconds) == (200.0, [0, 5, 62], 0.03)
    assert other.rank(5) == (7, 2)
    one.close()
    other.close()


def test_the_table_has_a_cell_for_each_column() -> None:
    assert len(row(SOUND)) == len(HEADER)
    lines = markdown([list(HEADER), row(SOUND)]).splitlines()
    assert len({line.count("|") for line in lines}) == 1


def test_faults_are_chosen_by_a_part_of_their_names() -> None:
    names = [one.name for one in chosen(["stop-1"])]
    assert names[0] == "none"
    assert {"stop-1ms", "stop-10ms", "stop-1000ms"} <= set(names)
    assert len(chosen([])) == len(FAULTS)
    with pytest.raises(SystemExit, match="there are: "):
        chosen(["nonsense"])
