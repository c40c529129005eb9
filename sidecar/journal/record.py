"""The format of the decision log.

A file begins with MAGIC, one line of text with the number of the format. Chunks follow, each a
head (`CHUNK`: bytes that follow, bytes before compression, CRC-32 of what follows) and a zlib
stream. In it stand records: 4 bytes of length, little-endian, and one msgpack array, which grows at
the tail only. The first record of a file is a Head; a file can be read without those before it.

Small on purpose, as most of it says what was to be expected: times are told as differences, the
counters of a query as differences to what the last reply led one to expect, keys and blocks of a
prompt by number once they have been told.
"""

import struct
from typing import Annotated

from msgspec import Meta, Struct, msgpack

from sidecar.errors import ConfigError
from sidecar.wire import (
    MAX_BATCH,
    MAX_BLOCKS,
    MAX_RANKS,
    Count,
    Hash,
    Instance,
    LoadReport,
    Ranks,
    Want,
)

FORMAT = 1
TITLE = b"sglang-dp-sidecar decision log, format "
MAGIC = TITLE + b"%d\n" % FORMAT
SUFFIX = ".dplog"
CHUNK = struct.Struct("<III")
LENGTH = struct.Struct("<I")
CHUNK_BYTES = 64 << 10
"""Bytes of records after which a chunk is closed."""
MAX_RAW_BYTES = 16 << 20
"""Bound of one chunk: CHUNK_BYTES and one record, which holds up to PART requests of 32 KiB."""
PART = 32
"""Requests (or past ones) that one record holds."""
MAX_TABLE = 32_768
"""Blocks, and keys, that are known by number; about 5 MB."""
MOST_BLOCKS = MAX_TABLE + PART * MAX_BLOCKS
"""Known at the end of a record; then numbers begin anew."""
HEAD = 3
FIGURES = LoadReport.__struct_fields__[HEAD:]
"""What a load report counts: all but version, instance and rank."""

# A log may come from anybody: what is read has the bounds that the wire has, so that a small file
# cannot take much memory, and no number is one that a clock cannot show.
_Seconds = Annotated[float, Meta(ge=0, le=1e11)]
_Word = Annotated[str, Meta(max_length=256)]
_Differences = Annotated[list[int], Meta(max_length=MAX_RANKS)]
_Batch = Meta(max_length=MAX_BATCH)

Time = int | _Seconds
"""Nanoseconds since the last time that was told so, or monotonic seconds where these would not
give the same floating-point number back."""


class State(Struct, array_like=True, frozen=True):
    """The policies at work."""

    policy: str
    params: dict[str, object]
    version: int
    want: Want
    """What the hooks were asked for."""
    canary: str = ""
    canary_params: dict[str, object] = {}
    share: float = 0.0
    shadow: str = ""


class Head(Struct, array_like=True, tag="head", frozen=True):
    """How a file begins."""

    sidecar: str
    """Its version."""
    boot: Count
    """Its start, ns since 1970."""
    stale_seconds: Annotated[float, Meta(gt=0, le=1e9)]
    max_instances: Annotated[int, Meta(ge=1, le=4096)]
    secret: str
    """`Seal.name` of the secret that names and hashes were made with."""
    wall: _Seconds
    """Seconds since 1970 at the monotonic time `now`."""
    now: _Seconds
    first: Count
    """Number of the first decision, counted since `boot`."""
    whole: bool
    """Whether nothing happened before."""
    state: State
    reports: list[tuple[_Seconds, LoadReport]]
    """The last load report of each rank, and when it came."""


class Said(Struct, array_like=True, gc=False):
    """`wire.RequestFacts`, with names for keys and hashes."""

    key: int | Annotated[bytes, Meta(max_length=64)] | None
    """A new name, which gets the next number; the number of one; null: no key."""
    namespace: Hash
    tokens: Count
    prefix: Hash | None
    stem: int
    """Number of the last leading block that is known, in the place where it is; -1: none."""
    blocks: Annotated[bytes, Meta(max_length=8 * MAX_BLOCKS)]
    """The new ones, 8 bytes each; each gets the next number."""
    last_rank: int
    last_age_ms: int


class Told(Struct, array_like=True, gc=False):
    """`wire.Past`."""

    facts: Said
    rank: int
    age_ms: int


class Part(Struct, array_like=True, tag="part", gc=False):
    """The beginning of a long query, whose end follows."""

    history: Annotated[list[Told], _Batch]
    requests: Annotated[list[Said], _Batch]


class Decided(Struct, array_like=True, tag="query", gc=False):
    """A query and its reply."""

    at: Time
    instance: Instance
    seq: int
    version: int
    """Of the policies (`State.version`)."""
    epoch: int | None
    """null: as in the last query of the instance; then the counters are differences."""
    ranks: Ranks | None
    sent: _Differences | None
    """null: as was to be expected; the next too."""
    sent_tokens: _Differences | None
    history: Annotated[list[Told], _Batch]
    requests: Annotated[list[Said], _Batch]
    chosen: Annotated[list[int], _Batch]
    reasons: Annotated[list[_Word], _Batch]
    canary: Annotated[list[int], _Batch]
    """Requests, by their place in the query, that the canary decided."""


class Reported(Struct, array_like=True, tag="load", gc=False):
    """A load report."""

    at: Time
    instance: Instance
    rank: int
    version: int
    figures: Annotated[list[int], Meta(max_length=256)]
    """FIGURES, less those of the rank's last report in this file."""


class Changed(Struct, array_like=True, tag="change", gc=False):
    """The policies changed. what: as in `orders.Change`."""

    at: Time
    what: str
    state: State


class Gap(Struct, array_like=True, tag="gap", gc=False):
    """Something is missing here: that many decisions (maybe 0), and load reports."""

    at: Time
    requests: Count
    cause: _Word


class Forget(Struct, array_like=True, tag="forget", gc=False):
    """Numbers of keys and blocks begin anew."""


Record = Head | Part | Decided | Reported | Changed | Gap | Forget
encode = msgpack.Encoder().encode
decode = msgpack.Decoder(Record).decode


class LogError(ConfigError):
    """A decision log cannot be read: not one, of another format, or without what is asked for."""
