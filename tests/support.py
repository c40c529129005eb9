"""Builders that the tests of the core share, and a small SGLang server to play against."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sidecar import wire
from sidecar.admin import ControlSite
from sidecar.budget import Budget, Instance
from sidecar.catalog import Catalog
from sidecar.dispatcher import Dispatcher
from sidecar.errors import ConfigError
from sidecar.hashing import key_hash, rank_bytes, scores
from sidecar.keyhash import KeyHash
from sidecar.logs import RateLimit
from sidecar.metrics import Health
from sidecar.paths import Paths
from sidecar.policies import make_policy
from sidecar.steering import Steering
from sidecar.verbs import Verbs
from sidecar.wire import LoadReport, Query, Reply, RequestFacts

INSTANCE = "host:30000"
STALE_SECONDS = 5.0
BOOT = 1_700_000_000_000_000_000


def make_dispatcher(
    policy: str = "prefix_affinity", *, max_instances: int = 4, **params: Any
) -> Dispatcher:
    """A dispatcher with no history."""
    return Dispatcher(make_policy(policy, params), Budget(STALE_SECONDS, max_instances), BOOT)


def query(
    requests: Iterable[RequestFacts] = (),
    *,
    ranks: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
    sent_tokens: Sequence[int] | None = None,
    **changes: Any,
) -> Query:
    """A query of 8 ranks that were sent nothing yet."""
    ids = list(range(8) if ranks is None else ranks)
    fields: dict[str, Any] = {
        "version": wire.VERSION,
        "seq": 1,
        "instance": INSTANCE,
        "epoch": 1,
        "ranks": ids,
        "sent": [0] * len(ids) if sent is None else list(sent),
        "sent_tokens": [0] * len(ids) if sent_tokens is None else list(sent_tokens),
        "requests": list(requests),
    }
    return Query(**(fields | changes))


def report(rank: int = 0, seq: int = 1, **changes: Any) -> LoadReport:
    """A load report of an idle rank."""
    fields: dict[str, Any] = {
        "version": wire.VERSION,
        "instance": INSTANCE,
        "rank": rank,
        "epoch": 1,
        "seq": seq,
        "received": 0,
        "received_tokens": 0,
        "running": 0,
        "waiting": 0,
    }
    return LoadReport(**(fields | changes))


def keyed(key: bytes | str, tokens: int = 100) -> RequestFacts:
    """A request with a routing key."""
    return RequestFacts(key.encode() if isinstance(key, str) else key, 0, tokens)


def keyless(tokens: int = 100, prefix: int | None = None) -> RequestFacts:
    """A request without a routing key."""
    return RequestFacts(b"", 0, tokens, prefix)


def order_of(affinity: int, ranks: Sequence[int]) -> list[int]:
    """Rank ids in rendezvous order, the preferred one first."""
    values = dict(zip(ranks, scores(affinity, rank_bytes(ranks)), strict=True))
    return sorted(ranks, key=values.__getitem__, reverse=True)


def key_preferring(rank: int, ranks: Sequence[int], salt: str = "") -> bytes:
    """A routing key whose preferred rank is `rank`."""
    keys = (f"{salt}key-{i}".encode() for i in range(100_000))
    return next(key for key in keys if order_of(key_hash(key), ranks)[0] == rank)


def load_up(dispatcher: Dispatcher, loads: Sequence[int], now: float = 0.0) -> None:
    """Let rank i report loads[i] running requests."""
    for rank, running in enumerate(loads):
        dispatcher.report(report(rank, running=running), now)


def reasons(reply: Reply) -> set[str]:
    return set(reply.reasons)


@dataclass
class Scheduler:
    """A scheduler process: what it took in and what it holds."""

    epoch: int = 1
    seq: int = 0
    received: int = 0
    received_tokens: int = 0
    running: int = 0
    queue: int = 0
    """Requests that the controller sent and it has not read yet."""
    queue_tokens: int = 0

    def take_in(self) -> None:
        self.received += self.queue
        self.received_tokens += self.queue_tokens
        self.running += self.queue
        self.queue = self.queue_tokens = 0


@dataclass
class Server:
    """An SGLang server in miniature: a controller's counters and its schedulers."""

    ranks: int = 8
    epoch: int = 1
    sent: list[int] = field(default_factory=list)
    sent_tokens: list[int] = field(default_factory=list)
    schedulers: list[Scheduler] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart_controller(self.epoch)
        self.schedulers = [Scheduler() for _ in range(self.ranks)]

    def query(self, requests: Iterable[RequestFacts] = (), **changes: Any) -> Query:
        fields: dict[str, Any] = {"ranks": range(self.ranks), "epoch": self.epoch}
        sent = {"sent": self.sent, "sent_tokens": self.sent_tokens}
        return query(requests, **(fields | sent | changes))

    def send(self, rank: int, tokens: int = 0) -> None:
        """The controller sends a request to a rank."""
        self.sent[rank] += 1
        self.sent_tokens[rank] += tokens
        self.schedulers[rank].queue += 1
        self.schedulers[rank].queue_tokens += tokens

    def ask(self, dispatcher: Dispatcher, requests: Sequence[RequestFacts], now: float) -> Reply:
        """Ask for ranks and send the requests there."""
        reply = dispatcher.handle(self.query(requests), now)
        for rank, facts in zip(reply.ranks, requests, strict=True):
            self.send(rank, facts.tokens)
        return reply

    def report(self, rank: int) -> LoadReport:
        scheduler = self.schedulers[rank]
        scheduler.seq += 1
        return report(
            rank,
            scheduler.seq,
            epoch=scheduler.epoch,
            received=scheduler.received,
            received_tokens=scheduler.received_tokens,
            running=scheduler.running,
        )

    def finish(self, dispatcher: Dispatcher, now: float) -> None:
        """Every rank takes in and finishes all it was sent, and reports that."""
        for rank, scheduler in enumerate(self.schedulers):
            scheduler.take_in()
            scheduler.running = 0
            dispatcher.report(self.report(rank), now)

    def restart_controller(self, epoch: int) -> None:
        self.epoch = epoch
        self.sent, self.sent_tokens = [0] * self.ranks, [0] * self.ranks

    def restart_scheduler(self, rank: int, epoch: int) -> None:
        self.schedulers[rank] = Scheduler(epoch=epoch)


def in_flight(instance: Instance) -> list[int]:
    """Requests in flight to each live rank, as the budget has it."""
    instance.sync()
    return [instance.states[rank].in_flight()[0] for rank in instance.view.ranks]


async def no_reload() -> None:
    raise ConfigError("reload: there is nothing to read")


def control_site(dispatcher: Dispatcher) -> ControlSite:
    steering = Steering(dispatcher, Catalog(dict), Health())
    return ControlSite(Verbs(steering, Paths(KeyHash()), no_reload, RateLimit()))
