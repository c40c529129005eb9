"""Series of what was decided, for each instance."""

from collections import Counter
from collections.abc import Iterator

from sidecar.dispatcher import Dispatcher
from sidecar.metrics.families import Family, counter, label_text
from sidecar.policies import Reason

_HITS = (
    (Reason.AFFINITY_HIT, "routing_key"),
    (Reason.TOKEN_AFFINITY_HIT, "token_prefix"),
    (Reason.PREFIX_HIT, "prefix_blocks"),
    (Reason.REPLICA_HIT, "replica"),
)


def decision_families(dispatcher: Dispatcher) -> Iterator[Family]:
    """Decisions by reason, and what follows from the reasons."""
    decisions = counter("decisions", "Requests decided.", ("instance", "policy", "reason"))
    hits = counter(
        "affinity_hits", "Requests sent where their cache is, by what told so.", ("instance", "key")
    )
    fallbacks = counter("fallbacks", "Requests without any affinity key.", ("instance",))
    unguarded = counter(
        "unguarded_decisions", "Requests decided while no load was known.", ("instance",)
    )
    queries = counter("queries", "Queries answered, probes included.", ("instance",))
    for name, tally in dispatcher.tallies.items():
        reasons: Counter[str] = Counter()
        for policy, counts in tally.decisions.items():
            for reason, count in counts.items():
                decisions.add([name, policy, reason], count)
            reasons += counts
        for reason, key in _HITS:
            hits.add([name, key], reasons[reason])
        fallbacks.add([name], reasons[Reason.FALLBACK])
        unguarded.add([name], tally.unguarded)
        queries.add([name], tally.queries)
    yield from (decisions, hits, fallbacks, unguarded, queries)
    yield _spills(dispatcher)


def _spills(dispatcher: Dispatcher) -> Family:
    spills = counter(
        "spills",
        "Requests kept off their preferred rank by its load or by stale reports.",
        ("instance", "from_rank", "to_rank"),
    )
    for name, tally in dispatcher.tallies.items():
        at = label_text(("instance",), (name,))
        for (source, target), count in tally.spills.items():
            pair = ("other", "other") if source < 0 else (source, target)
            spills.put(f'{at},from_rank="{pair[0]}",to_rank="{pair[1]}"', count)
    return spills
