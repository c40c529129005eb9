"""From events to records: what one file of the log knows by number or expects."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

from msgspec.structs import astuple

from sidecar.hashing import normalize_key
from sidecar.journal.record import HEAD, MAX_TABLE, Decided, Reported, Said, Time, Told
from sidecar.journal.seal import Seal
from sidecar.wire import LoadReport, Past, Query, Reply, RequestFacts

_MOST = (1 << 63) - 1
"""What msgpack holds with a sign: a hook that counts nonsense may be expected to say more."""


@dataclass(slots=True)
class _Expected:
    """What the next query of an instance says if nothing else sends."""

    epoch: int
    ranks: list[int]
    position: dict[int, int]
    sent: list[int]
    sent_tokens: list[int]


class Encoder:
    """The memory of one file. seal: names keys and hashes."""

    def __init__(self, seal: Seal) -> None:
        self.seal = seal
        self._nanoseconds = 0
        self._expected: dict[str, _Expected] = {}
        self._figures: dict[tuple[str, int], tuple[int, ...]] = {}
        self._namespaces: dict[int, int] = {0: 0}
        self.forget()

    def forget(self) -> None:
        """Number keys and blocks anew."""
        self._keys: dict[bytes, int] = {}
        self._blocks: dict[int, int] = {}
        self._before = array("l")
        """Number of a block -> number of the block before it."""

    @property
    def full(self) -> bool:
        """Whether it is time to forget."""
        return len(self._before) > MAX_TABLE or len(self._keys) > MAX_TABLE

    def at(self, now: float) -> Time:
        """A moment, monotonic seconds."""
        nanoseconds = round(now * 1e9)
        if nanoseconds / 1e9 != now:
            return now
        passed, self._nanoseconds = nanoseconds - self._nanoseconds, nanoseconds
        return passed

    def said(self, facts: RequestFacts) -> Said:
        """What a request says."""
        stem, blocks = self._prompt(facts.block_hashes)
        return Said(
            self._key(facts.routing_key),
            self._namespace(facts.namespace),
            facts.tokens,
            None if facts.prefix_hash is None else self.seal.seal(facts.prefix_hash),
            stem,
            blocks,
            facts.last_rank,
            facts.last_age_ms,
        )

    def told(self, past: Past) -> Told:
        """A dispatch of the past."""
        return Told(self.said(past.facts), past.rank, past.age_ms)

    def decided(self, query: Query, reply: Reply, now: float, canary: list[int]) -> Decided:
        """A decision, without history and requests. canary: places of what the canary decided."""
        epoch, ranks, sent, tokens = self._counters(query)
        self._expect(query, reply)
        return Decided(
            self.at(now),
            query.instance,
            query.seq,
            reply.policy_version,
            epoch,
            ranks,
            sent,
            tokens,
            [],
            [],
            reply.ranks,
            reply.reasons,
            canary,
        )

    def reported(self, report: LoadReport, now: float) -> Reported:
        """A load report."""
        slot = report.instance, report.rank
        figures = astuple(report)[HEAD:]
        before = self._figures.get(slot) or (0,) * len(figures)
        self._figures[slot] = figures
        less = list(map(sub, figures, before))
        return Reported(self.at(now), *slot, report.version, less)

    def _key(self, key: bytes) -> int | bytes | None:
        key = key and normalize_key(key)
        if not key:
            return None
        number = self._keys.get(key)
        if number is None:
            self._keys[key] = len(self._keys)
            return self.seal.of_key(key).to_bytes(8, "big")
        return number

    def _namespace(self, namespace: int) -> int:
        found = self._namespaces.get(namespace)
        if found is None:
            if len(self._namespaces) > MAX_TABLE:
                self._namespaces = {0: 0}
            found = int.from_bytes(self.seal.one_way(namespace), "little")
            self._namespaces[namespace] = found
        return found

    def _prompt(self, hashes: Sequence[int]) -> tuple[int, bytes]:
        """Number of the last of the leading blocks that are known, and the rest by name.

        Each block stands after the one it was told after: so one number stands for all before it.
        """
        numbers, before = self._blocks, self._before
        stem = -1
        known = 0
        for block in hashes:
            number = numbers.get(block, -1)
            if number < 0 or before[number] != stem:
                break
            stem = number
            known += 1
        last, new = stem, bytearray()
        for block in hashes[known:]:
            before.append(last)
            last = numbers[block] = len(before) - 1
            new += self.seal.one_way(block)
        return stem, bytes(new)

    def _counters(
        self, query: Query
    ) -> tuple[int | None, list[int] | None, list[int] | None, list[int] | None]:
        """Epoch, ranks and the two counters, or what differs from what was to be expected."""
        expected = self._expected.get(query.instance)
        if expected is None or expected.epoch != query.epoch or expected.ranks != query.ranks:
            return query.epoch, query.ranks, query.sent, query.sent_tokens
        if query.sent == expected.sent and query.sent_tokens == expected.sent_tokens:
            return None, None, None, None
        sent = list(map(sub, query.sent, expected.sent))
        tokens = list(map(sub, query.sent_tokens, expected.sent_tokens))
        if max(map(abs, sent + tokens)) > _MOST:
            return query.epoch, query.ranks, query.sent, query.sent_tokens
        return None, None, sent, tokens

    def _expect(self, query: Query, reply: Reply) -> None:
        ranks, expected = query.ranks, self._expected.get(query.instance)
        if expected is None or expected.ranks != ranks:
            position = {rank: n for n, rank in enumerate(ranks)}
            expected = _Expected(query.epoch, ranks, position, [], [])
            self._expected[query.instance] = expected
        expected.epoch = query.epoch
        sent, tokens = list(query.sent), list(query.sent_tokens)
        expected.sent, expected.sent_tokens = sent, tokens
        for facts, rank in zip(query.requests, reply.ranks, strict=True):
            at = expected.position[rank]
            sent[at] += 1
            tokens[at] += facts.tokens
