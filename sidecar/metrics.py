"""Prometheus series, read from the plain counters of the core when somebody scrapes.

The hot path only adds to integers; names, labels and help are here. Every label set is bounded:
instances by `max_instances`, ranks by `wire.MAX_RANKS`, reasons and causes by their enumerations.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from sidecar import __version__
from sidecar.budget import Instance
from sidecar.dispatcher import Dispatcher
from sidecar.policies import Reason

PREFIX = "sglang_dp_sidecar_"
# Microseconds: a decision takes 5 to 60; a millisecond and more means a starved process.
BUCKETS_US = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 20000)
# What a peer may name as a cause; anything else counts as "other", so labels stay bounded.
BYPASS_CAUSES = frozenset(
    {
        "unreachable",
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
_HITS = (
    (Reason.AFFINITY_HIT, "routing_key"),
    (Reason.TOKEN_AFFINITY_HIT, "token_prefix"),
    (Reason.PREFIX_HIT, "prefix_blocks"),
    (Reason.REPLICA_HIT, "replica"),
)


class Timings:
    """Histogram of seconds with microsecond buckets; `observe` costs one bisection."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_US) + 1)
        self.total_ns = 0

    def observe(self, ns: int) -> None:
        self.counts[bisect_left(BUCKETS_US, ns / 1000)] += 1
        self.total_ns += ns

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative buckets as prometheus_client wants them."""
        bounds = [f"{us / 1e6:g}" for us in BUCKETS_US] + ["+Inf"]
        cumulative, buckets = 0, []
        for bound, count in zip(bounds, self.counts, strict=True):
            cumulative += count
            buckets.append((bound, float(cumulative)))
        return buckets


class Health:
    """What the process itself counts."""

    def __init__(self) -> None:
        self.query_time = Timings()
        self.rejected: Counter[tuple[str, str]] = Counter()
        """(socket, cause) -> messages."""
        self.reports = 0
        self.policy_errors = 0
        self.reload_failures = 0
        self.last_reload_ok = True


def collect(dispatcher: Dispatcher, health: Health, now: float) -> Iterator[Metric]:
    """Every family, one at a time, so that the server can serve queries in between."""
    yield from _process(dispatcher, health)
    yield from _decisions(dispatcher)
    yield from _from_hook(dispatcher)
    yield from _loads(dispatcher, now)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _process(dispatcher: Dispatcher, health: Health) -> Iterator[Metric]:
    yield InfoMetricFamily(PREFIX + "build", "This sidecar.", value={"version": __version__})
    policy = _gauge("policy_info", "The policy in force; the value is always 1.", ("policy",))
    policy.add_metric([dispatcher.policy.name], 1)
    yield policy
    version = _gauge("policy_version", "Policies that this process has run, the first being 1.")
    version.add_metric([], dispatcher.policy_version)
    yield version
    times = HistogramMetricFamily(
        PREFIX + "query_seconds", "Time to decode, decide and encode one query (maybe a batch)."
    )
    times.add_metric([], health.query_time.buckets(), health.query_time.total_ns / 1e9)
    yield times
    reports = _counter("load_reports", "Load reports taken in.")
    reports.add_metric([], health.reports)
    yield reports
    rejected = _counter("rejected_messages", "Messages refused.", ("socket", "cause"))
    for (socket, cause), count in health.rejected.items():
        rejected.add_metric([socket, cause], count)
    yield rejected
    errors = _counter("policy_errors", "Requests whose policy failed; fewest requests decided.")
    errors.add_metric([], health.policy_errors)
    yield errors
    failures = _counter("reload_failures", "Reloads refused; the settings before stayed in force.")
    failures.add_metric([], health.reload_failures)
    yield failures
    ok = _gauge("last_reload_successful", "1 unless the last reload was refused.")
    ok.add_metric([], health.last_reload_ok)
    yield ok


def _decisions(dispatcher: Dispatcher) -> Iterator[Metric]:
    decisions = _counter("decisions", "Requests decided.", ("instance", "policy", "reason"))
    hits = _counter(
        "affinity_hits", "Requests sent to the preferred rank of their key.", ("instance", "key")
    )
    fallbacks = _counter("fallbacks", "Requests without any affinity key.", ("instance",))
    spills = _counter(
        "spills",
        "Requests kept off their preferred rank by the guard or by stale reports.",
        ("instance", "from_rank", "to_rank"),
    )
    unguarded = _counter(
        "unguarded_decisions", "Requests decided while no load was known.", ("instance",)
    )
    queries = _counter("queries", "Queries answered, probes included.", ("instance",))
    for name, tally in dispatcher.tallies.items():
        reasons: Counter[str] = Counter()
        for policy, counts in tally.decisions.items():
            for reason, count in counts.items():
                decisions.add_metric([name, policy, reason], count)
            reasons += counts
        for reason, key in _HITS:
            hits.add_metric([name, key], reasons[reason])
        fallbacks.add_metric([name], reasons[Reason.FALLBACK])
        for (source, target), count in tally.spills.items():
            pair = ("other", "other") if source < 0 else (str(source), str(target))
            spills.add_metric([name, *pair], count)
        unguarded.add_metric([name], tally.unguarded)
        queries.add_metric([name], tally.queries)
    yield from (decisions, hits, fallbacks, spills, unguarded, queries)


def _from_hook(dispatcher: Dispatcher) -> Iterator[Metric]:
    bypassed = _counter(
        "bypassed", "Requests that the hook decided without the sidecar.", ("instance", "cause")
    )
    abstained = _counter(
        "abstained", "Requests that the hook left to SGLang on purpose.", ("instance", "cause")
    )
    info = _gauge(
        "instance_info",
        "A connected SGLang controller with our hook; the value is always 1.",
        ("instance", "sglang_version", "hook_version", "python_version", "load_balance_method"),
    )
    for name, tally in dispatcher.tallies.items():
        for family, told, known in (
            (bypassed, tally.bypassed, BYPASS_CAUSES),
            (abstained, tally.abstained, ABSTAIN_CAUSES),
        ):
            bounded: Counter[str] = Counter()
            for cause, count in told.items():
                bounded[cause if cause in known else "other"] += count
            for cause, count in bounded.items():
                family.add_metric([name, cause], count)
        about = tally.about
        fields = ("sglang", "hook", "python", "method")
        info.add_metric([name, *(about.get(field, "unknown") for field in fields)], 1)
    yield from (bypassed, abstained, info)


def _loads(dispatcher: Dispatcher, now: float) -> Iterator[Metric]:
    labels = ("instance", "dp_rank")
    load = _gauge("load_requests", "Load of a rank: running + waiting + in flight.", labels)
    running = _gauge("running_requests", "Running, as last reported.", labels)
    waiting = _gauge("waiting_requests", "Waiting, as last reported.", labels)
    sent = _counter(
        "sent_requests", "Requests sent to the rank by any path, as the hook counts.", labels
    )
    flight = _gauge("in_flight_requests", "Sent and not yet received by the rank.", labels)
    tokens = _gauge("load_tokens", "KV tokens in use + waiting + in flight.", labels)
    capacity = _gauge("capacity_tokens", "KV tokens that the rank can hold.", labels)
    age = _gauge("report_age_seconds", "Since the last load report of the rank.", labels)
    live = _gauge("rank_live", "1 if the controller counts the rank as live.", labels)
    for instance in dispatcher.budget.instances.values():
        instance.sync()
        for rank, state in sorted(instance.states.items()):
            at = [instance.name, str(rank)]
            live.add_metric(at, rank in instance.view.ranks)
            report, (requests, prompt) = state.report, state.in_flight()
            sent.add_metric(at, state.sent)
            flight.add_metric(at, requests)
            if report is None:
                load.add_metric(at, requests)
                continue
            load.add_metric(at, report.running + report.waiting + requests)
            running.add_metric(at, report.running)
            waiting.add_metric(at, report.waiting)
            tokens.add_metric(at, report.tokens + prompt)
            capacity.add_metric(at, report.capacity_tokens)
            age.add_metric(at, max(0.0, now - state.reported_at))
    yield from (load, running, waiting, sent, flight, tokens, capacity, age, live)


def status(dispatcher: Dispatcher, health: Health, now: float) -> dict[str, object]:
    """The same at a glance, for `/status`: policy, instances, ranks."""
    return {
        "version": __version__,
        "policy": dispatcher.policy.name,
        "policy_version": dispatcher.policy_version,
        "policy_params": dispatcher.policy.params,
        "last_reload_ok": health.last_reload_ok,
        "instances": [
            _instance_status(dispatcher, instance, now)
            for instance in dispatcher.budget.instances.values()
        ],
    }


def _instance_status(dispatcher: Dispatcher, instance: Instance, now: float) -> dict[str, object]:
    tally = dispatcher.tallies.get(instance.name)
    view = instance.view
    instance.sync()
    ranks = []
    for rank, state in sorted(instance.states.items()):
        report = state.report
        ranks.append(
            {
                "rank": rank,
                "live": rank in view.ranks,
                "running": report.running if report else None,
                "waiting": report.waiting if report else None,
                "in_flight": state.in_flight()[0],
                "load": (report.running + report.waiting if report else 0) + state.in_flight()[0],
                "sent": state.sent,
                "received": report.received if report else None,
                "report_age_seconds": round(now - state.reported_at, 3) if report else None,
            }
        )
    return {
        "instance": instance.name,
        "about": tally.about if tally else {},
        "queries": tally.queries if tally else 0,
        "decisions": tally.decisions if tally else {},
        "bypassed": tally.bypassed if tally else {},
        "abstained": tally.abstained if tally else {},
        "ranks": ranks,
    }
