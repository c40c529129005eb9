"""From records back to events; the mirror of `encoder`."""

from collections.abc import Iterator
from dataclasses import dataclass

from sidecar.journal.record import (
    FIGURES,
    MOST_BLOCKS,
    Changed,
    Decided,
    Forget,
    Gap,
    Head,
    LogError,
    Part,
    Record,
    Reported,
    Said,
    State,
    Time,
    Told,
)
from sidecar.journal.seal import Seal
from sidecar.wire import MAX_BATCH, MAX_BLOCKS, VERSION, LoadReport, Past, Query, RequestFacts


@dataclass(slots=True)
class Began:
    """A file begins."""

    head: Head
    sealed: bool
    """Whether values of hashes are hidden, as the secret is not at hand."""


@dataclass(slots=True)
class Decision:
    """A query, and what was answered. number: of its first request, counted since the start."""

    boot: int
    number: int
    now: float
    query: Query
    ranks: list[int]
    reasons: list[str]
    canary: set[int]
    """Places of the requests that the canary decided."""
    version: int


@dataclass(slots=True)
class Report:
    """A load report."""

    now: float
    report: LoadReport


@dataclass(slots=True)
class Change:
    """The policies changed."""

    now: float
    what: str
    state: State


@dataclass(slots=True)
class Missing:
    """Something is missing: so many decisions, if anybody counted them."""

    requests: int
    cause: str


Event = Began | Decision | Report | Change | Missing


class Decoder:
    """The memory of one file. seal: if the secret is at hand."""

    def __init__(self, seal: Seal | None) -> None:
        self._seal = seal
        self.head: Head | None = None
        self._nanoseconds = 0
        self._number = 0
        self._expected: dict[str, tuple[int, dict[int, int], dict[int, int]]] = {}
        self._figures: dict[tuple[str, int], list[int]] = {}
        self._history: list[Past] = []
        self._requests: list[RequestFacts] = []
        self._forget()

    def _forget(self) -> None:
        self._keys: list[bytes] = []
        self._blocks: list[int] = []
        self._before: list[int] = []

    def events(self, record: Record) -> Iterator[Event]:
        """What a record tells. Raises LogError, IndexError, KeyError or ValueError if it makes no
        sense where it stands."""
        if isinstance(record, Head):
            yield self._begin(record)
        elif self.head is None:
            raise LogError("does not begin with its head")
        elif isinstance(record, Reported):
            yield Report(self._at(record.at), self._report(record))
        elif isinstance(record, Decided):
            yield self._decided(record)
        elif isinstance(record, Part):
            self._take(record)
        elif isinstance(record, Changed):
            yield Change(self._at(record.at), record.what, record.state)
        elif isinstance(record, Gap):
            self._at(record.at)
            self._number += record.requests
            yield Missing(record.requests, record.cause)
        elif isinstance(record, Forget):
            self._forget()

    def _begin(self, head: Head) -> Began:
        if self.head is not None:
            raise LogError("has a second head")
        self.head = head
        self._number = head.first
        if self._seal is not None and self._seal.name != head.secret:
            self._seal = None
        return Began(head, self._seal is None)

    def _at(self, at: Time) -> float:
        if isinstance(at, float):
            return at
        self._nanoseconds += at
        return self._nanoseconds / 1e9

    def _take(self, record: Part | Decided) -> None:
        self._history += [self._past(told) for told in record.history]
        self._requests += [self._facts(said) for said in record.requests]
        if max(len(self._history), len(self._requests)) > MAX_BATCH:
            raise LogError("has more requests in a query than there may be")

    def _decided(self, record: Decided) -> Decision:
        now = self._at(record.at)
        self._take(record)
        history, requests = self._history, self._requests
        self._history, self._requests = [], []
        if not len(requests) == len(record.chosen) == len(record.reasons):
            raise LogError("a decision has not as many ranks as requests")
        if any(not 0 <= place < len(requests) for place in record.canary):
            raise LogError("the canary decided a request that is not there")
        epoch, sent, tokens = self._counters(record)
        ranks = list(sent)
        query = Query(
            VERSION,
            record.seq,
            record.instance,
            epoch,
            ranks,
            list(sent.values()),
            list(tokens.values()),
            requests,
            history=history,
        )
        for facts, rank in zip(requests, record.chosen, strict=True):
            sent[rank] += 1
            tokens[rank] += facts.tokens
        self._expected[record.instance] = epoch, sent, tokens
        number, self._number = self._number, self._number + len(requests)
        boot = self.head.boot if self.head is not None else 0
        return Decision(
            boot,
            number,
            now,
            query,
            record.chosen,
            record.reasons,
            set(record.canary),
            record.version,
        )

    def _counters(self, record: Decided) -> tuple[int, dict[int, int], dict[int, int]]:
        if record.epoch is not None:
            ranks, sent, tokens = record.ranks or [], record.sent or [], record.sent_tokens or []
            return (
                record.epoch,
                dict(zip(ranks, sent, strict=True)),
                dict(zip(ranks, tokens, strict=True)),
            )
        epoch, before, tokens_before = self._expected[record.instance]
        less = record.sent or [0] * len(before)
        tokens_less = record.sent_tokens or [0] * len(before)
        return (
            epoch,
            {rank: before[rank] + n for rank, n in zip(before, less, strict=True)},
            {rank: tokens_before[rank] + n for rank, n in zip(before, tokens_less, strict=True)},
        )

    def _report(self, record: Reported) -> LoadReport:
        slot = record.instance, record.rank
        known = record.figures[: len(FIGURES)]
        before = self._figures.get(slot) or [0] * len(known)
        figures = [old + new for old, new in zip(before, known, strict=True)]
        self._figures[slot] = figures
        return LoadReport(record.version, *slot, *figures)

    def _past(self, told: Told) -> Past:
        return Past(self._facts(told.facts), told.rank, told.age_ms)

    def _facts(self, said: Said) -> RequestFacts:
        prefix = said.prefix
        if prefix is not None and self._seal is not None:
            prefix = self._seal.unseal(prefix)
        return RequestFacts(
            self._key(said.key),
            said.namespace,
            said.tokens,
            prefix,
            self._prompt(said),
            said.last_rank,
            said.last_age_ms,
        )

    def _key(self, key: int | bytes | None) -> bytes:
        if key is None:
            return b""
        if isinstance(key, bytes):
            self._keys.append(key.hex().encode())
            return self._keys[-1]
        return self._keys[key]

    def _prompt(self, said: Said) -> list[int]:
        found: list[int] = []
        number = said.stem
        while number >= 0 and len(found) <= MAX_BLOCKS:
            found.append(self._blocks[number])
            number = self._before[number]  # always a lower one: it was there before
        found.reverse()
        last = said.stem
        for at in range(0, len(said.blocks), 8):
            block = int.from_bytes(said.blocks[at : at + 8], "little")
            self._before.append(last)
            self._blocks.append(block)
            last = len(self._blocks) - 1
            found.append(block)
        if len(found) > MAX_BLOCKS or len(self._blocks) > MOST_BLOCKS:
            raise LogError("has more blocks than there may be")
        return found
