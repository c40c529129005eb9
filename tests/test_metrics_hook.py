"""What the hook tells of itself: causes, round trips, breaker. Its labels are bounded."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hook import controller
from sidecar import metrics, wire
from sidecar.wire import ROUND_TRIP_US, Telemetry
from tests.support import INSTANCE, keyed, make_dispatcher, query
from tests.test_metrics import exposition, samples


@pytest.mark.parametrize("cause", sorted(metrics.BYPASS_CAUSES))
def test_known_bypass_causes_are_labels(cause: str) -> None:
    dispatcher = make_dispatcher()
    dispatcher.handle(query(bypassed={cause: 3, "new-1": 4, "new-2": 5}), 0.0)
    none = {(INSTANCE, known): 0 for known in metrics.BYPASS_CAUSES}
    expected = {(INSTANCE, cause): 3, (INSTANCE, "other"): 9}
    assert samples(exposition(dispatcher))["bypassed_total"] == none | expected


def test_abstentions_are_bounded() -> None:
    dispatcher = make_dispatcher()
    dispatcher.handle(query(abstained={"pinned": 1, "deadline": 2, "x\n": 3}), 0.0)
    none = {(INSTANCE, known): 0 for known in metrics.ABSTAIN_CAUSES}
    expected = {(INSTANCE, "pinned"): 1, (INSTANCE, "other"): 5}
    assert samples(exposition(dispatcher))["abstained_total"] == none | expected


@pytest.mark.parametrize("module", ["controller", "client", "controller_seam"])
def test_every_cause_that_the_hook_counts_is_a_label(module: str) -> None:
    directory = controller.__file__.rpartition("/")[0]
    with open(f"{directory}/{module}.py") as file:
        source = file.read()
    counted = set(re.findall(r'\bbypass\(\s*"(\w+)"', source))
    counted |= set(re.findall(r'^\s+(?:return|self\._silence =) "(\w+)"$', source, re.MULTILINE))
    left = set() if module != "controller_seam" else set(metrics.ABSTAIN_CAUSES)
    assert counted
    assert counted - left <= metrics.BYPASS_CAUSES


def telemetry(*counts: int, ns: int = 0, opened: int = 0, is_open: bool = False) -> Telemetry:
    missing = len(ROUND_TRIP_US) + 1 - len(counts)
    return Telemetry([*counts, *[0] * missing], ns, opened, is_open)


def test_round_trips_are_a_histogram_of_seconds() -> None:
    dispatcher = make_dispatcher()
    dispatcher.handle(query(telemetry=telemetry(5, 0, 2, ns=10**9)), 0.0)
    series = samples(exposition(dispatcher))
    buckets = series["hook_round_trip_seconds_bucket"]
    assert [float(bound) for _, bound in buckets][:-1] == [us / 1e6 for us in ROUND_TRIP_US]
    assert list(buckets.values()) == [5, 5] + [7] * (len(ROUND_TRIP_US) - 1)
    assert series["hook_round_trip_seconds_count"][INSTANCE,] == 7
    assert series["hook_round_trip_seconds_sum"][INSTANCE,] == 1


def test_what_was_told_last_is_shown_until_more_is_told() -> None:
    dispatcher = make_dispatcher()
    dispatcher.handle(query(), 0.0)
    assert "hook_breaker_open" not in samples(exposition(dispatcher))
    dispatcher.handle(query(telemetry=telemetry(opened=2, is_open=True)), 1.0)
    for _ in range(2):
        series = samples(exposition(dispatcher))
        assert series["hook_breaker_open"] == {(INSTANCE,): 1}
        assert series["hook_breaker_opened_total"] == {(INSTANCE,): 2}
        dispatcher.handle(query([keyed("k")]), 2.0)
    dispatcher.handle(query(telemetry=telemetry(opened=2)), 3.0)
    assert samples(exposition(dispatcher))["hook_breaker_open"] == {(INSTANCE,): 0}


def test_since_when_an_instance_is_silent() -> None:
    dispatcher = make_dispatcher()
    dispatcher.handle(query(), 100.0)
    dispatcher.handle(query(instance="other:1"), 103.0)
    ages = samples(exposition(dispatcher, now=107.5))["instance_last_query_age_seconds"]
    assert ages == {(INSTANCE,): 7.5, ("other:1",): 4.5}


COUNT = st.integers(0, 2**62)
STRANGE = st.dictionaries(st.text(max_size=8), COUNT, max_size=8)


@given(
    told=st.lists(
        st.tuples(
            STRANGE,
            STRANGE,
            st.lists(COUNT, min_size=len(ROUND_TRIP_US) + 1, max_size=len(ROUND_TRIP_US) + 1),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_strange_hook_adds_no_series(
    told: list[tuple[dict[str, int], dict[str, int], list[int]]],
):
    """Of what one instance may say, each thing has a fixed number of series."""
    dispatcher = make_dispatcher()
    bounds = {"bypassed_total": 1 + len(metrics.BYPASS_CAUSES), "abstained_total": 5}
    for bypassed, abstained, counts in told:
        asked = query(
            bypassed=bypassed,
            abstained=abstained,
            about={cause: "é" for cause in bypassed},
            telemetry=Telemetry(counts, sum(counts), 1, True),
        )
        dispatcher.handle(wire.decode_query(wire.encode(asked)) if _fits(asked) else asked, 0.0)
        series = samples(exposition(dispatcher))
        for name, bound in bounds.items():
            assert len(series.get(name, {})) <= bound
        assert len(series["hook_round_trip_seconds_bucket"]) == len(ROUND_TRIP_US) + 1
        for name in ("instance_info", "hook_breaker_open", "hook_breaker_opened_total"):
            assert len(series[name]) == 1


def _fits(asked: wire.Query) -> bool:
    telemetry = asked.telemetry
    return telemetry is not None and telemetry.round_trip_ns <= 2**62
