"""Which keys the canary takes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.canary import Canary
from sidecar.hashing import key_hash, normalize_key
from sidecar.wire import RequestFacts
from tests.kv.server import prompt
from tests.support import (
    keyless,
    make_dispatcher,
    order_of,
)

KEYS = 100_000


def share_of(share: float) -> Canary:
    return Canary(make_dispatcher().active, share)


# ---- who is taken


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 0.9])
def test_the_share_is_right(share: float) -> None:
    canary = share_of(share)
    spread = 5 * (KEYS * share * (1 - share)) ** 0.5  # five standard deviations
    for make in (
        lambda i: RequestFacts(b"user-%d" % i),
        lambda i: RequestFacts(prefix_hash=key_hash(b"%d" % i)),
        lambda i: RequestFacts(block_hashes=[key_hash(b"b%d" % i), 1, 2]),
    ):
        taken = sum(canary.takes(make(i)) for i in range(KEYS))
        assert abs(taken - KEYS * share) <= spread


def test_all_none_and_the_smallest() -> None:
    facts = [RequestFacts(b"%d" % i) for i in range(1000)]
    assert not any(share_of(0.0).takes(one) for one in facts)
    assert all(share_of(1.0).takes(one) for one in facts)
    assert not any(share_of(1e-18).takes(one) for one in facts)
    edge = RequestFacts(block_hashes=[(1 << 64) - 1]), RequestFacts(prefix_hash=0)
    assert all(share_of(1.0).takes(one) for one in edge)


@given(st.binary(min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_keeps_who_was_taken(key: bytes, one: float, other: float) -> None:
    facts = RequestFacts(key)
    few, many = share_of(min(one, other)), share_of(max(one, other))
    assert many.takes(facts) or not few.takes(facts)


@given(st.binary(min_size=1, max_size=40), st.floats(0, 1), st.integers(0, 9999))
def test_a_key_always_goes_the_same_way(key: bytes, share: float, anything: int) -> None:
    canary = share_of(share)
    blocks = list(range(1, anything % 7 + 1))
    others = [
        RequestFacts(key, anything, anything, anything, blocks, anything % 8, anything),
    ]
    if normalize_key(key):  # blank ones are none
        assert {canary.takes(one) for one in others} == {canary.takes(RequestFacts(key))}


def test_turns_without_a_key_stay_together() -> None:
    canary = share_of(0.5)
    for i in range(200):
        first, grown = prompt(f"p{i}", 200), prompt(f"p{i}", 60_000)
        assert canary.takes(first) == canary.takes(grown)
    assert not share_of(1.0).takes(keyless(50)), "nothing to tell it by"
    assert not share_of(1.0).takes(RequestFacts(b"   ", tokens=50)), "a blank key is none"


def test_whom_it_takes_has_nothing_to_do_with_where_keys_go() -> None:
    canary = share_of(0.5)
    taken: Counter[int] = Counter()
    for i in range(8000):
        key = b"k%d" % i
        taken[order_of(key_hash(key), range(8))[0]] += canary.takes(RequestFacts(key))
    assert all(abs(count - 500) < 5 * 250**0.5 for count in taken.values())
