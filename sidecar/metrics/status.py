"""`/status`: the same at a glance, as JSON, for the status page, `top` and scripts."""

import os
from collections.abc import Iterator
from typing import Any

import msgspec

from sidecar import __version__
from sidecar.budget import Instance
from sidecar.dispatcher import Dispatcher
from sidecar.loads import RankState
from sidecar.metrics.families import BUCKETS_US
from sidecar.metrics.loads import load_of
from sidecar.metrics.process import Health
from sidecar.seat import Seat
from sidecar.tally import Role, Tally
from sidecar.wire import ROUND_TRIP_US

SHOWN_CHANGES = 20


def status(dispatcher: Dispatcher, health: Health, now: float) -> dict[str, object]:
    """Policy, instances, ranks. now: monotonic seconds."""
    instances = list(dispatcher.budget.instances.values())
    told = [_instance_status(dispatcher, instance, now) for instance in instances]
    return {**_process_status(dispatcher, health, now), "instances": told}


def status_parts(dispatcher: Dispatcher, health: Health, now: float) -> Iterator[bytes]:
    """`status` as JSON, an instance at a time: queries can be served in between."""
    encode = msgspec.json.encode
    yield encode(_process_status(dispatcher, health, now))[:-1] + b',"instances":['
    for index, instance in enumerate(list(dispatcher.budget.instances.values())):
        yield b"," * (index > 0) + encode(_instance_status(dispatcher, instance, now))
    yield b"]}"


def _process_status(dispatcher: Dispatcher, health: Health, now: float) -> dict[str, object]:
    canary, shadow = dispatcher.canary, dispatcher.shadow
    return {
        "version": __version__,
        "pid": os.getpid(),
        "uptime_seconds": round(max(0.0, now - health.started), 3),
        "policy": dispatcher.active.name,
        "policy_version": dispatcher.policy_version,
        "policy_params": dispatcher.active.params,
        "canary": None if canary is None else {**_second(canary.seat), "share": canary.share},
        "shadow": None
        if shadow is None
        else {**_second(shadow.seat), "compared": shadow.compared()},
        "changes": list(health.changes)[-SHOWN_CHANGES:],
        "last_reload_ok": health.last_reload_ok,
        "load_source": health.load_source,
        "stale_seconds": dispatcher.budget.stale_seconds,
        "query_time": {"bounds_us": BUCKETS_US, "counts": health.query_time.counts},
    }


def _second(seat: Seat) -> dict[str, object]:
    return {"policy": seat.name, "params": seat.params}


def _instance_status(dispatcher: Dispatcher, instance: Instance, now: float) -> dict[str, object]:
    tally = dispatcher.tallies.get(instance.name, Tally())
    instance.sync()
    return {
        "instance": instance.name,
        "about": tally.about,
        "queries": tally.queries,
        "last_query_age_seconds": None
        if instance.epoch is None
        else round(max(0.0, now - instance.view.now), 3),
        "decisions": tally.decisions,
        "bypassed": tally.bypassed,
        "abstained": tally.abstained,
        "expected": _expected(dispatcher, instance.name, tally),
        "hook": _hook(tally),
        "ranks": [
            _rank(rank, rank in instance.view.position, state, now)
            for rank, state in sorted(instance.states.items())
        ],
    }


def _expected(dispatcher: Dispatcher, name: str, tally: Tally) -> dict[str, Role]:
    """Role -> what it did, and what it expected to be cached."""
    roles = dict(tally.roles)
    if dispatcher.shadow is not None and name in dispatcher.shadow.comparisons:
        found = dispatcher.shadow.comparisons[name].roles
        roles |= {"shadow": found["shadow"], "shadowed": found["active"]}
    return roles


def _hook(tally: Tally) -> dict[str, Any] | None:
    told = tally.telemetry
    if told is None:
        return None
    return {
        "round_trip": {"bounds_us": ROUND_TRIP_US, "counts": told.round_trips},
        "breaker_open": told.breaker_open,
        "breaker_opened": told.breaker_opened,
    }


def _rank(rank: int, live: bool, state: RankState, now: float) -> dict[str, Any]:
    report, (requests, prompt) = state.report, state.in_flight()
    fields: dict[str, Any] = {
        "rank": rank,
        "live": live,
        "in_flight": requests,
        "load": load_of(state),
        "sent": state.sent,
        "source": state.source,
    }
    told = dict.fromkeys(("running", "waiting", "received", "report_age_seconds"))
    told |= dict.fromkeys(("tokens", "capacity_tokens", "admitted_tokens", "cached_tokens"))
    if report is not None:
        told = {name: getattr(report, name, None) for name in told}
        told["tokens"] = report.tokens + prompt
        told["report_age_seconds"] = round(max(0.0, now - state.reported_at), 3)
    return fields | told
