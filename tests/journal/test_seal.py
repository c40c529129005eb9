"""Names of keys and hashes in the log."""

from random import Random

import pytest

from sidecar.hashing import key_hash
from sidecar.journal.seal import Seal

SECRET, OTHER = bytes(range(32)), bytes(32)


def test_what_is_sealed_comes_back() -> None:
    drawn, seal = Random(1), Seal(SECRET)
    values = [0, 1, (1 << 64) - 1, 1 << 32, *(drawn.getrandbits(64) for _ in range(500))]
    sealed = [seal.seal(value) for value in values]
    assert [seal.unseal(value) for value in sealed] == values
    assert len(set(sealed)) == len(set(values)), "two values never share a name"
    assert all(0 <= value < 1 << 64 for value in sealed)


def test_a_secret_gives_the_same_names_each_time_and_others_than_another_secret() -> None:
    seal, again, other = Seal(SECRET), Seal(SECRET), Seal(OTHER)
    assert seal.of_key(b"key") == again.of_key(b"key") != other.of_key(b"key")
    assert seal.one_way(5) == again.one_way(5) != other.one_way(5)
    assert seal.name == again.name != other.name


def test_names_are_golden() -> None:
    """A log that was written by an older version is still found by its keys."""
    seal = Seal(SECRET)
    assert f"{seal.of_key(b'key'):016x}" == "c1da327ada7c8620"
    assert seal.one_way(5).hex() == "3a885cd6079f201c"
    assert seal.unseal(seal.of_key(b"key")) == key_hash(b"key")


def test_a_long_key_is_called_as_it_travels() -> None:
    seal = Seal(SECRET)
    assert seal.of_key(b"a" * 5000) == seal.of_key(b"a" * 5000) != seal.of_key(b"a" * 5001)


def test_half_a_secret_is_none() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Seal(b"short")
