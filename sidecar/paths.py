"""The ranks that sessions went to lately, by keyed hash, for people who look."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from sidecar.hashing import normalize_key
from sidecar.keyhash import KeyHash
from sidecar.wire import LoadReport, Query, Reply

MAX_SESSIONS = 4096
MAX_STEPS = 32
SLICE = 32


@dataclass(slots=True)
class Step:
    """Requests of one session that went to one rank one after the other."""

    rank: int
    reason: str
    """Of the first of them."""
    requests: int
    at: float
    """Of the last of them, monotonic seconds."""


@dataclass(slots=True)
class Path:
    """Where one session of one instance went; the newest step is last."""

    instance: str
    key_hash: str
    steps: list[Step] = field(default_factory=list)

    def told(self, now: float) -> dict[str, Any]:
        """As it is shown. now: monotonic seconds."""
        return {
            "instance": self.instance,
            "key_hash": self.key_hash,
            "steps": [
                {
                    "rank": step.rank,
                    "reason": step.reason,
                    "requests": step.requests,
                    "age_seconds": round(now - step.at, 3),
                }
                for step in self.steps
            ],
        }


class Paths:
    """The newest sessions, at most MAX_SESSIONS."""

    def __init__(self, key_hash: KeyHash) -> None:
        self.key_hash = key_hash
        self._paths: OrderedDict[tuple[str, str], Path] = OrderedDict()

    def report(self, report: LoadReport, now: float) -> None:
        """Loads say nothing of sessions."""

    def follow(self, query: Query, reply: Reply, now: float) -> Iterator[None]:
        """Take note of what was decided; yields now and then."""
        decided = zip(query.requests, reply.ranks, reply.reasons, strict=True)
        for done, (facts, rank, reason) in enumerate(decided, 1):
            key = facts.routing_key and normalize_key(facts.routing_key)
            if key:
                self._step(query.instance, self.key_hash.of(key), rank, reason, now)
            if done % SLICE == 0:
                yield

    def newest(self, count: int, now: float) -> list[dict[str, Any]]:
        """The sessions that were heard of last, the newest first."""
        return [path.told(now) for path in self._newest(count)]

    def parts(self, count: int, now: float) -> Iterator[bytes]:
        """`newest` as JSON, a session at a time: queries can be served in between."""
        yield b"["
        for index, path in enumerate(self._newest(count)):
            yield b"," * (index > 0) + msgspec.json.encode(path.told(now))
        yield b"]"

    def _newest(self, count: int) -> list[Path]:
        return list(islice(reversed(self._paths.values()), count))

    def of(self, key: bytes, now: float) -> list[dict[str, Any]]:
        """What is known of one routing key, for each instance that it was seen at."""
        name = self.key_hash.of(normalize_key(key))
        return [path.told(now) for path in self._paths.values() if path.key_hash == name]

    def _step(self, instance: str, name: str, rank: int, reason: str, now: float) -> None:
        path = self._paths.get((instance, name))
        if path is None:
            path = self._paths[instance, name] = Path(instance, name)
            if len(self._paths) > MAX_SESSIONS:
                self._paths.popitem(last=False)
        else:
            self._paths.move_to_end((instance, name))
        if path.steps and path.steps[-1].rank == rank:
            path.steps[-1].requests += 1
            path.steps[-1].at = now
        else:
            path.steps.append(Step(rank, reason, 1, now))
            del path.steps[:-MAX_STEPS]
