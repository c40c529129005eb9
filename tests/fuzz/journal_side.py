"""Decision logs of anybody's: bytes of a file, and files whose checksums are right."""

import contextlib
import zlib
from collections.abc import Callable
from typing import Any

from sidecar.errors import ConfigError
from sidecar.journal import record
from sidecar.journal.compare import Contest
from sidecar.journal.explain import Wanted, explain, history_of
from sidecar.journal.reader import Reader
from sidecar.journal.verify import Verification
from sidecar.keyhash import SECRET_BYTES
from sidecar.policies import REGISTRY
from sidecar.wire import LoadReport, Want
from tests.fuzz import messages
from tests.fuzz.places import nothing_installed, written
from tests.fuzz.source import Source, bent
from tests.fuzz.world import hold

POLICIES = (*REGISTRY, "of_others", "os:system", "")
WHATS = ("set", "reload", "canary", "canary_off", "shadow", "")
MAX_EVENTS = 100_000
DEEP = "stands for NESTED"
NESTED = b"\x91" * 2000 + b"\xc0"
"""Deeper than any reader goes."""


def read_all(file: bytes) -> None:
    """What `replay` and `explain` do with a file."""
    path, secret = written("log.dplog", file), written("secret", b"s" * SECRET_BYTES)
    for act in (
        lambda reader: Verification(reader).run(),
        lambda reader: Contest(reader, "total_tokens", {}, ()).run(),
        lambda reader: explain(reader, Wanted(name="0")),
        lambda reader: history_of(reader, b"k1"),
        _count,
    ):
        with contextlib.suppress(ConfigError), nothing_installed():
            act(Reader([path], secret))


def _count(reader: Reader) -> None:
    events = sum(1 for _ in reader.events())
    hold(events <= MAX_EVENTS, "more events than a small file can hold")


def journal(data: bytes) -> None:
    """Bytes as a file; and as what stands in the chunks of one."""
    read_all(data)


def records(data: bytes) -> None:
    """Records of every kind in chunks that are whole."""
    source = Source(data)
    first = framed(encode(head(source)))
    raw = bytearray(b"" if source.flag(16) else first)
    for _ in range(24):
        if not source.left:
            break
        raw += framed(bent(encode(_record(source)), source))
    read_all(record.MAGIC + chunk(bytes(raw), source))


def encode(what: Any) -> bytes:
    """A record as bytes; what msgpack cannot hold is none."""
    try:
        return record.encode(what).replace(record.encode(DEEP), NESTED)
    except (OverflowError, UnicodeEncodeError):
        return b"\xc0"


def framed(raw: bytes) -> bytes:
    """A record with its length."""
    return record.LENGTH.pack(len(raw)) + raw


def chunk(raw: bytes, source: Source) -> bytes:
    """A chunk, mostly sound."""
    packed = zlib.compress(raw, 1)
    size, checksum = len(raw), zlib.crc32(packed)
    if source.flag(16):
        size = source.below(65536)
    whole = record.CHUNK.pack(len(packed), size, checksum) + packed
    return whole[: -1 - source.below(16)] if source.flag(16) else whole


def _params(source: Source) -> dict[str, object]:
    if not source.flag(8):
        return {}
    name = source.one_of(("move_tokens", "hash_tokens", "x"))
    return {name: DEEP if source.flag() else source.count()}


def _state(source: Source) -> record.State:
    return record.State(
        source.one_of(POLICIES),
        _params(source),
        source.wild(),
        Want(),
        source.one_of(("", "", *REGISTRY)),
        _params(source),
        source.byte() / 255,
        "",
    )


def _seconds(source: Source) -> float:
    return source.one_of((0.0, 1.5, 1e9, 1e11, 1e-300, 3.0))


def head(source: Source) -> record.Head:
    reports: list[tuple[float, LoadReport]] = [
        (_seconds(source), messages.report(source, "a")) for _ in range(source.below(3))
    ]
    return record.Head(
        "1",
        source.count(),
        source.one_of((5.0, 1e-9, 1e9)),
        1 + source.below(4096),
        "name",
        _seconds(source),
        _seconds(source),
        0 if not source.flag(4) else source.count(),
        source.flag(),
        _state(source),
        reports,
    )


def _said(source: Source) -> record.Said:
    key: int | bytes | None = source.one_of((None, b"k1", b"\xff" * 8, 0, 1, -1, 1 << 40))
    return record.Said(
        key,
        source.count(),
        source.count(),
        source.one_of((None, 0, 7, (1 << 64) - 1)),
        source.below(6) - 1 if not source.flag(8) else source.wild(),
        source.raw(8 * source.below(4)) if not source.flag(8) else source.raw(5),
        source.below(9) - 1 if not source.flag(8) else source.wild(),
        source.wild() - 1,
    )


def _time(source: Source) -> record.Time:
    return (
        source.count() if not source.flag(4) else source.one_of((_seconds(source), -source.count()))
    )


def _decided(source: Source) -> record.Decided:
    said = [_said(source) for _ in range(source.below(4))]
    first = source.flag()
    live = messages.ranks(source)[:16] if first else None
    counts = [source.count() for _ in live or ()] if first else None
    if not first and source.flag():
        counts = [source.wild() for _ in range(8)]
    size = len(said) if not source.flag(16) else source.below(5)
    return record.Decided(
        _time(source),
        source.one_of(messages.NAMES[:3]),
        source.wild(),
        source.below(3),
        source.below(2) if first else None,
        live,
        counts,
        None if counts is None else list(counts),
        [
            record.Told(_said(source), source.below(9), source.wild())
            for _ in range(source.below(3))
        ],
        said,
        [
            source.one_of(live or [0, 1, 2, 3]) if not source.flag(16) else source.wild()
            for _ in range(size)
        ],
        [source.one_of(messages.REASON_NAMES) for _ in range(size)],
        [source.below(4)] if source.flag(4) else [],
    )


def _reported(source: Source) -> record.Reported:
    figures = [source.wild() for _ in record.FIGURES[: source.below(17)]]
    return record.Reported(_time(source), "a", source.below(9), 1, figures)


_KINDS: tuple[Callable[[Source], Any], ...] = (
    head,
    lambda source: record.Part([record.Told(_said(source), 1, 1)], [_said(source)]),
    lambda source: record.Changed(_time(source), source.one_of(WHATS), _state(source)),
    lambda source: record.Gap(_time(source), source.count(), source.one_of(("lag", ""))),
    lambda source: record.Forget(),
    *(_reported,) * 3,
    *(_decided,) * 4,
)


def _record(source: Source) -> Any:
    return source.one_of(_KINDS)(source)
