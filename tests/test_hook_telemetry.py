"""What the hook measures of its queries, when it tells it, and that nothing waits for it."""

import pytest

from sglang_hook.telemetry import TOLD_EVERY_NS, Meter
from sidecar import wire
from sidecar.wire import ROUND_TRIP_US
from tests.processes import short_directory
from tests.test_client import LONG_MS, SHORT_MS, Scripted, hooked, silent, well_behaved
from tests.test_controller import Hook

US = 1000


def told(meter: Meter) -> wire.Telemetry:
    telemetry = meter.tell(everything=True)
    assert telemetry is not None
    return telemetry


@pytest.mark.parametrize("place", range(len(ROUND_TRIP_US)))
def test_a_bucket_holds_its_bound(place: int) -> None:
    meter, bound = Meter(), ROUND_TRIP_US[place] * US
    meter.waited(5, 5 + bound)
    meter.waited(5, 5 + bound + 1)
    counts = told(meter).round_trips
    assert (counts[place], counts[place + 1], sum(counts)) == (1, 1, 2)
    assert told(meter).round_trip_ns == 2 * bound + 1


def test_it_is_told_once_a_second_of_measurements() -> None:
    meter = Meter()
    assert meter.tell() is not None, "the first query tells"
    assert meter.tell() is None
    begun = 7 * TOLD_EVERY_NS
    meter.waited(begun, begun + 1)
    assert meter.tell() is not None
    for i in range(2, 1000):
        meter.waited(begun, begun + i)
        assert meter.tell() is None
    meter.waited(begun, begun + 1 + TOLD_EVERY_NS)
    last = meter.tell()
    assert last is not None
    assert sum(last.round_trips) == 1000


def test_what_was_told_does_not_change_later() -> None:
    meter = Meter()
    before = told(meter)
    meter.waited(0, 1)
    assert sum(before.round_trips) == 0


def test_each_opening_is_counted_and_told_at_once() -> None:
    meter = Meter()
    assert told(meter).breaker_open, "nobody waits for a sidecar never heard of"
    for opened in range(1, 4):
        meter.breaker(is_open=False)
        meter.breaker(is_open=False)
        closed = meter.tell()
        assert closed is not None
        assert (closed.breaker_opened, closed.breaker_open) == (opened - 1, False)
        meter.breaker(is_open=True)
        meter.breaker(is_open=True)
        opening = meter.tell()
        assert opening is not None
        assert (opening.breaker_opened, opening.breaker_open) == (opened, True)


def test_probes_tell_it_and_queries_seldom_do() -> None:
    hook = Hook(0)
    assert hook.probe().telemetry is not None
    hook.choose("a")  # nothing is known to be known yet
    assert hook.queries[-1].telemetry is not None
    for _ in range(20):
        hook.choose("a")
        assert hook.queries[-1].telemetry is None
    assert hook.probe().telemetry is not None
    hook.boot = 2  # a new sidecar knows nothing of us
    hook.choose("a")
    hook.choose("a")
    assert hook.queries[-1].telemetry is not None


def test_answers_and_waits_in_vain_are_measured_and_silence_is_not() -> None:
    with short_directory() as folder:
        endpoint = f"ipc://{folder}/q"
        with Scripted(endpoint) as peer, hooked(endpoint, deadline_ms=LONG_MS) as hook:
            hook.meet()
            first = told(hook.client.meter)
            assert sum(first.round_trips) == 1
            assert (first.breaker_open, first.breaker_opened) == (False, 0)
            assert 0 < first.round_trip_ns < LONG_MS * 10**6
            peer.script = lambda asked: [b"not msgpack"]
            assert hook.ask() == "malformed"
            assert sum(told(hook.client.meter).round_trips) == 2, "an answer that is none came too"
        with Scripted(endpoint) as peer, hooked(endpoint, deadline_ms=SHORT_MS) as hook:
            hook.meet()
            peer.script = silent
            before = told(hook.client.meter)
            assert hook.ask() == "deadline"
            waited = told(hook.client.meter)
            assert sum(waited.round_trips) == sum(before.round_trips) + 1
            assert waited.round_trip_ns > before.round_trip_ns
            assert (waited.breaker_open, waited.breaker_opened) == (True, before.breaker_opened + 1)
            assert hook.ask() == "breaker_open"
            assert told(hook.client.meter) == waited
            peer.script = well_behaved
            hook.meet()
            assert not told(hook.client.meter).breaker_open
