"""Messages of every kind, built from an input: most are valid, many at their bounds."""

from sidecar import wire
from sidecar.policies import REASONS
from tests.fuzz.source import Source

NAMES = ("a", "host:30000", "b", "c", "\n# d{", "é" * 128, "e", 'f"\\')
"""More than the three instances that a dispatcher here takes, some of them hostile to logs."""
KEYS = (b"", b" ", b"k1", b"k2", b"session-3", b"\xff\xfe", b"\x00", b"x" * 1024)
REASON_NAMES = sorted(REASONS)
FEW = tuple(range(8))
MANY = tuple(range(0, 65535, 64))
"""Ids of MAX_RANKS ranks."""


def ranks(source: Source) -> list[int]:
    """Live ranks, ascending; mostly some of eight."""
    mask = source.byte() or 255
    if mask == 254:
        return list(MANY[: 1 + source.below(len(MANY))])
    if mask == 253:
        return [source.below(65536) for _ in range(source.below(5))]  # maybe in no order
    return [rank for rank in FEW if mask >> rank & 1]


def blocks(source: Source) -> list[int]:
    """Block hashes: few different ones, so that prompts share beginnings."""
    size = source.below(12)
    if size == 11:
        size = source.below(300)
        begin = source.byte()
        return [begin << 32 | n for n in range(size)]
    return [source.below(6) or (1 << 64) - 1 for _ in range(size)]


def facts(source: Source) -> wire.RequestFacts:
    """One request."""
    key = source.one_of(KEYS) if not source.flag(8) else source.raw(source.below(32))
    found = wire.RequestFacts(key)
    if source.flag():
        found.tokens = source.count()
        found.block_hashes = blocks(source)
    if source.flag(4):
        found.prefix_hash = source.wild()
        found.namespace = source.count()
    if source.flag():
        found.last_rank = source.below(9) - 1
        found.last_age_ms = source.count() - 1
    return found


def causes(source: Source) -> dict[str, int] | None:
    """Counters by cause, some that nobody knows."""
    if not source.flag(4):
        return None
    names = ("deadline", "session", "", "unheard of", 'x"\n', "x" * 64)
    return {source.one_of(names): source.count() for _ in range(source.below(4))}


def telemetry(source: Source) -> wire.Telemetry | None:
    """What a hook measured."""
    if not source.flag(4):
        return None
    trips = [source.count() for _ in range(len(wire.ROUND_TRIP_US) + 1)]
    return wire.Telemetry(trips, source.count(), source.count(), source.flag())


def query(source: Source, instance: str) -> wire.Query:
    """A query of one instance; `sent` mostly ascends by little."""
    live = ranks(source)
    shape = source.below(4)
    sent = [source.count() if shape == 3 else shape * 3 for _ in live]
    tokens = [source.count() if shape == 2 else shape * 100 for _ in live]
    return wire.Query(
        wire.VERSION,
        source.count(),
        instance,
        source.below(3) if not source.flag(8) else source.wild(),
        live,
        sent,
        tokens,
        [facts(source) for _ in range(source.below(6))],
        causes(source),
        causes(source),
        {source.one_of(NAMES)[:64]: source.one_of(NAMES)} if source.flag(8) else None,
        [wire.Past(facts(source), source.below(9), source.count()) for _ in range(source.below(3))],
        telemetry(source),
    )


def report(source: Source, instance: str) -> wire.LoadReport:
    """A load report; mostly the next of its rank."""
    rank = source.below(8) if not source.flag(16) else source.below(65536)
    found = wire.LoadReport(
        wire.VERSION,
        instance,
        rank,
        source.below(3) if not source.flag(8) else source.wild(),
        source.count(),
        source.count(),
        source.count(),
        source.count(),
        source.count(),
    )
    if source.flag():
        for field in wire.LoadReport.__struct_fields__[9:]:
            setattr(found, field, source.count())
    return found


def want(source: Source) -> wire.Want:
    """What a sidecar asks the hook for; extreme in every way."""
    if not source.flag():
        return wire.Want(16, False, 4, 8, source.below(3), 8)
    tokens = (0, 1, 2, 64, 4096, 1 << 20)
    return wire.Want(
        source.one_of(tokens),
        source.flag(),
        source.one_of(tokens),
        source.one_of((0, 1, 7, 128, 4095, 4096)),
        source.one_of((0, 1, 2, 14, 1 << 20)),
        source.one_of((0, 1, 3, 8192, 1 << 20)),
    )


def reply(source: Source, seq: int, requests: int, live: list[int]) -> wire.Reply | wire.Refusal:
    """An answer to a query: the right one, or one of a stranger's."""
    if source.flag(8):
        return wire.Refusal(wire.VERSION, seq, source.text(), source.text())
    size = requests if not source.flag(8) else source.below(9)
    chosen = [
        source.one_of(live or [0]) if not source.flag(8) else source.wild() for _ in range(size)
    ]
    return wire.Reply(
        wire.VERSION if not source.flag(16) else source.wild(),
        seq if not source.flag(8) else source.wild(),
        source.below(3) if not source.flag(8) else source.wild(),
        "p",
        source.below(3) if not source.flag(8) else source.wild(),
        chosen,
        [source.one_of(REASON_NAMES) for _ in range(size)],
        want(source),
    )
