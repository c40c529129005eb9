"""What a soak found, and whether it is within the bounds.

What fills up by design in a process must be full, and replaced as often as its dictionaries settle
for, before its memory is judged: CPython rebuilds a full one that is in use, the first time with
twice the slots and each time beside the old one, and the memory for both stays with the process.
Then memory is judged in two ways. An incarnation that lived long enough is judged by itself: over
the last two thirds of its life, SETTLED replacements at the least gone by, the resident memory must
stay within FLAT_MIB, by its range and by the growth of a line fitted to it. And all incarnations of
the sidecar that were REBUILT are compared with one another at equal age, the greatest that all of
them reached: their memory must be alike within FLAT_MIB, the first's and that of one that met a
controller and ranks with a long past.
"""

from collections import defaultdict
from statistics import linear_regression
from typing import Any, NamedTuple

from bench.soak.world import Check, Usage

FLAT_MIB = 2.0
REBUILT, SETTLED = 2.0, 4.0
"""Times that what fills up was filled: the first rebuild lies before the one, the second, which
finds the memory of the table before it too small, before the other."""
FEWEST = 12
"""Samples that a judgement needs."""


class Row(NamedTuple):
    """One sample."""

    at: float
    """Seconds since the start."""
    ages: dict[str, float]
    """Seconds since each process started."""
    usage: dict[str, Usage]
    told: dict[str, Any]
    """Of the controller, see Controller.told."""
    blocks: int
    """Memory blocks that the schedulers' Python holds."""
    filled: dict[str, float]
    """How many times over what fills up by design in a process was filled."""
    rate: float
    """Requests a second since the sample before."""


class Memory(NamedTuple):
    """Of one incarnation over the judged part of its life."""

    process: str
    samples: int
    seconds: float
    mib: float
    """At the end."""
    range_mib: float
    growth_mib: float
    """Of the fitted line from the first to the last sample."""
    descriptors_leaked: int
    """By how much the least number in the last half exceeds that in the first half."""
    threads_grown: int


def lives(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each incarnation."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        for name in row.usage:
            found[name].append(row)
    return found


def judge(name: str, rows: list[Row]) -> Memory | None:
    """None: it did not live long enough."""
    last = rows[-1].ages[name]
    judged = [row for row in rows if row.ages[name] > last / 3 and row.filled[name] >= SETTLED]
    if len(judged) < FEWEST:
        return None
    ages = [row.ages[name] for row in judged]
    sizes = [row.usage[name].mib for row in judged]
    half = len(judged) // 2
    files = [row.usage[name].descriptors for row in judged]
    threads = [row.usage[name].threads for row in judged]
    slope = linear_regression(ages, sizes).slope
    return Memory(
        name,
        len(judged),
        round(ages[-1] - ages[0], 1),
        sizes[-1],
        round(max(sizes) - min(sizes), 2),
        round(slope * (ages[-1] - ages[0]), 2),
        max(0, min(files[half:]) - min(files[:half])),
        max(0, min(threads[half:]) - min(threads[:half])),
    )


def at_equal_age(found: dict[str, list[Row]]) -> tuple[float, dict[str, float]]:
    """The age, and the sidecar's MiB then, of each incarnation that was judged by that age."""
    rebuilt = {}
    for name, rows in found.items():
        if name.startswith("sidecar"):
            ages = [row.ages[name] for row in rows if row.filled[name] >= REBUILT]
            if len(ages) > 1:
                rebuilt[name] = (ages[0], ages[-1])
    if len(rebuilt) < 2:
        return 0.0, {}
    age = min(last for _, last in rebuilt.values())
    sizes = {}
    for name, (first, _) in rebuilt.items():
        if first <= age:
            apart = [abs(row.ages[name] - age) for row in found[name]]
            sizes[name] = found[name][apart.index(min(apart))].usage[name].mib
    return round(age, 1), sizes


def summary(rows: list[Row], checks: list[Check], counts: dict[str, int]) -> dict[str, Any]:
    """All figures."""
    found = lives(rows)
    judged = [memory for name, each in found.items() if (memory := judge(name, each))]
    age, sizes = at_equal_age(found)
    last = [each[-1].told for name, each in found.items() if name.startswith("controller")]
    total = {key: sum(told[key] for told in last) for key in ("asked", "stock", "lost", "errors")}
    causes: dict[str, int] = defaultdict(int)
    for told in last:
        for cause, count in told["bypassed"].items():
            causes[cause] += count
    rates = [row.rate for row in rows if row.rate]
    return {
        **total,
        "requests_per_second": round(sum(rates) / len(rates)) if rates else 0,
        "remote_share": round(1 - sum(causes.values()) / max(1, total["asked"]), 5),
        "alone_by_cause": dict(causes),
        "longest_dispatch_ms": max((row.told["longest_ms"] for row in rows), default=0),
        "events": counts,
        "checks": len(checks),
        "drift": sum(check.drift for check in checks),
        "held_requests": sum(check.held for check in checks),
        "held_off": sum(check.held_off for check in checks),
        "held_off_checks": sum(check.held_off > 0 for check in checks),
        "exact_after_s_max": max((check.seconds for check in checks), default=0),
        "wrong": [check._asdict() for check in checks if check.drift],
        "memory": [memory._asdict() for memory in judged],
        "sidecar_mib_at_equal_age": {"age_s": age, **sizes},
    }


def broken(found: dict[str, Any]) -> list[str]:
    """What is out of bounds, in words."""
    out = [f"{found[what]} {what}" for what in ("lost", "errors") if found[what]]
    if found["drift"]:
        out.append(f"the load view was off by {found['drift']} at {len(found['wrong'])} checks")
    for memory in found["memory"]:
        name = memory["process"]
        bounds = {"range_mib": FLAT_MIB, "growth_mib": FLAT_MIB}
        bounds |= {"descriptors_leaked": 0, "threads_grown": 0}
        out += [
            f"{name}: {what} is {memory[what]}, over {bound:g}"
            for what, bound in bounds.items()
            if memory[what] > bound
        ]
    sizes = list(found["sidecar_mib_at_equal_age"].values())[1:]
    if sizes and max(sizes) - min(sizes) > FLAT_MIB:
        apart = max(sizes) - min(sizes)
        out.append(f"sidecars of equal age differ by {apart:.2f} MiB, over {FLAT_MIB}")
    return out
