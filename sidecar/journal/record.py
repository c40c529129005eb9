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

from msgspec import Struct, msgpack

from sidecar.errors import ConfigError
from sidecar.wire import LoadReport, Want

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
HEAD = 3
FIGURES = LoadReport.__struct_fields__[HEAD:]
"""What a load report counts: all but version, instance and rank."""

Time = int | float
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
    boot: int
    """Its start, ns since 1970."""
    stale_seconds: float
    max_instances: int
    secret: str
    """`Seal.name` of the secret that names and hashes were made with."""
    wall: float
    """Seconds since 1970 at the monotonic time `now`."""
    now: float
    first: int
    """Number of the first decision, counted since `boot`."""
    whole: bool
    """Whether nothing happened before."""
    state: State
    reports: list[tuple[float, LoadReport]]
    """The last load report of each rank, and when it came."""


class Said(Struct, array_like=True, gc=False):
    """`wire.RequestFacts`, with names for keys and hashes."""

    key: int | bytes | None
    """A new name, which gets the next number; the number of one; null: no key."""
    namespace: int
    tokens: int
    prefix: int | None
    stem: int
    """Number of the last leading block that is known, in the place where it is; -1: none."""
    blocks: bytes
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

    history: list[Told]
    requests: list[Said]


class Decided(Struct, array_like=True, tag="query", gc=False):
    """A query and its reply."""

    at: Time
    instance: str
    seq: int
    version: int
    """Of the policies (`State.version`)."""
    epoch: int | None
    """null: as in the last query of the instance; then the counters are differences."""
    ranks: list[int] | None
    sent: list[int] | None
    """null: as was to be expected; the next too."""
    sent_tokens: list[int] | None
    history: list[Told]
    requests: list[Said]
    chosen: list[int]
    reasons: list[str]
    canary: list[int]
    """Requests, by their place in the query, that the canary decided."""


class Reported(Struct, array_like=True, tag="load", gc=False):
    """A load report."""

    at: Time
    instance: str
    rank: int
    version: int
    figures: list[int]
    """FIGURES, less those of the rank's last report in this file."""


class Changed(Struct, array_like=True, tag="change", gc=False):
    """The policies changed. what: as in `orders.Change`."""

    at: Time
    what: str
    state: State


class Gap(Struct, array_like=True, tag="gap", gc=False):
    """Something is missing here: that many decisions (maybe 0), and load reports."""

    at: Time
    requests: int
    cause: str


class Forget(Struct, array_like=True, tag="forget", gc=False):
    """Numbers of keys and blocks begin anew."""


Record = Head | Part | Decided | Reported | Changed | Gap | Forget
encode = msgpack.Encoder().encode
decode = msgpack.Decoder(Record).decode


class LogError(ConfigError):
    """A decision log cannot be read: not one, of another format, or without what is asked for."""
