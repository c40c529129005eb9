"""What peers may say at most: extremes end in whole answers, names in bounded labels."""

import json
import logging

import msgspec
import pytest

from sidecar import metrics, wire
from sidecar.dispatcher import Dispatcher
from sidecar.errors import PeerError
from sidecar.logs import JsonFormatter, TextFormatter
from sidecar.metrics import Health
from sidecar.policies import REGISTRY
from sidecar.tally import MAX_PAIRS, Tally
from sidecar.wire import MAX_RANKS, LoadReport, Query
from tests.support import INSTANCE, keyed, make_dispatcher, query, report

MOST = 1 << 62
"""Of `wire.Count`."""
COUNTS = (
    *("received", "received_tokens", "running", "waiting", "tokens", "capacity_tokens"),
    *("max_running", "waiting_uncached_tokens", "prefilling_tokens", "admitted_tokens"),
    *("cached_tokens", "flushes", "recent_uncached_tokens"),
)


def largest_report(rank: int, **changes: int) -> LoadReport:
    return report(rank, MOST, epoch=MOST, **dict.fromkeys(COUNTS, MOST) | changes)


def largest_query(keys: int, sent: int, **changes: object) -> Query:
    facts = [
        wire.RequestFacts(b"k%d" % key, 0, MOST, (1 << 64) - 1, [1, 2, 3], 7, MOST)
        for key in range(keys)
    ]
    past = [wire.Past(facts[0], 3, MOST)] if facts else []
    telemetry = wire.Telemetry([MOST] * (len(wire.ROUND_TRIP_US) + 1), MOST, MOST, True)
    fields: dict[str, object] = {"seq": MOST, "epoch": MOST, "sent": [sent] * 8}
    fields |= {"sent_tokens": [sent] * 8, "history": past, "telemetry": telemetry}
    fields |= {"bypassed": {"x": MOST}, "abstained": {"y": MOST}, "about": {"a": "b" * 256}}
    return query(facts, **(fields | changes))


def exposition(dispatcher: Dispatcher, now: float) -> bytes:
    families = metrics.collect(dispatcher, Health(), now)
    return b"".join(family.exposition() for family in families)


@pytest.mark.parametrize("policy", REGISTRY)
def test_the_largest_numbers_are_decided_and_shown(policy: str) -> None:
    """Sums of them leave 64 bits, which neither JSON nor Prometheus must mind."""
    dispatcher, health = make_dispatcher(policy), Health()
    for rank in range(8):
        dispatcher.report(largest_report(rank), 0.0)
    for step in range(12):
        asked = largest_query(3, MOST if step % 2 else 0)
        reply = dispatcher.handle(wire.decode_query(wire.encode(asked)), 0.1 * step)
        assert set(reply.ranks) <= set(range(8))
        wire.decode_answer(wire.encode(reply))
    for now in (2.0, 100.0):
        told = json.loads(b"".join(metrics.status_parts(dispatcher, health, now)))
        assert len(told["instances"][0]["ranks"]) == 8
        assert exposition(dispatcher, now).count(b"\n") > 100
    with pytest.raises(PeerError):  # what came before is not undone by who claims less
        dispatcher.report(report(0), 1.0)


def test_instances_ranks_and_their_series_are_bounded() -> None:
    dispatcher = make_dispatcher("kv_affinity", max_instances=2)

    def refused(one: LoadReport) -> bool:
        try:
            dispatcher.report(one, 0.0)
        except PeerError as error:
            assert error.cause in ("field", "too_many_instances")
            return True
        return False

    flood = (report(rank, instance=f"i{i}") for i in range(6) for rank in range(0, 1 << 16, 17))
    refusals = sum(map(refused, flood))
    assert refusals == 6 * 3856 - 2 * MAX_RANKS
    assert set(dispatcher.budget.instances) == {"i0", "i1"}
    lines = exposition(dispatcher, 0.0).count(b"\n")
    assert lines < 2 * MAX_RANKS * 20, "series of each rank, of two instances"


def test_pairs_of_ranks_are_bounded() -> None:
    tally = Tally()
    for preferred in range(100):
        for chosen in range(100):
            tally.count_spill(preferred, chosen)
    assert len(tally.spills) == MAX_PAIRS + 1
    assert sum(tally.spills.values()) == 10_000
    assert tally.spills[-1, -1] == 10_000 - MAX_PAIRS


def test_words_of_a_peer_are_no_labels() -> None:
    """What it counts by is ours or `other`; what it tells of itself is a fixed list."""
    dispatcher = make_dispatcher()
    for number in range(0, 3200, 32):
        words = {f"word{n}": 1 for n in range(number, number + 32)}
        about = {word: "spoken" for word in words}
        dispatcher.handle(query([], bypassed=words, abstained=words, about=about), 0.0)
    text = exposition(dispatcher, 0.0)
    assert b"word" not in text and b"spoken" not in text
    assert text.count(b"_bypassed_total{") < 30
    assert len(dispatcher.tallies[INSTANCE].bypassed) == 32


def test_a_report_from_nowhere_lasts_as_long_as_it_is_repeated() -> None:
    """The worst that reports can do: keep the true ones out, until they cease for stale_seconds."""
    dispatcher = make_dispatcher()
    dispatcher.report(report(0, 1, epoch=10, running=3), 0.0)
    dispatcher.report(largest_report(0), 0.5)
    with pytest.raises(PeerError, match="older process"):
        dispatcher.report(report(0, 2, epoch=10, running=3), 1.0)
    dispatcher.report(report(0, 3, epoch=10, running=3), 6.0)
    reply = dispatcher.handle(query([keyed("k")]), 6.1)
    assert len(reply.ranks) == 1
    assert dispatcher.budget.instances[INSTANCE].states[0].report.running == 3


def test_so_does_a_query_from_nowhere() -> None:
    dispatcher = make_dispatcher()
    dispatcher.handle(query([keyed("k")], epoch=10), 0.0)
    dispatcher.handle(largest_query(1, 0), 0.5)
    with pytest.raises(PeerError) as caught:
        dispatcher.handle(query([keyed("k")], epoch=10), 1.0)
    assert caught.value.cause == "older_controller"
    assert len(dispatcher.handle(query([keyed("k")], epoch=10), 6.0).ranks) == 1


def test_every_field_of_a_report_is_one_of_these() -> None:
    """A new field is added to COUNTS, or is bounded in another way."""
    others = {"version", "instance", "rank", "epoch", "seq"}
    assert {field.name for field in msgspec.structs.fields(LoadReport)} - others == set(COUNTS)


@pytest.mark.parametrize("form", [TextFormatter("%(message)s"), JsonFormatter()])
def test_what_a_peer_named_steers_no_terminal_that_shows_a_log(form: logging.Formatter) -> None:
    controls = "".join(map(chr, [*range(32), *range(127, 160), 0x2028, 0x2029]))
    record = logging.LogRecord("x", logging.WARNING, "", 0, "name %s", (controls,), None)
    line = form.format(record)
    assert not set(line) & set(controls)
    if isinstance(form, JsonFormatter):
        assert json.loads(line)["event"] == f"name {controls}"
