"""What the sidecar writes into its decision log, read again at once."""

from collections.abc import Iterator
from typing import Any

from sidecar.journal import record
from sidecar.journal.decoder import Decision, Decoder, Report
from sidecar.journal.encoder import Encoder
from sidecar.journal.seal import Seal
from sidecar.keyhash import SECRET_BYTES
from sidecar.wire import LoadReport, Query, Reply, RequestFacts, Want
from tests.fuzz.sidecar_side import Life, small_index
from tests.fuzz.source import Source
from tests.fuzz.world import hold

STEPS = 24
_SAME = ("tokens", "last_rank", "last_age_ms", "prefix_hash")


class Log:
    """An observer: each event becomes a record, and is the same when it is read."""

    def __init__(self) -> None:
        seal = Seal(b"s" * SECRET_BYTES)
        self.encoder, self.decoder = Encoder(seal), Decoder(seal)
        state = record.State("kv_affinity", {}, 1, Want())
        head = record.Head("1", 1, 5.0, 4, seal.name, 0.0, 0.0, 0, True, state, [])
        self.number = 0
        list(self.read(head))

    def read(self, what: Any) -> Iterator[Any]:
        """The events of a record, by way of its bytes."""
        yield from self.decoder.events(record.decode(record.encode(what)))

    def report(self, report: LoadReport, now: float) -> None:
        """See Observer."""
        (event,) = self.read(self.encoder.reported(report, now))
        hold(isinstance(event, Report) and event.report == report, "another report")
        hold(event.now == now, "another time")

    def follow(self, query: Query, reply: Reply, now: float) -> Iterator[None]:
        """See Observer."""
        history = [self.encoder.told(past) for past in query.history]
        requests = [self.encoder.said(facts) for facts in query.requests]
        written = self.encoder.decided(query, reply, now, [])
        written.history, written.requests = history, requests
        (event,) = self.read(written)
        self.compare(event, query, reply, now)
        yield

    def compare(self, event: Decision, query: Query, reply: Reply, now: float) -> None:
        """What was read is what was written."""
        read = event.query
        hold(event.now == now and event.number == self.number, "another time or number")
        self.number += len(query.requests)
        for name in ("seq", "instance", "epoch", "ranks", "sent", "sent_tokens"):
            hold(getattr(read, name) == getattr(query, name), f"another {name}")
        hold((event.ranks, event.reasons) == (reply.ranks, reply.reasons), "another answer")
        for mine, theirs in zip(query.requests, read.requests, strict=True):
            alike(mine, theirs)
        for past, told in zip(query.history, read.history, strict=True):
            hold((past.rank, past.age_ms) == (told.rank, told.age_ms), "another past")
            alike(past.facts, told.facts)


def alike(one: RequestFacts, other: RequestFacts) -> None:
    """All but names and hashes that are for good."""
    for name in _SAME:
        hold(getattr(one, name) == getattr(other, name), f"another {name}")
    hold(len(one.block_hashes) == len(other.block_hashes), "other blocks")


def log(data: bytes) -> None:
    """One life of a dispatcher, as its decision log has it."""
    source = Source(data)
    with small_index():
        life = Life(source)
        life.looked = True
        life.observers = [Log()]
        for _ in range(STEPS):
            if not source.left:
                break
            life.step()
