"""Why one request went where it went, from a log that is played back up to it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from sidecar.errors import PolicyError
from sidecar.journal.account import Account, name_of, utc
from sidecar.journal.decoder import Decision
from sidecar.journal.playback import Maker, Playback
from sidecar.journal.reader import Reader
from sidecar.journal.record import LogError
from sidecar.policies import Explainer, Explanation
from sidecar.seat import Seat
from sidecar.wire import RequestFacts

MAX_MATCHES = 20


@dataclass(frozen=True)
class Wanted:
    """Which request: of a query's `seq`, or by its name (`account.name_of`)."""

    seq: int | None = None
    index: int = 0
    name: str = ""
    instance: str = ""

    def place(self, decision: Decision) -> int | None:
        """Place of the request in that query, if it is there."""
        size = len(decision.query.requests)
        if self.instance and decision.query.instance != self.instance:
            return None
        if self.seq is not None:
            found = decision.query.seq == self.seq and self.index < size
            return self.index if found else None
        boot, _, number = self.name.rpartition("-")
        if boot and boot != str(decision.boot // 10**9):
            return None
        place = int(number) - decision.number
        return place if 0 <= place < size else None

    def __str__(self) -> str:
        if self.seq is None:
            return f"request {self.name}"
        return f"query {self.seq} with a request {self.index}"


def explain(reader: Reader, wanted: Wanted, load: tuple[str, ...] = ()) -> dict[str, Any]:
    """The one request that is wanted. Raises LogError if there is none, or more than one."""
    account = Account(reader)
    errors: list[Exception] = []
    playback = Playback(Maker(reader.seal, load), errors.append)
    found: list[dict[str, Any]] = []
    for event in account.events():
        place = wanted.place(event) if isinstance(event, Decision) else None
        if not isinstance(event, Decision) or place is None:
            playback.play(event)
            continue
        found.append(_one(account, playback, event, place))
        if wanted.name and "-" in wanted.name:
            break
        if len(found) >= MAX_MATCHES:
            break
    if not found:
        raise LogError(f"{wanted}: is not in the log")
    if len(found) > 1:
        names = ", ".join(f"{one['at']} ({one['instance']})" for one in found)
        raise LogError(f"{wanted}: there are several; --at NAME takes one of {names}")
    found[0]["notes"] = _notes(account, found[0])
    return found[0]


def history_of(reader: Reader, key: bytes) -> dict[str, Any]:
    """Every request of one routing key. Raises LogError."""
    if reader.seal is None:
        raise LogError(
            "--key: the secret that the log was written with is not beside it; --secret FILE "
            "names it"
        )
    called = reader.seal.of_key(key).to_bytes(8, "big").hex().encode()
    account = Account(reader)
    steps = list(_steps(account, called))
    if account.sealed:
        raise LogError("--key: the log was written with another secret; --secret FILE names it")
    return {"key_hash": called.decode(), "log": account.told(), "requests": steps}


def _steps(account: Account, called: bytes) -> Iterator[dict[str, Any]]:
    last: dict[str, int] = {}
    for event in account.events():
        if not isinstance(event, Decision):
            continue
        instance = event.query.instance
        for n, facts in enumerate(event.query.requests):
            if facts.routing_key != called:
                continue
            rank = event.ranks[n]
            yield {
                "at": name_of(event, n),
                "time": utc(account.wall(event.now)),
                "instance": instance,
                "seq": event.query.seq,
                "index": n,
                "rank": rank,
                "reason": event.reasons[n],
                "moved": last.get(instance, rank) != rank,
                "last_rank": facts.last_rank,
                "tokens": facts.tokens,
            }
            last[instance] = rank


def _one(account: Account, playback: Playback, event: Decision, place: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    target = event.query.requests[place]

    def before(facts: RequestFacts) -> None:
        if facts is target:
            seen.update(_situation(playback, event, place, facts))

    reply = playback.play(event, before)
    told = {
        "at": name_of(event, place),
        "time": utc(account.wall(event.now)),
        "instance": event.query.instance,
        "seq": event.query.seq,
        "index": place,
        "requests_in_query": len(event.query.requests),
        "rank": event.ranks[place],
        "reason": event.reasons[place],
        "request": _request(target),
        **seen,
    }
    told["replayed"] = (
        None if reply is None else {"rank": reply.ranks[place], "reason": reply.reasons[place]}
    )
    return told


def _request(facts: RequestFacts) -> dict[str, Any]:
    return {
        "key_hash": facts.routing_key.decode() or None,
        "tokens": facts.tokens,
        "blocks": len(facts.block_hashes),
        "prefix_hash": facts.prefix_hash is not None,
        "last_rank": facts.last_rank if facts.last_rank >= 0 else None,
        "last_age_seconds": facts.last_age_ms / 1000 if facts.last_age_ms >= 0 else None,
    }


def _situation(
    playback: Playback, event: Decision, place: int, facts: RequestFacts
) -> dict[str, Any]:
    """What the policy saw."""
    dispatcher = playback.dispatcher
    if dispatcher is None:
        return {}
    seat, role = dispatcher.active, "active"
    if dispatcher.canary is not None and place in event.canary:
        seat, role = dispatcher.canary.seat, "canary"
    told = {
        "policy": seat.policy.name,
        "policy_version": event.version,
        "params": msgspec.to_builtins(seat.policy.params),
        "role": role,
        "loads": _loads(seat, event.now),
        "average_requests": round(seat.here.view.average(), 3),
    }
    explanation = _explanation(seat, facts)
    if explanation is not None:
        told["preferred_rank"] = explanation.preferred if explanation.preferred >= 0 else None
        told["candidates"] = [
            {"rank": offer.rank, "admitted": offer.admitted, **offer.figures}
            for offer in explanation.offers
        ]
        told["limits"] = explanation.limits
    return told


def _explanation(seat: Seat, facts: RequestFacts) -> Explanation | None:
    if not hasattr(seat.policy, "explain"):
        return None
    try:
        return cast(Explainer, seat.policy).explain(facts, seat.here.view)
    except Exception as error:  # noqa: BLE001 - a policy may be anyone's code
        seat.on_error(PolicyError(seat.policy.name, error))
        return None


def _loads(seat: Seat, now: float) -> list[dict[str, Any]]:
    """The load view, one row a live rank."""
    instance, view = seat.here, seat.here.view
    rows = []
    for position, rank in enumerate(view.ranks):
        state = instance.states[rank]
        report = state.report
        rows.append(
            {
                "rank": rank,
                "requests": view.requests[position],
                "running": None if report is None else report.running,
                "waiting": None if report is None else report.waiting,
                "in_flight": view.in_flight[position],
                "tokens": view.tokens[position],
                "report_age_seconds": None if report is None else round(now - state.reported_at, 3),
                "usable": view.usable[position],
            }
        )
    return rows


def _notes(account: Account, told: dict[str, Any]) -> list[str]:
    notes = []
    replayed = told["replayed"]
    same = replayed is not None and (replayed["rank"], replayed["reason"]) == (
        told["rank"],
        told["reason"],
    )
    if not same:
        why = (
            "the log begins in mid-life, or something is missing"
            if not account.whole
            else "the secret of the log is not beside it"
            if account.sealed
            else "this version of the sidecar decides otherwise"
        )
        notes.append(f"played back, it goes elsewhere, so the figures are not those of then: {why}")
    if "candidates" not in told:
        notes.append("the policy does not say how it ranks the candidates")
    return notes
