"""Hashes that hook and sidecar must agree on, in every process and on every machine.

All are XXH3-64 (xxhash, seeded); docs/protocol.md gives them byte for byte, tests pin golden
vectors. Nothing here depends on Python's `hash()`, which differs between processes.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise, repeat
from typing import Any

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from sidecar.wire import MAX_KEY_BYTES

# Seeds keep the domains apart: a routing key never collides by construction with a prefix hash.
KEY_SEED = 0x6B6579  # "key"
SESSION_SEED = 0x73657373  # "sess"
NAMESPACE_SEED = 0x6E616D65  # "name"
PREFIX_SEED = 0x70726566  # "pref"
BLOCK_SEED = 0x626C6F63  # "bloc"
_MASK = (1 << 64) - 1
_MAX_END = 1 << 62
"""`wire.Count`: no prompt is longer, and blocks that grow by a half soon end beyond any number."""
_LITTLE = sys.byteorder == "little"


def normalize_key(key: str | bytes | None) -> bytes:
    """Routing key as it travels: at most MAX_KEY_BYTES; b"" for none, empty or blank.

    A longer key becomes `xxh128:` and its 16-byte digest: its rank is as stable, the wire bounded.
    Lone surrogates, which HTTP headers can smuggle in, are encoded rather than refused.
    """
    if key is None:
        return b""
    if isinstance(key, bytes):
        if key and 32 < key[0] < 128 and len(key) <= MAX_KEY_BYTES:
            return key  # begins with a visible character: neither blank nor long
        if not key.decode(errors="replace").strip():
            return b""
        data = key
    else:
        if not key.strip():
            return b""
        data = key.encode(errors="surrogatepass")
    if len(data) <= MAX_KEY_BYTES:
        return data
    return b"xxh128:" + xxh3_128_digest(data, KEY_SEED)


def key_hash(key: bytes) -> int:
    """64-bit affinity hash of a normalized, non-empty routing key."""
    return xxh3_64_intdigest(key, KEY_SEED)


def session_hash(session: str) -> int:
    """64-bit affinity hash of an SGLang session, apart from all routing keys."""
    return xxh3_64_intdigest(session.encode(errors="surrogatepass"), SESSION_SEED)


def namespace_hash(*parts: str | None) -> int:
    """64-bit hash of what separates radix caches: extra_key, cache_salt, LoRA; 0 if all are None.

    Each part is one byte (0 for None, else 1), its length (8 bytes, little-endian) and its UTF-8
    bytes, so that ("a", "bc") and ("ab", "c") differ.
    """
    if parts.count(None) == len(parts):
        return 0
    data = bytearray()
    for part in parts:
        raw = b"" if part is None else part.encode(errors="surrogatepass")
        data += bytes([part is not None]) + len(raw).to_bytes(8, "little") + raw
    return xxh3_64_intdigest(bytes(data), NAMESPACE_SEED)


def prefix_hash(tokens: Iterable[int], count: int, namespace: int = 0) -> int | None:
    """64-bit hash of the first `count` tokens within a cache namespace; None without tokens.

    tokens: token ids, shape (n,), as list, tuple, array or numpy array of any integer type. Each is
    hashed as 8 bytes, little-endian, so that equal ids hash equally whatever held them.
    """
    if type(tokens) is array and tokens.typecode == "q" and 0 < len(tokens) <= count and _LITTLE:
        return xxh3_64_intdigest(tokens, PREFIX_SEED ^ namespace)  # SGLang's own, whole: no copy
    data = token_bytes(tokens, count)
    if not data:
        return None
    return xxh3_64_intdigest(data, PREFIX_SEED ^ namespace)


@lru_cache(maxsize=16)
def block_ends(block_tokens: int, max_blocks: int, growth: int = 0) -> tuple[int, ...]:
    """Token position at which each block ends, ascending. Shape (<= max_blocks,): those that a
    prompt can reach; () without blocks.

    growth: a block is as long as the growth-th part of what precedes it, rounded down to whole
    `block_tokens`, and at least one of them; 0: all are equal.
    """
    if not block_tokens:
        return ()
    ends: list[int] = []
    end = 0
    for _ in range(max_blocks):
        end += block_tokens * (max(1, end // (block_tokens * growth)) if growth else 1)
        if end > _MAX_END:
            break
        ends.append(end)
    return tuple(ends)


def block_hashes(
    tokens: Sequence[int], block_tokens: int, max_blocks: int, namespace: int = 0, growth: int = 0
) -> list[int]:
    """Chained hashes of the leading full blocks that `block_ends` tells: two prompts share the
    first k exactly if they share the tokens up to end k and the namespace. Shape (<= max_blocks,).
    """
    ends = block_ends(block_tokens, max_blocks, growth)
    full = bisect_right(ends, len(tokens))
    if not full:
        return []
    data = memoryview(token_bytes(tokens, ends[full - 1]))
    seed = BLOCK_SEED ^ namespace
    slices = _block_slices(block_tokens, max_blocks, growth)
    return [seed := xxh3_64_intdigest(data[block], seed) for block in slices[:full]]


@lru_cache(maxsize=16)
def _block_slices(block_tokens: int, max_blocks: int, growth: int) -> tuple[slice, ...]:
    """Where each block stands in `token_bytes`; made once, it is a fifth of the cost."""
    ends = block_ends(block_tokens, max_blocks, growth)
    return tuple(slice(8 * begin, 8 * end) for begin, end in pairwise((0, *ends)))


def token_bytes(tokens: Any, count: int) -> bytes | memoryview:
    """The first `count` token ids as little-endian 64-bit integers."""
    if isinstance(tokens, array) and tokens.typecode == "q":
        head = tokens
    else:
        some = tokens[:count]
        head = array("q", some.tolist() if hasattr(some, "tolist") else some)
    if not _LITTLE:
        head = head[:count]
        head.byteswap()
    return memoryview(head).cast("B")[: 8 * count]


def rank_bytes(ranks: Iterable[int]) -> list[bytes]:
    """Hash input of each rank id: 8 bytes, little-endian."""
    return [rank.to_bytes(8, "little") for rank in ranks]


def scores(affinity: int, ranks: Sequence[bytes]) -> list[int]:
    """Rendezvous (HRW) score of each rank for an affinity hash; the highest is preferred.

    A score depends on the key and the rank's id alone (Thaler and Ravishankar 1998): a rank that
    leaves moves only its own keys, and the order of the candidates does not matter.
    """
    return list(map(xxh3_64_intdigest, ranks, repeat(affinity & _MASK)))


def preferred(affinity: int, ranks: Sequence[int]) -> int:
    """Rank id with the highest rendezvous score. Raises ValueError if there is none."""
    ordered = sorted(ranks)
    values = scores(affinity, rank_bytes(ordered))
    return ordered[values.index(max(values))]
