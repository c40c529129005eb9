"""Ranks that come and go under SGLang's own controller: `status` and `_active_workers` flap."""

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import ELASTIC, RANKS, Harness, generate

FLAPPING = 5


def flap(harness: Harness, *, up: bool) -> None:
    """As an ActiveRanksOutput of an elastic server leaves the controller."""
    controller = harness.controller
    controller.status = [up or rank != FLAPPING for rank in range(RANKS)]
    if ELASTIC:
        controller._active_workers = [rank for rank in range(RANKS) if controller.status[rank]]


@pytest.mark.parametrize("method", ["ROUND_ROBIN", "TOTAL_REQUESTS"])
def test_no_request_goes_to_a_rank_that_is_down(
    make_harness: Callable[..., Harness], method: str
) -> None:
    """Whatever the sidecar says: it may not know yet. The counters of the rank go on."""
    harness = make_harness(method)
    to_flapping = 0
    for turn in range(200):
        up = turn % 2 == 0
        flap(harness, up=up)
        before = harness.sent()
        harness.dispatch(generate(f"r{turn}", key="k"))
        after = harness.sent()
        assert sum(after) == sum(before) + 1
        assert (after[FLAPPING] > before[FLAPPING]) == up
        to_flapping += up
        assert harness.queries[-1].ranks == [r for r in range(RANKS) if up or r != FLAPPING]
    assert harness.sent()[FLAPPING] == to_flapping
    assert harness.seam.chooser.bypassed == {"invalid_rank": 200 - to_flapping}
    flap(harness, up=True)
    assert harness.seam.live_ranks() == list(range(RANKS))


@pytest.mark.skipif(not ELASTIC, reason="before 0.5.16 SGLang itself looks for a rank for ever")
def test_all_ranks_down_and_up_again(harness: Harness) -> None:
    """SGLang's own error at once, as without us; nobody is asked; then all is as before."""
    controller: Any = harness.controller
    for _ in range(3):
        controller.status, controller._active_workers = [False] * RANKS, []
        asked = len(harness.queries)
        for turn in range(20):
            with pytest.raises(RuntimeError, match="No active DP workers"):
                harness.dispatch(generate(f"down-{turn}", key="k"))
        assert len(harness.queries) == asked
        flap(harness, up=True)
        harness.dispatch(generate(f"up-{asked}", key="k"))
        assert harness.where()[f"up-{asked}"] == FLAPPING
    assert harness.seam.chooser.bypassed == {"no_live_rank": 60}
    assert sum(harness.sent()) == 3
