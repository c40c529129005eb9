"""Every family that the sidecar exports, with all that may be at work."""

import re
from functools import cache

from sidecar import metrics
from sidecar.metrics import Health
from tests.support import make_dispatcher


@cache
def exported() -> dict[str, str]:
    """Full name -> type."""
    families = metrics.collect(make_dispatcher(), Health(), 0.0)
    text = b"".join(family.exposition() for family in families).decode()
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


@cache
def labels() -> dict[str, tuple[str, ...]]:
    """Full name -> labels, without those of histograms."""
    families = metrics.collect(make_dispatcher(), Health(), 0.0)
    return {family.name: tuple(family.labels) for family in families}
