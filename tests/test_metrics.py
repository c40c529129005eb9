"""Metrics: each counter shows what was decided, every label set is bounded, the text parses."""

import re

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar import metrics, wire
from sidecar.dispatcher import Dispatcher
from sidecar.hashing import key_hash
from sidecar.metrics import BUCKETS_US, PREFIX, Health, Timings
from sidecar.policies import Reason, make_policy
from sidecar.wire import RequestFacts
from tests.support import (
    INSTANCE,
    STALE_SECONDS,
    Server,
    key_preferring,
    keyed,
    keyless,
    load_up,
    make_dispatcher,
    order_of,
    query,
    report,
)
from tests.test_dispatcher import Bad

REASONS = {value for name, value in vars(Reason).items() if name.isupper()}
KEY = key_preferring(3, range(8))
SECOND, THIRD = order_of(key_hash(KEY), range(8))[1:3]


def exposition(dispatcher: Dispatcher, health: Health | None = None, now: float = 0.0) -> str:
    families = metrics.collect(dispatcher, health or Health(), now)
    return b"".join(family.exposition() for family in families).decode()


def samples(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Series by name (without our prefix), by label values: instance, then by label name."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            names = sorted(sample.labels, key=lambda name: (name != "instance", name))
            labels = tuple(sample.labels[name] for name in names)
            series = found.setdefault(sample.name.removeprefix(PREFIX), {})
            assert labels not in series, f"{sample.name}{labels} twice"
            series[labels] = sample.value
    return found


def everything() -> tuple[Dispatcher, dict[str, int]]:
    """A dispatcher that decided for every reason, and how often for each."""
    dispatcher = make_dispatcher(min_load_gap=0.0)
    load_up(dispatcher, [0, 0, 0, 9, 0, 0, 0, 0])
    by_token = keyless(prefix=key_hash(KEY))
    dispatcher.handle(query([keyed(KEY)] * 2 + [by_token]), 0.0)  # spill, spill, token_spill
    free = key_preferring(SECOND, [rank for rank in range(8) if rank != 3])
    load_up_again(dispatcher, [0] * 8, 2, 0.0)
    dispatcher.handle(query([keyed(KEY), keyless(prefix=key_hash(KEY)), keyless()]), 0.0)
    late = STALE_SECONDS * 1.25
    for seq in range(3, 8):
        for rank in range(8):
            if rank != 3:
                dispatcher.report(report(rank, seq), (seq - 2) * STALE_SECONDS / 4)
    dispatcher.handle(query([keyed(KEY), by_token]), late)
    for name in ("round_robin", "total_requests", "total_tokens"):
        dispatcher.swap_policy(make_policy(name))
        dispatcher.handle(query([keyed(free)]), late)
    dispatcher.swap_policy(make_policy("kv_affinity", {"move_tokens": 5000, "move_ratio": 1}))
    prompt = RequestFacts(b"", 0, 4096, None, list(range(1, 41)))
    first, home = dispatcher.handle(query([prompt] * 2), late).ranks  # placed, prefix_hit
    assert first == home
    dispatcher.report(report(home, 8, running=60), late)
    dispatcher.handle(query([prompt]), late)  # prefix_spill: two ranks hold it now
    replica = msgspec.structs.replace(prompt, routing_key=b"k", last_rank=home, last_age_ms=1)
    dispatcher.handle(query([replica]), late)  # replica_hit
    dispatcher.swap_policy(Bad(None))
    dispatcher.handle(query([keyed(free)]), late)
    once = dict.fromkeys(REASONS, 1)
    return dispatcher, once | {"spill": 2}


def load_up_again(dispatcher: Dispatcher, loads: list[int], seq: int, now: float) -> None:
    for rank, running in enumerate(loads):
        dispatcher.report(report(rank, seq, running=running), now)


def test_every_reason_is_a_label_value_one_for_one() -> None:
    dispatcher, expected = everything()
    series = samples(exposition(dispatcher))["decisions_total"]
    seen: dict[str, float] = {}
    for (instance, policy, reason), count in series.items():
        assert instance == INSTANCE
        assert policy
        seen[reason] = seen.get(reason, 0) + count
    assert seen == expected


def test_spills_hits_and_fallbacks() -> None:
    dispatcher, _ = everything()
    series = samples(exposition(dispatcher))
    spills = series["spills_total"]
    assert sum(spills.values()) == 6  # 2 spills, a token spill, 2 stale skips, a prefix spill
    of_third = {target: n for (_, source, target), n in spills.items() if source == "3"}
    assert sum(of_third.values()) == 5
    assert set(of_third) <= {str(SECOND), str(THIRD)}
    hits = series["affinity_hits_total"]
    kinds = ("routing_key", "token_prefix", "prefix_blocks", "replica")
    assert hits == {(INSTANCE, kind): 1 for kind in kinds}
    assert series["fallbacks_total"] == {(INSTANCE,): 1}
    assert series["queries_total"] == {(INSTANCE,): 10}
    assert series["policy_info"] == {("bad", "active"): 1}
    assert series["policy_version"] == {(): 6}


def test_loads_of_each_rank() -> None:
    dispatcher, server = make_dispatcher(), Server(ranks=3)
    for rank in (0, 1):
        dispatcher.report(report(rank, running=2, waiting=3, tokens=70, capacity_tokens=900), 1.0)
    for _ in range(4):
        server.send(1, 5)
    dispatcher.handle(server.query(ranks=[0, 1], sent=[0, 4], sent_tokens=[0, 20]), 1.0)
    dispatcher.handle(server.query(), 1.0)
    dispatcher.handle(server.query(ranks=[0, 1], sent=[0, 4], sent_tokens=[0, 20]), 1.0)
    series = samples(exposition(dispatcher, now=3.5))
    one, gone = (INSTANCE, "1"), (INSTANCE, "2")
    assert series["load_requests"][one] == 2 + 3 + 4
    assert series["load_tokens"][one] == 70 + 20
    assert (series["running_requests"][one], series["waiting_requests"][one]) == (2, 3)
    assert series["in_flight_requests"][one] == 4
    assert series["sent_requests_total"][one] == 4
    assert series["capacity_tokens"][one] == 900
    assert series["report_age_seconds"][one] == 2.5
    assert (series["rank_live"][one], series["rank_live"][gone]) == (1, 0)
    assert gone not in series["report_age_seconds"]


def test_a_decision_shows_before_the_next_query_confirms_it() -> None:
    dispatcher = make_dispatcher()
    load_up(dispatcher, [0] * 8)
    dispatcher.handle(query([keyed(KEY)]), 0.0)
    series = samples(exposition(dispatcher))
    assert series["in_flight_requests"][INSTANCE, "3"] == 1
    assert series["load_requests"][INSTANCE, "3"] == 1


def test_histogram() -> None:
    times = Timings()
    durations = [0, 1999, 2000, 2001, 4_999, 60_000, 20_000_000, 20_000_001, 10**12]
    for ns in durations:
        times.observe(ns)
    health = Health()
    health.query_time = times
    series = samples(exposition(make_dispatcher(), health))
    buckets = series["query_seconds_bucket"]
    assert len(buckets) == len(BUCKETS_US) + 1
    for (bound,), count in buckets.items():
        limit = float(bound)
        assert count == sum(ns / 1e9 <= limit * (1 + 1e-12) for ns in durations)
    assert buckets["+Inf",] == series["query_seconds_count"][()] == len(durations)
    assert series["query_seconds_sum"][()] == pytest.approx(sum(durations) / 1e9)


def test_process_counters() -> None:
    health = Health()
    health.rejected["query", "version"] += 2
    health.reports, health.policy_errors = 7, 3
    health.reload_failures, health.last_reload_ok = 1, False
    series = samples(exposition(make_dispatcher(), health))
    assert series["rejected_messages_total"] == {("version", "query"): 2}
    assert series["load_reports_total"] == {(): 7}
    assert series["policy_errors_total"] == {(): 3}
    assert series["reload_failures_total"] == {(): 1}
    assert series["last_reload_successful"] == {(): 0}


@pytest.mark.parametrize("name", ["host:30000", 'a"b\\c', "line\nbreak", "é🦊", "{x}"])
def test_odd_names_parse(name: str) -> None:
    dispatcher = make_dispatcher()
    about = {"sglang": name, "hook": name, "unheard": "of"}
    dispatcher.handle(query([keyed(KEY)], instance=name, about=about), 0.0)
    series = samples(exposition(dispatcher))
    assert (name, "prefix_affinity", "affinity_hit") in series["decisions_total"]
    assert list(series["instance_info"]) == [(name, name, "unknown", "unknown", name)]


def test_names_follow_the_conventions() -> None:
    dispatcher, _ = everything()
    health = Health()
    health.rejected["query", "version"] += 1
    for family in text_string_to_metric_families(exposition(dispatcher, health)):
        assert re.fullmatch(rf"{PREFIX}[a-z][a-z_]*[a-z]", family.name)
        assert family.documentation.endswith(".")
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        else:
            assert not family.name.endswith("_total")
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        for sample in family.samples:
            assert all(re.fullmatch("[a-z_]+", label) for label in sample.labels)


def test_causes_of_refusals_are_label_values() -> None:
    assert all(re.fullmatch("[a-z0-9_]+", cause) for cause in wire.REFUSALS)
    assert len(set(wire.REFUSALS)) == len(wire.REFUSALS)


def test_status_is_json() -> None:
    dispatcher, _ = everything()
    told = msgspec.json.decode(msgspec.json.encode(metrics.status(dispatcher, Health(), 1.0)))
    assert told["policy"] == "bad"
    (instance,) = told["instances"]
    assert instance["instance"] == INSTANCE
    assert [rank["rank"] for rank in instance["ranks"]] == list(range(8))
    assert "spill" in str(instance["decisions"])
