"""Prometheus series, read from the plain counters of the core when somebody scrapes.

The hot path only adds to integers; names, labels and help are here. Every label set is bounded:
instances by `max_instances`, ranks by `wire.MAX_RANKS`, reasons and causes by their enumerations,
policies by those that the operator puts in force.
"""

from collections.abc import Iterator

from sidecar.dispatcher import Dispatcher
from sidecar.metrics.decisions import decision_families
from sidecar.metrics.families import BUCKETS_US, CONTENT_TYPE, PREFIX, Family, Timings
from sidecar.metrics.hook import ABSTAIN_CAUSES, BYPASS_CAUSES, hook_families
from sidecar.metrics.loads import load_families, published_families
from sidecar.metrics.process import Health, process_families
from sidecar.metrics.roles import role_families
from sidecar.metrics.status import status, status_parts

__all__ = (
    "ABSTAIN_CAUSES",
    "BUCKETS_US",
    "BYPASS_CAUSES",
    "CONTENT_TYPE",
    "PREFIX",
    "Family",
    "Health",
    "Timings",
    "collect",
    "status",
    "status_parts",
)


def collect(dispatcher: Dispatcher, health: Health, now: float) -> Iterator[Family]:
    """Every family, one at a time, so that the server can serve queries in between."""
    yield from process_families(dispatcher, health)
    yield from role_families(dispatcher)
    yield from decision_families(dispatcher)
    yield from hook_families(dispatcher, now)
    yield from load_families(dispatcher, now)
    yield from published_families(health)
