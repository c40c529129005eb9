"""Block hashes: where blocks end, and that equal hashes mean equal prompts up to there."""

from array import array

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.hashing import block_ends, block_hashes

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=80)
SIZES, COUNTS = st.integers(1, 8), st.integers(0, 20)
GROWTHS = st.integers(0, 20)
SPACES = st.integers(0, 2**64 - 1)


def lengths(ends: tuple[int, ...]) -> list[int]:
    return [end - begin for begin, end in zip((0, *ends), ends, strict=False)]


def test_ends_of_equal_blocks() -> None:
    assert block_ends(64, 4, 0) == (64, 128, 192, 256)


def test_ends_of_growing_blocks() -> None:
    """Sixteen to a doubling: 64 tokens up to 2,048, of which 128 are a sixteenth, and so on."""
    sizes = lengths(block_ends(64, 128, 16))
    assert sizes[:32] == [64] * 32
    assert sizes[32:48] == [128] * 8 + [192] * 6 + [256, 256]
    assert block_ends(64, 128, 16)[-1] == 545_088
    assert block_ends(64, 128, 14)[-1] == 1_384_192


@pytest.mark.parametrize("growth", [0, 1, 16])
def test_no_blocks(growth: int) -> None:
    assert block_ends(0, 8, growth) == block_ends(64, 0, growth) == ()
    assert block_hashes([1, 2, 3], 0, 8, growth=growth) == []
    assert block_hashes([1, 2, 3], 1, 0, growth=growth) == []


@pytest.mark.parametrize("growth", [1, 1 << 20])
def test_the_bounds_of_the_wire(growth: int) -> None:
    ends = block_ends(1 << 20, 4096, growth)
    # Blocks that double reach further than any number of tokens.
    assert len(ends) == (43 if growth == 1 else 4096)
    assert ends[-1] <= 1 << 62
    assert block_hashes(array("q", range(1000)), 1, 4096, growth=growth)


@given(SIZES, COUNTS, GROWTHS)
def test_a_block_is_a_share_of_what_precedes_it(size: int, most: int, growth: int) -> None:
    ends = block_ends(size, most, growth)
    assert len(ends) == most
    for begin, length in zip((0, *ends), lengths(ends), strict=False):
        assert length % size == 0
        if growth and begin >= size * growth:
            assert begin / growth - size < length <= begin / growth
        else:
            assert length == size


@given(TOKENS, TOKENS, SIZES, COUNTS, GROWTHS)
@example(list(range(80)), [], 1, 20, 2)
@example([0] * 79 + [1], [], 1, 20, 2)
def test_blocks_are_shared_exactly_as_far_as_tokens(
    a: list[int], b: list[int], size: int, most: int, growth: int
) -> None:
    b = a[: len(b)] + b[: 80 - len(a)] if b else [*a[:-1], 7]
    ends = block_ends(size, most, growth)
    ours, theirs = (block_hashes(ids, size, most, growth=growth) for ids in (a, b))
    assert len(ours) == sum(end <= len(a) for end in ends)
    assert len(theirs) == sum(end <= len(b) for end in ends)
    for mine, other, end in zip(ours, theirs, ends, strict=False):
        assert (mine == other) is (a[:end] == b[:end])


@given(TOKENS, SIZES, GROWTHS, SPACES, SPACES)
def test_namespaces_share_nothing(
    tokens: list[int], size: int, growth: int, one: int, other: int
) -> None:
    ours = block_hashes(tokens, size, 20, one, growth)
    theirs = block_hashes(tokens, size, 20, other, growth)
    assert (not set(ours) & set(theirs)) is (one != other or not ours)


@given(TOKENS, SIZES, COUNTS, GROWTHS)
def test_no_token_after_the_last_end_is_read(
    tokens: list[int], size: int, most: int, growth: int
) -> None:
    ends = [end for end in block_ends(size, most, growth) if end <= len(tokens)]
    used = ends[-1] if ends else 0
    unreadable: list[object] = [*tokens[:used], *["never read"] * (len(tokens) - used)]
    expected = block_hashes(tokens[:used], size, most, growth=growth)
    assert block_hashes(unreadable, size, most, growth=growth) == expected


@given(TOKENS, SIZES, COUNTS)
def test_growth_that_never_sets_in_changes_nothing(tokens: list[int], size: int, most: int) -> None:
    assert block_hashes(tokens, size, most, growth=80) == block_hashes(tokens, size, most)


@pytest.mark.parametrize(
    "hold", [tuple, lambda ids: array("q", ids), lambda ids: np.array(ids, dtype=np.int32)]
)
def test_container_does_not_matter(hold) -> None:
    ids = [i * 7919 % 152_000 for i in range(300)]
    expected = block_hashes(ids, 4, 40, 5, 3)
    assert len(expected) == sum(end <= 300 for end in block_ends(4, 40, 3)) > 10
    assert block_hashes(hold(ids), 4, 40, 5, 3) == expected
