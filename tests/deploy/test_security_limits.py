"""What ends the process leaves room for what it may take before it helps itself."""

import re

from sidecar.ceiling import GROWTH_BYTES
from tests.deploy.manifests import container, pod_templates
from tests.deploy.unit import SERVICE, settings

OWN_BYTES = 256 << 20
"""A sidecar with the largest index of one server, and what comes between two looks."""
UNITS = {"G": 30, "Gi": 30, "M": 20, "Mi": 20}


def in_bytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()
    return int(number) << UNITS[unit]


def test_the_ceiling_is_below_what_ends_the_process() -> None:
    (unit,) = settings(SERVICE)["MemoryMax"]
    pod = container(pod_templates("single-node")["pod"], "dp-sidecar")["resources"]["limits"]
    for limit in (unit, pod["memory"]):
        assert in_bytes(limit) >= GROWTH_BYTES + OWN_BYTES
