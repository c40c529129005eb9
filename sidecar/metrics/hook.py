"""Series of what the hook told of itself: its versions, what it decided alone, its round trips.

All of it is the word of a peer: causes that nobody knows count as `other`, and the sizes of the
rest are bounded by the protocol.
"""

from collections import Counter
from collections.abc import Iterator

from sidecar.dispatcher import Dispatcher
from sidecar.metrics.families import Family, counter, gauge, label_text
from sidecar.wire import ROUND_TRIP_US

BYPASS_CAUSES = frozenset(
    {
        "unreachable",
        "handshake",
        "deadline",
        "breaker_open",
        "malformed",
        "mismatched",
        "refused",
        "invalid_rank",
        "session",
        "hook_error",
        "no_live_rank",
        "oversized",
        "version",
    }
)
ABSTAIN_CAUSES = frozenset({"pinned", "health_check", "warm_up", "bootstrap_room"})


def hook_families(dispatcher: Dispatcher, now: float) -> Iterator[Family]:
    """Families of each hook that has asked. now: monotonic seconds."""
    bypassed = counter(
        "bypassed", "Requests that the hook decided without the sidecar.", ("instance", "cause")
    )
    abstained = counter(
        "abstained", "Requests that the hook left to SGLang on purpose.", ("instance", "cause")
    )
    info = gauge(
        "instance_info",
        "A connected SGLang controller with our hook; the value is always 1.",
        ("instance", "sglang_version", "hook_version", "python_version", "load_balance_method"),
    )
    for name, tally in dispatcher.tallies.items():
        for family, told, known in (
            (bypassed, tally.bypassed, BYPASS_CAUSES),
            (abstained, tally.abstained, ABSTAIN_CAUSES),
        ):
            # All from the start: of a series that begins with its first event no rate is known.
            bounded = Counter(dict.fromkeys(sorted(known), 0))
            for cause, count in told.items():
                bounded[cause if cause in known else "other"] += count
            for cause, count in bounded.items():
                family.add([name, cause], count)
        about = tally.about
        fields = ("sglang", "hook", "python", "method")
        info.add([name, *(about.get(field, "unknown") for field in fields)], 1)
    yield from (bypassed, abstained, info)
    yield from _telemetry(dispatcher)
    yield _query_age(dispatcher, now)


def _telemetry(dispatcher: Dispatcher) -> Iterator[Family]:
    trips = Family(
        "histogram",
        "hook_round_trip_seconds",
        "Time that queries of the hook waited for their answer, or in vain.",
        ("instance",),
    )
    opened = counter(
        "hook_breaker_opened",
        "Times that the hook stopped waiting for answers, none having come in time.",
        ("instance",),
    )
    is_open = gauge(
        "hook_breaker_open", "1 if the hook waited for no answers when it last told.", ("instance",)
    )
    for name, tally in dispatcher.tallies.items():
        told = tally.telemetry
        if told is not None:
            at = label_text(("instance",), (name,))
            trips.put_buckets(at, ROUND_TRIP_US, told.round_trips, told.round_trip_ns)
            opened.add([name], told.breaker_opened)
            is_open.add([name], told.breaker_open)
    yield from (trips, opened, is_open)


def _query_age(dispatcher: Dispatcher, now: float) -> Family:
    age = gauge(
        "instance_last_query_age_seconds",
        "Since the instance last asked for anything.",
        ("instance",),
    )
    for instance in dispatcher.budget.instances.values():
        if instance.epoch is not None:
            age.add([instance.name], max(0.0, now - instance.view.now))
    return age
