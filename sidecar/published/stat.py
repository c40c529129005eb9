"""One message of SGLang's load publisher: `[b"load", seq, stat]`, docs/protocol.md.

seq: 8 bytes, big-endian, counts from 0 since the scheduler's start; stat: msgpack. The same since
0.5.19; 0.5.20 added to its tail.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from sidecar.errors import PeerError
from sidecar.wire import Count

TOPIC = b"load"
FRAMES = 3
SEQ_BYTES = 8
# A stat has 11 numbers of at most 9 bytes and a name: below 120 bytes. The rest is room to grow.
MAX_STAT_BYTES = 4096

CAUSES = ("frames", "malformed", "field", "rank")
"""Why a message is refused."""


class LoadStat(Struct, array_like=True, tag="LoadStat", gc=False):
    """What SGLang tells, by position; what follows at the tail is ignored."""

    running: Count
    """Requests that decode. Those in prefill are in no count until a later stat."""
    waiting: Count
    used_tokens: Count
    """KV tokens in use."""
    capacity_tokens: Count
    """KV tokens that the rank can hold; 0: unknown."""
    dp_rank: Annotated[int, Meta(ge=0, lt=65536)] | None = None
    waiting_uncached_tokens: Count = 0
    """From here on since 0.5.20."""
    total_tokens: Count = 0
    """KV tokens in use and prompt tokens waiting."""
    max_running: Count = 0


_decoder = msgspec.msgpack.Decoder(LoadStat)


def decode(frames: Sequence[bytes]) -> tuple[int, LoadStat]:
    """Sequence number and stat. Raises PeerError with one of CAUSES."""
    if len(frames) != FRAMES or frames[0] != TOPIC or len(frames[1]) != SEQ_BYTES:
        raise PeerError("frames", "not a topic, 8 bytes of a sequence number and a stat")
    try:
        return int.from_bytes(frames[1], "big"), _decoder.decode(frames[2])
    except msgspec.ValidationError as error:
        # msgspec quotes what stands there where it says "Invalid value".
        text = "not a LoadStat" if str(error).startswith("Invalid value") else str(error)
        raise PeerError("field", text) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise PeerError("malformed", "not one msgpack value") from None
