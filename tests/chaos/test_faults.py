"""Each fault of `make chaos` once, short, with real processes: counts only, no times."""

from collections.abc import Iterator
from typing import Any

import pytest

from bench.chaos import limits_side, sidecar_side, wire_side
from bench.chaos.faults import FAULTS, Fault, load, measure, under_load
from bench.chaos.outcome import Outcome
from bench.chaos.process import Impossible
from bench.chaos.rig import Rig

SIDES = {side.__name__ for side in (sidecar_side, limits_side, wire_side)}
SHORT = {
    "stop-1ms": 0.001,
    "stop-10ms": 0.01,
    "stop-100ms": 0.1,
    "stop-1000ms": 1.0,
    "stop-10000ms": 2.0,
    "clock-forward": 0.1,
    "clock-back": 0.1,
}
"""Seconds; the others take LONG_ENOUGH."""
LONG_ENOUGH = 0.3
RATE, RANKS, SETTLE = 150.0, 3, 0.1
STALE = {"stop-10000ms": ("--stale-seconds=1",)}
"""Flags with which a fault is over a limit in a shorter time."""
CAUSES = {
    "kill": "unreachable",
    "stop-1000ms": "breaker_open",
    "stop-10000ms": "breaker_open",
    "descriptors": "unreachable",
    "oom": "unreachable",
    "directory": "unreachable",
    "two-controllers": "refused",
    "answers-late": "deadline",
    "answers-older": "mismatched",
    "answers-other-ranks": "invalid_rank",
    "answers-other-length": "malformed",
    "answers-garbage": "malformed",
}
"""Why the hook decided alone: the fault was there."""
IN_THE_BENCH = {"none", "stop-60000ms"}


def of_the_sidecar() -> list[str]:
    return [
        name for name, one in FAULTS.items() if one.module in SIDES and name not in IN_THE_BENCH
    ]


class Stage:
    """One rig for all faults that need none of their own, made anew after one that failed."""

    def __init__(self) -> None:
        self._rig: Rig | None = None

    def measure(self, one: Fault, seconds: float, **how: Any) -> Outcome:
        if one.rig or how:
            return measure(one, RATE, seconds, settle=SETTLE, ranks=RANKS, **how)
        if self._rig is None:
            self._rig = Rig(ranks=RANKS).__enter__()
            load(self._rig, RATE)
        return under_load(self._rig, one, seconds, SETTLE)

    def close(self) -> None:
        rig, self._rig = self._rig, None
        if rig is not None:
            rig.__exit__()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


@pytest.mark.parametrize("name", of_the_sidecar())
def test_nothing_is_lost_and_no_session_moves(name: str, stage: Stage) -> None:
    how: dict[str, Any] = {"sidecar_flags": STALE[name]} if name in STALE else {}
    try:
        outcome = stage.measure(FAULTS[name], SHORT.get(name, LONG_ENOUGH), **how)
        check(outcome)
        if name.startswith("silent-"):
            assert "1000 connections made" in outcome.notes
        assert name not in CAUSES or CAUSES[name] in outcome.causes, outcome
    except Impossible as error:
        stage.close()
        pytest.skip(str(error))
    except BaseException:
        stage.close()
        raise


def check(outcome: Outcome) -> None:
    assert outcome.requests > 10
    assert (outcome.lost, outcome.moved) == (0, 0), outcome
    assert outcome.first_remote_ms is not None, outcome.notes
    assert outcome.exact_ms is not None, outcome.notes
    assert outcome.returned, outcome
    assert outcome.hook_descriptors <= 0, outcome
    assert (outcome.sidecar_descriptors or 0) <= 4, outcome
