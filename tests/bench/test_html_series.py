"""What the pictures are drawn from."""

import numpy as np

from bench.html.series import Series, cached_share, sessions, spill_matrix
from bench.outcome import Outcome, Row, Sample
from bench.statistics import Run


def series(rows: list[Row], ranks: int, samples: list[Sample] | None = None) -> Series:
    found = Outcome("w", "a", 0, "virtual", ranks, rows, 1.0, samples or [])
    return Series.of(found, Run.of(found))


def test_spills_and_sessions_are_counted() -> None:
    rows = [
        Row(i, i // 2, i % 2, i / 10, (i + (i > 7)) % 4, 10, 5, 2, 1, 2, "", i % 4)
        for i in range(9)
    ]
    rows.append(Row(9, 4, 1, 0.9, 3, 10, 5, 2, 1, 2, "", -1))
    found = series(rows, 4)
    matrix = spill_matrix([found])
    assert matrix.sum() == 9 and np.trace(matrix) == 8 and matrix[0, 1] == 1
    drawn = sessions(found, most=3, points=100)
    assert (drawn["shown"], drawn["all"], len(drawn["at"])) == (3, 5, 6)
    assert sessions(found, most=3, points=2)["shown"] == 1


def test_load_without_samples_is_what_the_client_has_in_flight() -> None:
    rows = [Row(i, i, 0, 0.0, i % 2, 10, 5, 2, 1, 1000.0 * (1 + i)) for i in range(3)]
    found = series(rows, 2)
    assert found.load[0].tolist() == [2, 1] and found.load[-1].tolist() == [0, 0]


def test_samples_are_averaged_and_held() -> None:
    given = [Sample(0.0, [2, 0]), Sample(1.0, [4, 2]), Sample(100.0, [6, 6])]
    found = series([], 2, given)
    assert found.load.tolist() == [[3, 1], [3, 1], [6, 6]]


def test_cached_share_pools_runs() -> None:
    rows = [Row(i, i, 0, float(i), 0, 100, 25 * i, 2, 1, 2) for i in range(4)]
    at, share = cached_share([series(rows, 1)] * 2, bins=2)
    assert share.tolist() == [0.125, 0.625] and len(at) == 2
