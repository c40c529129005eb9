"""Hashes: golden vectors (docs/protocol.md promises them to other languages) and properties."""

import os
import random
import subprocess
import sys
from array import array
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar import hashing
from sidecar.hashing import key_hash, namespace_hash, normalize_key, preferred, prefix_hash
from sidecar.wire import MAX_KEY_BYTES

HASHES = st.integers(0, 2**64 - 1)
RANKS = st.lists(st.integers(0, 65535), min_size=1, max_size=64, unique=True)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
ONE_OF_EACH = {
    "key_hash": lambda: [
        key_hash(key)
        for key in (b"session-1", b"session-12", "naïve-🦊".encode(), b"\0", b"k" * 1024)
    ],
    "namespace_hash": lambda: [
        namespace_hash(*parts)
        for parts in (
            ("a", "bc", None),
            ("ab", "c", None),
            (None, None, "lora"),
            ("",),
            ("", None),
            (None, ""),
            (None, None, None),
        )
    ],
    "prefix_hash": lambda: [
        prefix_hash(range(5), 4),
        prefix_hash([7], 4096),
        prefix_hash(list(range(5000)), 4096),
        prefix_hash([1, 2, 3], 4096, 0xDEADBEEF),
    ],
    "block_hashes": lambda: [
        *hashing.block_hashes(list(range(10)), 4, 8),
        *hashing.block_hashes(list(range(10)), 4, 1, 7),
        *hashing.block_hashes(list(range(20)), 2, 8, 7, growth=2),
    ],
    "scores": lambda: hashing.scores(key_hash(b"session-1"), hashing.rank_bytes([0, 1, 7, 319])),
    "preferred": lambda: [
        preferred(key_hash(f"session-{i}".encode()), range(n)) for n in (8, 320) for i in range(8)
    ],
    "normalize_key": lambda: [int.from_bytes(normalize_key("k" * 1025)[-16:], "big")],
}
GOLDEN = {
    "key_hash": [
        0xDFF6588547774A2C,
        0x6A33565FA7396F6F,
        0xAF07F9351F5EB1DD,
        0x2548B3756EDF908A,
        0x4886FA9B527102CF,
    ],
    "namespace_hash": [
        0xF671BE551C64573E,
        0x7C8A40BC4BB9D6DD,
        0xF6A819BAF85372D3,
        0x9BC0FBBDB030E021,
        0xBB16E38D2398D911,
        0x818AEBD99FC985C0,
        0,
    ],
    "prefix_hash": [
        0xB607184C874824CC,
        0xF8F0538BBAAFA657,
        0xD0483D10C38FA940,
        0xA923BAC1EC4FB181,
    ],
    "block_hashes": [
        *(0x87656C9B759F41C1, 0xCEF669B512D16C5E, 0x1551A566345182A1, 0x3F5F000101B8460B),
        *(0xCFB2F68B2823E44D, 0xBC4B6955143C01DF, 0xBD27C29C4D2677A5, 0xEA67FAD60FA1A36B),
        0x65D69FB3E77EB634,
    ],
    "scores": [0xD0B72835BCB97DC3, 0xE799767CFE0ADAA3, 0x6615E79F8D829181, 0x98A430E2F8A309F3],
    "preferred": [5, 1, 4, 4, 3, 1, 7, 1, 65, 23, 156, 207, 183, 35, 242, 24],
    "normalize_key": [0xA627A69F38E7A93B826595AEAC857C2C],
}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_golden(name: str) -> None:
    assert ONE_OF_EACH[name]() == GOLDEN[name]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_golden_in_another_process(seed: str) -> None:
    code = (
        "from tests.test_hashing import GOLDEN, ONE_OF_EACH as one\n"
        "import sys; sys.exit({n: f() for n, f in one.items()} != GOLDEN)"
    )
    env = os.environ | {"PYTHONHASHSEED": seed}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


@given(HASHES, RANKS, st.data())
def test_order_of_candidates_does_not_matter(affinity: int, ranks: list[int], data) -> None:
    assert preferred(affinity, data.draw(st.permutations(ranks))) == preferred(affinity, ranks)


@given(st.lists(HASHES, max_size=50), RANKS, st.data())
def test_a_rank_that_leaves_moves_its_keys_only(keys: list[int], ranks: list[int], data) -> None:
    gone = data.draw(st.sampled_from(ranks))
    rest = [rank for rank in ranks if rank != gone]
    before = [preferred(key, ranks) for key in keys]
    if rest:
        for key, home in zip(keys, before, strict=True):
            assert (preferred(key, rest) == home) is (home != gone)
    assert [preferred(key, [*rest, gone]) for key in keys] == before


def test_rank_3_of_8_over_5000_keys() -> None:
    keys = [key_hash(f"session-{i}".encode()) for i in range(5000)]
    before = [preferred(key, range(8)) for key in keys]
    without = [preferred(key, [0, 1, 2, 4, 5, 6, 7]) for key in keys]
    moved = [(a, b) for a, b in zip(before, without, strict=True) if a != b]
    assert len(moved) == before.count(3)
    assert {home for home, _ in moved} == {3}
    assert {target for _, target in moved} == {0, 1, 2, 4, 5, 6, 7}


@pytest.mark.parametrize("name", ["session-{}", "{}", "user-{}-turn", "\0{}"])
def test_similar_keys_spread_evenly(name: str) -> None:
    homes = Counter(preferred(key_hash(name.format(i).encode()), range(8)) for i in range(10_000))
    assert all(abs(homes[rank] - 1250) <= 0.15 * 1250 for rank in range(8)), homes


def test_spread_over_320_ranks_reaches_all() -> None:
    homes = Counter(preferred(key_hash(f"session-{i}".encode()), range(320)) for i in range(20_000))
    assert len(homes) == 320
    assert max(homes.values()) < 2 * 20_000 / 320


def test_longer_key_is_independent() -> None:
    same = sum(
        preferred(key_hash(f"session-{i}".encode()), range(8))
        == preferred(key_hash(f"session-{i}2".encode()), range(8))
        for i in range(2000)
    )
    assert 150 < same < 350  # one in eight by chance: 250


@pytest.mark.parametrize("count", [1, 4, 39, 40, 41, 4096])
@pytest.mark.parametrize(
    "hold",
    [
        tuple,
        lambda ids: array("q", ids),
        lambda ids: array("i", ids),
        lambda ids: np.array(ids, dtype=np.int32),
        lambda ids: np.array(ids, dtype=np.int64),
        lambda ids: np.array(ids, dtype=np.uint32),
        lambda ids: np.array([ids, ids], dtype=np.int64).T[:, 0],
    ],
    ids=["tuple", "q", "i", "int32", "int64", "uint32", "strided"],
)
def test_container_does_not_matter(hold, count: int) -> None:
    ids = random.Random(1).choices(range(152_000), k=40)
    assert prefix_hash(hold(ids), count, 5) == prefix_hash(ids, count, 5)
    assert hashing.block_hashes(hold(ids), 4, count, 5) == hashing.block_hashes(ids, 4, count, 5)


@given(TOKENS, st.integers(1, 50))
def test_prefix_hash_covers_exactly_the_first_tokens(tokens: list[int], count: int) -> None:
    full = prefix_hash(tokens, count)
    assert (full is None) is (not tokens)
    assert full == prefix_hash(tokens[:count], count) == prefix_hash(tokens[:count], 4096)
    if len(tokens) >= count:
        assert full == prefix_hash([*tokens, 1], count)
    else:
        assert full != prefix_hash([*tokens, 1], count)
    if tokens:
        changed = list(tokens)
        changed[min(count, len(tokens)) - 1] ^= 1
        assert full != prefix_hash(changed, count)


@pytest.mark.parametrize("empty", [[], (), array("q"), array("i"), np.array([], dtype=np.int32)])
def test_no_tokens(empty) -> None:
    assert prefix_hash(empty, 4096, 9) is None
    assert hashing.block_hashes(empty, 16, 8, 9) == []


def test_namespaces_separate() -> None:
    """The same prompt with another extra_key, cache_salt or LoRA is another cache entry."""
    parts = [
        (None, None, None),
        *[("a", None, None), (None, "a", None), (None, None, "a")],
        *[("", None, None), (None, "", None), ("a", "bc", None), ("ab", "c", None)],
        *[("\ud800", None, None), ("a\0", None, None), ("a", "", None)],
    ]
    spaces = [namespace_hash(*part) for part in parts]
    assert spaces[0] == 0
    assert len(set(spaces)) == len(parts)
    assert len({prefix_hash([1, 2, 3], 4096, space) for space in spaces}) == len(parts)
    blocks = [hashing.block_hashes([1, 2, 3, 4], 2, 8, space) for space in spaces]
    assert len({hash_ for chain in blocks for hash_ in chain}) == 2 * len(parts)


@pytest.mark.parametrize(
    "key", ["", " ", "   ", "\t\r\n", "\u00a0", "\u2003\u3000", "\x85", "\x1c"]
)
def test_blank_is_no_key(key: str) -> None:
    assert normalize_key(key) == b""
    assert normalize_key(key.encode()) == b""


def test_none_is_no_key() -> None:
    assert normalize_key(None) == b""


@pytest.mark.parametrize("key", ["\ud800", "a\udcff", "\0", "🦊", " a ", "\ufeff", "k" * 2**20])
def test_odd_keys_are_stable_and_bounded(key: str) -> None:
    data = normalize_key(key)
    assert 0 < len(data) <= MAX_KEY_BYTES
    assert data == normalize_key(key.encode(errors="surrogatepass")) == normalize_key(data)


@given(st.text() | st.binary())
@example("\x1f ")
@example(b"\xff\xfe")
def test_str_and_bytes_agree(key: str | bytes) -> None:
    data = normalize_key(key)
    assert normalize_key(data) == data
    if isinstance(key, str):
        assert normalize_key(key.encode(errors="surrogatepass")) == data
        assert (data == b"") is (not key.strip())


def test_long_keys_keep_apart() -> None:
    long = "k" * MAX_KEY_BYTES
    assert normalize_key(long) == long.encode()
    digests = {normalize_key(long + end) for end in ("a", "b", "aa")}
    assert len(digests) == 3
    assert all(digest.startswith(b"xxh128:") and len(digest) == 23 for digest in digests)
