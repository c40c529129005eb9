"""Series of the ranks, from their load reports and from what was sent to them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sidecar.budget import Instance
from sidecar.dispatcher import Dispatcher
from sidecar.loads import RankState, is_published
from sidecar.metrics.families import Family, counter, gauge, label_text
from sidecar.metrics.process import Health

_RANK = ("instance", "dp_rank")
# (name, help, field of the last report), as the hook in each scheduler counts them: from its start
# on. SGLang publishes no such figures.
_TOLD_COUNTERS = (
    (
        "admitted_prompt_tokens",
        "Prompt tokens of requests whose prefill began.",
        "admitted_tokens",
    ),
    ("cached_prompt_tokens", "Of those, found in the rank's prefix cache.", "cached_tokens"),
    ("cache_flushes", "Times that the rank's prefix cache was emptied.", "flushes"),
)
_TOLD_GAUGES = (
    ("running_requests", "Running, as last reported.", "running"),
    ("waiting_requests", "Waiting, as last reported.", "waiting"),
    ("capacity_tokens", "KV tokens that the rank can hold.", "capacity_tokens"),
    ("max_running_requests", "Requests that the rank runs at most at once.", "max_running"),
)


def load_families(dispatcher: Dispatcher, now: float) -> Iterator[Family]:
    """Families of each rank and of all ranks of an instance. now: monotonic seconds."""
    instances = list(dispatcher.budget.instances.values())
    for instance in instances:
        instance.sync()
    rows = [
        _Row(label_text(_RANK, (instance.name, str(rank))), rank in instance.view.position, state)
        for instance in instances
        for rank, state in sorted(instance.states.items())
    ]
    yield from _accounted(rows)
    yield from _told(rows, now)
    yield from _spread(instances, now)


class _Row(NamedTuple):
    """A rank."""

    at: str
    """Its labels, as text."""
    live: bool
    state: RankState


def _accounted(rows: list[_Row]) -> Iterator[Family]:
    """What both sides' counters say together."""
    load = gauge("load_requests", "Load of a rank: running + waiting + in flight.", _RANK)
    flight = gauge("in_flight_requests", "Sent and not yet received by the rank.", _RANK)
    tokens = gauge("load_tokens", "KV tokens in use + waiting + in flight.", _RANK)
    for at, _, state in rows:
        requests, prompt = state.in_flight()
        flight.put(at, requests)
        load.put(at, load_of(state))
        if state.report is not None:
            tokens.put(at, state.report.tokens + prompt)
    yield from (load, flight, tokens)
    sent = counter(
        "sent_requests", "Requests sent to the rank by any path, as the hook counts.", _RANK
    )
    live = gauge("rank_live", "1 if the controller counts the rank as live.", _RANK)
    for at, is_live, state in rows:
        sent.put(at, state.sent)
        live.put(at, is_live)
    yield from (sent, live)


def _told(rows: list[_Row], now: float) -> Iterator[Family]:
    """What the last reports say."""
    reported = [(at, state.report) for at, _, state in rows if state.report is not None]
    hooked = [(at, report) for at, report in reported if not is_published(report)]
    for make, table, who in (
        (gauge, _TOLD_GAUGES, reported),
        (counter, _TOLD_COUNTERS, hooked),
    ):
        for name, text, field in table:
            family = make(name, text, _RANK)
            for at, report in who:
                family.put(at, getattr(report, field))
            yield family
    started = gauge(
        "scheduler_start_time_seconds", "Start of the rank's scheduler, since 1970.", _RANK
    )
    for at, report in hooked:
        started.put(at, report.epoch / 1e9)
    yield started
    yield _sources(rows)
    age = gauge("report_age_seconds", "Since the last load report of the rank.", _RANK)
    for at, _, state in rows:
        if state.report is not None:
            age.put(at, max(0.0, now - state.reported_at))
    yield age


def _sources(rows: list[_Row]) -> Family:
    source = gauge(
        "load_source", "Where the rank's load is from; the value is always 1.", (*_RANK, "source")
    )
    for at, _, state in rows:
        if state.source is not None:
            source.put(f'{at},source="{state.source}"', 1)
    return source


def published_families(health: Health) -> Iterator[Family]:
    """What SGLang itself published of its ranks' loads."""
    loads = counter(
        "published_loads", "Loads that SGLang published, by outcome.", ("instance", "outcome")
    )
    for (instance, outcome), count in health.published.items():
        loads.add([instance, outcome], count)
    yield loads


def load_of(state: RankState) -> int:
    """Requests: running + waiting + in flight; what was never reported counts as 0."""
    report = state.report
    return state.in_flight()[0] + (report.running + report.waiting if report is not None else 0)


@dataclass(slots=True)
class Spread:
    """How the load lies over the live ranks of one instance.

    A load is known if the rank has reported within `stale_seconds`.
    """

    live: int
    stale: int
    """Live ranks whose load is not known."""
    idle: int
    """Live ranks that have nothing to do while requests wait on another."""
    imbalance: float | None
    """Largest load over the mean load, of the ranks whose load is known; 1 if none has any; None
    if no load is known."""


def spread(instance: Instance, now: float) -> Spread:
    """The spread at `now`, monotonic seconds; `instance` in sync."""
    live = [instance.states[rank] for rank in instance.view.ranks]
    fresh = [
        state
        for state in live
        if state.report is not None and now - state.reported_at <= instance.stale_seconds
    ]
    loads = [load_of(state) for state in fresh]
    queued = any(state.report.waiting for state in fresh if state.report is not None)
    mean = sum(loads) / len(loads) if loads else 0.0
    return Spread(
        live=len(live),
        stale=len(live) - len(fresh),
        idle=loads.count(0) if queued else 0,
        imbalance=(max(loads) / mean if mean else 1.0) if loads else None,
    )


def _spread(instances: list[Instance], now: float) -> Iterator[Family]:
    label = ("instance",)
    live = gauge("live_ranks", "Ranks that the controller counts as live.", label)
    stale = gauge("stale_ranks", "Live ranks that never reported, or not for stale_seconds.", label)
    idle = gauge(
        "idle_ranks", "Live ranks without any request while requests wait on another.", label
    )
    imbalance = gauge(
        "load_imbalance_ratio",
        "Largest load of a live rank over the mean load; 1 is even.",
        label,
    )
    for instance in instances:
        if instance.epoch is None:
            continue
        now_spread = spread(instance, now)
        at = [instance.name]
        live.add(at, now_spread.live)
        stale.add(at, now_spread.stale)
        idle.add(at, now_spread.idle)
        if now_spread.imbalance is not None:
            imbalance.add(at, now_spread.imbalance)
    yield from (live, stale, idle, imbalance)
