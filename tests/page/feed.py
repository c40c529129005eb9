"""A small SGLang server for a sidecar process: it asks and its ranks report, when told to."""

from typing import Any

import msgspec
import zmq

from sidecar import wire
from tests.processes import Asker, Sidecar, wait_for
from tests.support import keyed, query, report

CAPACITY = 1 << 20
ABOUT = {"sglang": "0.5.23", "hook": "0.3.0", "python": "3.11.7", "method": "round_robin"}


class Feed:
    """Plays the server `instance` with `ranks` ranks, deterministically."""

    def __init__(self, sidecar: Sidecar, ranks: int = 8, instance: str = "gpu-1:30000") -> None:
        self.sidecar, self.ranks, self.instance = sidecar, ranks, instance
        self.asker = Asker(sidecar.endpoint)
        self.push = Asker(wire.report_endpoint(sidecar.endpoint), zmq.PUSH)
        self.sent = [0] * ranks
        self.tokens = [0] * ranks
        self.step = 0
        self.homes: dict[str, int] = {}
        """What the hook remembers: session -> the rank that it went to last."""

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *exception: object) -> None:
        self.asker.__exit__()
        self.push.__exit__()

    def ask(self, keys: int = 16, **changes: Any) -> Any:
        """One query with a request of each of `keys` sessions."""
        names = [f"session-{n}" for n in range(keys)]
        requests = [self._facts(name) for name in names]
        fields: dict[str, Any] = {
            "instance": self.instance,
            "ranks": range(self.ranks),
            "sent": self.sent,
            "sent_tokens": self.tokens,
            "about": ABOUT,
            "bypassed": {"deadline": self.step},
        }
        reply = self.asker.ask(wire.encode(query(requests, **(fields | changes))))
        assert isinstance(reply, wire.Reply), reply
        self.homes.update(zip(names, reply.ranks, strict=False))
        for rank in reply.ranks:
            self.sent[rank] += 1
            self.tokens[rank] += 1000
        return reply

    def _facts(self, name: str) -> wire.RequestFacts:
        home = self.homes.get(name, -1)
        facts = keyed(name, 1000)
        return msgspec.structs.replace(facts, last_rank=home, last_age_ms=100 if home >= 0 else -1)

    def report(self, **changes: Any) -> None:
        """A report of each rank; the load differs from rank to rank and from step to step."""
        self.step += 1
        for rank in range(self.ranks):
            running = (rank * 7 + self.step) % 23
            fields: dict[str, Any] = {
                "instance": self.instance,
                "running": running,
                "waiting": rank % 5 if running > 15 else 0,
                "received": self.sent[rank],
                "received_tokens": self.tokens[rank],
                "tokens": CAPACITY * (rank * 13 % 89 + 5) // 100,
                "capacity_tokens": CAPACITY,
                "admitted_tokens": 10_000 * self.step,
                "cached_tokens": 100 * (rank * 31 % 60 + 40) * self.step,
            }
            self.push.send(wire.encode(report(rank, self.step, **(fields | changes))))
        wait_for(lambda: self._reported() >= self.step * self.ranks)

    def _reported(self) -> float:
        return self.sidecar.metric("load_reports_total") or 0

    def play(self, steps: int = 3) -> None:
        """Ask and report a few times."""
        for _ in range(steps):
            self.ask()
            self.report()
