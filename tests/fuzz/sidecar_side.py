"""What hooks send to the sidecar: bytes, single messages, whole lives of a dispatcher."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from sidecar import metrics, wire
from sidecar.budget import Budget
from sidecar.dispatcher import Dispatcher
from sidecar.errors import ConfigError, PeerError, PolicyError
from sidecar.keyhash import KeyHash
from sidecar.metrics import Health
from sidecar.paths import Paths
from sidecar.policies import REGISTRY, make_policy
from sidecar.policies.kv import clock
from sidecar.policies.kv import memory as kv_memory
from tests.fuzz import messages
from tests.fuzz.source import Source, bent
from tests.fuzz.world import BrokenPromise, check, check_reply, hold
from tests.support import BOOT, STALE_SECONDS

POLICIES = tuple(REGISTRY)
MAX_INSTANCES = 3
STEPS = 48
PAUSES = (0.0, 1e-9, 0.001, 0.02, 0.3, 1.0, STALE_SECONDS + 0.1, 61.0, 4000.0)
SMALL_INDEX = 600
"""Hashes: so that forgetting happens within a few queries."""
SMALL_PAST = 6
"""Spans of the past."""


@contextlib.contextmanager
def small_index() -> Iterator[None]:
    """Let new memories of `kv_affinity` be small: soon full, and quickly made."""
    before = kv_memory.MAX_WEIGHT, clock.PAST
    kv_memory.MAX_WEIGHT, clock.PAST = SMALL_INDEX, SMALL_PAST
    try:
        yield
    finally:
        kv_memory.MAX_WEIGHT, clock.PAST = before


def _failed(error: PolicyError) -> None:
    raise BrokenPromise(f"a policy of ours failed: {error}") from error.__cause__


def make(policy: str) -> Dispatcher:
    """A dispatcher with no history, which takes no fault of a policy."""
    return Dispatcher(make_policy(policy), Budget(STALE_SECONDS, MAX_INSTANCES), BOOT, _failed)


def query(data: bytes) -> None:
    """Bytes as the first query that a dispatcher gets."""
    try:
        message = wire.decode_query(data)
    except PeerError as error:
        hold(error.cause in wire.REFUSALS, f"no such cause: {error.cause}")
        wire.encode(wire.Refusal(wire.VERSION, 0, error.cause, str(error)[:256]))
        return
    hold(wire.decode_query(wire.encode(message)) == message, "a query that is not what was read")
    with small_index():
        dispatcher = make(("kv_affinity", "prefix_affinity")[len(data) % 2])
        with contextlib.suppress(PeerError):
            check_reply(message, dispatcher.handle(message, 1.0))
        check(dispatcher)


def report(data: bytes) -> None:
    """Bytes as a load report to a dispatcher that knows its rank, and to one that does not."""
    try:
        message = wire.decode_report(data)
    except PeerError as error:
        hold(error.cause in wire.REFUSALS, f"no such cause: {error.cause}")
        return
    hold(wire.decode_report(wire.encode(message)) == message, "a report that is not what was read")
    asked = wire.Query(
        wire.VERSION, 1, message.instance, 1, [message.rank], [5], [500], [wire.RequestFacts(b"k")]
    )
    with small_index():
        dispatcher = make("kv_affinity")
        for now in (1.0, 2.0):
            with contextlib.suppress(PeerError):
                dispatcher.report(message, now)
            check_reply(asked, dispatcher.handle(asked, now))
            message.seq = min(message.seq + 1, 1 << 62)
            message.flushes = message.admitted_tokens % 2
        check(dispatcher)


class Life:
    """One dispatcher, driven through queries, reports, time and changes of policy."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.now = 10.0
        self.dispatcher = make(source.one_of(POLICIES))
        self.paths = Paths(KeyHash(b"s" * 32))
        self.health = Health()
        self.looked = False
        self.observers: list[Any] = [self.paths]
        self.known: dict[str, wire.Query] = {}
        """The last query of each instance that was answered."""

    def step(self) -> None:
        """One thing happens."""
        often: tuple[Callable[[], None], ...] = (self.ask, self.go_on, self.hear)
        steps = (*often * 5, self.wait, self.steer, self.look)
        self.source.one_of(steps)()

    def ask(self) -> None:
        """A query, maybe a broken one."""
        message = messages.query(self.source, self.source.one_of(messages.NAMES))
        self.send(bent(wire.encode(message), self.source))

    def go_on(self) -> None:
        """The query that a hook sends after the answer it got."""
        if not self.known:
            return
        last = self.known[sorted(self.known)[self.source.below(len(self.known))]]
        last.seq = min(last.seq + 1, 1 << 62)
        last.requests = [messages.facts(self.source) for _ in range(1 + self.source.below(3))]
        last.history = []
        self.send(wire.encode(last))

    def send(self, data: bytes) -> None:
        """Bytes to the query socket."""
        try:
            query = wire.decode_query(data)
            reply = self.dispatcher.handle(query, self.now)
        except PeerError as error:
            hold(error.cause in wire.REFUSALS, f"no such cause: {error.cause}")
            return
        check_reply(query, reply)
        for observer in (*self.observers, self.dispatcher.shadow):
            if observer is not None:
                for _ in observer.follow(query, reply, self.now):
                    pass
        for facts, rank in zip(query.requests, reply.ranks, strict=True):
            at = query.ranks.index(rank)
            query.sent[at] = min(query.sent[at] + 1, 1 << 62)
            query.sent_tokens[at] = min(query.sent_tokens[at] + facts.tokens, 1 << 62)
        if len(self.known) < 4 and len(query.ranks) <= 8:
            self.known[query.instance] = query

    def hear(self) -> None:
        """A load report, maybe a broken one."""
        message = messages.report(self.source, self.source.one_of(messages.NAMES))
        try:
            report = wire.decode_report(bent(wire.encode(message), self.source))
            self.dispatcher.report(report, self.now)
            for observer in (*self.observers, self.dispatcher.shadow):
                if observer is not None:
                    observer.report(report, self.now)
        except PeerError as error:
            hold(error.cause in wire.REFUSALS, f"no such cause: {error.cause}")

    def wait(self) -> None:
        """Time passes."""
        self.now += self.source.one_of(PAUSES)

    def steer(self) -> None:
        """A change of policies; two that cannot be had side by side are refused."""
        dispatcher, which = self.dispatcher, self.source.below(4)
        policy = make_policy(self.source.one_of(POLICIES))
        end = self.source.flag()
        with contextlib.suppress(ConfigError):
            if which == 0:
                dispatcher.set_canary(None if end else policy, self.source.byte() / 255)
            elif which == 1:
                dispatcher.set_shadow(None if end else policy)
            else:
                dispatcher.swap_policy(policy)

    def look(self) -> None:
        """Somebody scrapes; once in a life, as that takes as long as all the rest."""
        if self.looked:
            return
        self.looked = True
        for family in metrics.collect(self.dispatcher, self.health, self.now):
            family.exposition()
        b"".join(metrics.status_parts(self.dispatcher, self.health, self.now))
        b"".join(self.paths.parts(16, self.now))


def dispatch(data: bytes) -> None:
    """One life of a dispatcher: sequences of queries, reports, pauses, policies."""
    source = Source(data)
    with small_index():
        life = Life(source)
        for _ in range(STEPS):
            if not source.left:
                break
            life.step()
        check(life.dispatcher)
