"""Counters before and after a run: the sidecar's and SGLang's own, as Prometheus text."""

from typing import Any, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from bench.live.target import TargetError, fetch, internal_states, server_info
from sidecar.metrics import PREFIX

Labels: TypeAlias = tuple[tuple[str, str], ...]
Samples: TypeAlias = dict[tuple[str, Labels], float]
"""(name, labels but for the instance's) -> value."""
QUANTILES = (0.5, 0.9, 0.99)


def read_sidecar(text: str, instance: str) -> Samples:
    """The sidecar's samples of one instance and of none, names without our prefix."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            labels = dict(each.labels)
            if each.name.startswith(PREFIX) and labels.pop("instance", instance) == instance:
                key = each.name.removeprefix(PREFIX), tuple(sorted(labels.items()))
                samples[key] = each.value
    return samples


def _rise(before: Samples, after: Samples, name: str) -> dict[Labels, float] | None:
    """What each sample of a counter rose by; None: it fell, so its process was restarted."""
    rises = {
        labels: value - before.get((key, labels), 0.0)
        for (key, labels), value in after.items()
        if key == name
    }
    return None if any(rise < 0 for rise in rises.values()) else rises


def _by(rises: dict[Labels, float] | None, *names: str) -> dict[str, int] | None:
    """Sums by the values of some labels, written `a>b`; those that did not rise are left out."""
    if rises is None:
        return None
    sums: dict[str, int] = {}
    for labels, rise in rises.items():
        known = dict(labels)
        key = ">".join(known.get(name, "") for name in names)
        sums[key] = sums.get(key, 0) + int(rise)
    return {key: count for key, count in sorted(sums.items()) if count}


def decided(before: Samples, after: Samples) -> dict[str, Any]:
    """What the sidecar did in between; None where it was restarted."""
    return {
        "decisions": _by(_rise(before, after, "decisions_total"), "policy", "reason"),
        "affinity_hits": _by(_rise(before, after, "affinity_hits_total"), "key"),
        "fallbacks": _total(_rise(before, after, "fallbacks_total")),
        "spills": _by(_rise(before, after, "spills_total"), "from_rank", "to_rank"),
        "unguarded": _total(_rise(before, after, "unguarded_decisions_total")),
        "decision_us": _quantiles_us(_rise(before, after, "query_seconds_bucket")),
    }


def told(before: Samples, after: Samples) -> dict[str, Any]:
    """What the hook said that it did in between; it says so with the query that follows."""
    return {
        "bypassed": _by(_rise(before, after, "bypassed_total"), "cause"),
        "abstained": _by(_rise(before, after, "abstained_total"), "cause"),
        "sent_by_rank": _by(_rise(before, after, "sent_requests_total"), "dp_rank"),
    }


def _total(rises: dict[Labels, float] | None) -> int | None:
    return None if rises is None else int(sum(rises.values()))


def _quantiles_us(rises: dict[Labels, float] | None) -> dict[str, float] | None:
    """Upper bounds of the quantiles of a cumulative histogram of seconds, in microseconds.

    Beyond the last bound: that bound.
    """
    buckets = sorted((float(dict(labels)["le"]), rise) for labels, rise in (rises or {}).items())
    if not buckets or not buckets[-1][1]:
        return None
    finite = [bound for bound, _ in buckets if bound != float("inf")]

    def bound(share: float) -> float:
        wanted = share * buckets[-1][1]
        found = next(le for le, count in buckets if count >= wanted)
        return round(min(found, finite[-1]) * 1e6, 3)

    return {f"p{share * 100:g}": bound(share) for share in QUANTILES}


def read_engine(url: str) -> dict[str, float] | None:
    """SGLang's own counts of prompt and cached tokens; None without --enable-metrics."""
    try:
        text = fetch(f"{url}/metrics").decode(errors="replace")
    except TargetError:
        return None
    names = {"sglang:prompt_tokens_total", "sglang:cached_tokens_total"}
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in names:
            # Colons and multi-process labels aside, a sample is `name{labels} value`.
            sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    if "sglang:prompt_tokens_total" not in sums:
        return None
    # A counter with labels has no sample before it is first counted.
    return {name.removeprefix("sglang:"): sums.get(name, 0.0) for name in names}


def engine_rise(
    before: dict[str, float] | None, after: dict[str, float] | None
) -> dict[str, float] | None:
    """Tokens counted by SGLang in between, and the cached share."""
    if after is None:
        return None
    rise = {name: value - (before or {}).get(name, 0.0) for name, value in after.items()}
    prompt = rise["prompt_tokens_total"]
    if prompt > 0:
        rise["cached_share"] = rise["cached_tokens_total"] / prompt
    return rise


def read_steps(url: str) -> dict[str, float] | None:
    """Seconds that simulated ranks spent in steps, all ranks together; None: not simulated."""
    steps = [each["steps"] for each in internal_states(server_info(url)) if "steps" in each]
    names = ("seconds", "worked_seconds", "late_seconds")
    return {name: sum(each[name] for each in steps) for name in names} if steps else None


def steps_rise(
    before: dict[str, float] | None, after: dict[str, float] | None
) -> dict[str, float] | None:
    """Shares of the seconds in between: idle beside a rank that worked; this machine too slow."""
    if before is None or after is None or after["seconds"] <= before["seconds"]:
        return None
    seconds, worked, late = (after[name] - before[name] for name in before)
    return {"idle_share": 1 - worked / seconds, "late_share": late / seconds}
