"""The index against a dictionary of every prefix (reference.py)."""

from bisect import bisect_right

from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.policies.kv.footprint import Footprint
from sidecar.policies.kv.index import NODE_WEIGHT, PrefixIndex
from tests.kv.reference import ENDS, Naive, Pair, blocks_of, check, tokens_of

RANKS = 3
LETTERS = st.integers(0, 2)
PROMPTS = st.lists(LETTERS, max_size=8).map(tuple)
TAILS = st.integers(0, 3)
RANK = st.integers(0, RANKS - 1)


@st.composite
def histories(draw) -> list[tuple]:
    """Prompts with tail, rank and how late they are told of: new ones, earlier ones, parts of
    those, and those gone on with.
    """
    prompts, uses = [()], []
    for _ in range(draw(st.integers(0, 15))):
        stem = draw(st.sampled_from(prompts))
        stem = stem[: draw(st.integers(0, len(stem)))] if draw(st.booleans()) else stem
        prompt = (stem + tuple(draw(st.lists(LETTERS, max_size=3))))[: len(ENDS)]
        prompts.append(prompt)
        uses.append((prompt, draw(TAILS), draw(RANK), draw(st.integers(0, 3))))
    return uses


USES = histories()
FLUSHES = st.sets(st.integers(0, 15), max_size=3)


def compare(pair: Pair, asked: list[tuple]) -> None:
    check(pair.index)
    for prompt, tail in asked:
        got, expected = pair.held(prompt, tail)
        assert got == expected
        assert list(got.values()) == sorted(got.values(), reverse=True)


ASKED = st.lists(st.tuples(PROMPTS, TAILS), min_size=1, max_size=6)


@given(USES, ASKED)
def test_held(uses: list[tuple], asked: list[tuple]) -> None:
    pair = Pair(RANKS)
    for now, (prompt, tail, rank, back) in enumerate(uses):
        pair.use(prompt, tail, rank, max(0, now - back))
        compare(pair, [*asked, (prompt, tail), (prompt[:-1], 0), ((*prompt, 9)[: len(ENDS)], 1)])


CAPACITIES = st.sampled_from([20, 60, 150])


def evicting(uses: list[tuple], asked: list[tuple], capacity: int, flushes: set[int]) -> None:
    """But for prompts that end within a node, which renew all of it."""
    pair, now = Pair(RANKS, capacity), 0
    for step, (prompt, tail, rank, back) in enumerate(uses):
        now += 1
        if step in flushes:
            now += 1
            pair.clear(rank, now)
        if not pair.naive.beyond(prompt):
            pair.use(prompt, tail, rank, max(0, now - back))
        compare(pair, [*asked, (prompt, tail)])


@given(USES, ASKED, CAPACITIES, FLUSHES)
def test_held_by_caches_that_evict(uses, asked, capacity: int, flushes: set[int]) -> None:
    evicting([(*use[:3], 0) for use in uses], asked, capacity, flushes)


@given(USES, ASKED, CAPACITIES, FLUSHES)
@example([((0,), 0, 0, 0), ((0, 0), 0, 0, 3)], [((0,), 0)], 20, {0})
def test_held_by_caches_that_evict_and_are_told_late(uses, asked, capacity, flushes) -> None:
    evicting(uses, asked, capacity, flushes)


@given(USES, ASKED, FLUSHES)
@example([((0, 1, 2), 0, 0, 0), ((0,), 0, 0, 0)], [((0, 1, 2), 0)], {1})
def test_held_by_caches_that_are_emptied(uses, asked, flushes: set[int]) -> None:
    pair = Pair(RANKS)
    for now, (prompt, tail, rank, _) in enumerate(uses):
        if now in flushes:
            pair.clear(rank, now)
        pair.use(prompt, tail, rank, now)
        compare(pair, [*asked, *((used, 0) for used, *_ in uses)])


def test_what_was_emptied_is_not_held_for_a_shorter_prompt() -> None:
    """The node of the long prompt is known still, and only a part of it is used again."""
    pair = Pair(1)
    pair.use((0, 1, 2, 1, 0), 0, 0, 0)
    pair.clear(0, 1)
    pair.use((0, 1), 0, 0, 1)
    compare(pair, [((0, 1, 2, 1, 0), 0), ((0, 1), 0)])
    assert pair.held((0, 1, 2, 1, 0), 0)[0] == {0: ENDS[1]}


@given(USES, PROMPTS)
def test_known_by_bisection(uses: list[tuple], prompt: tuple) -> None:
    pair = Pair(RANKS)
    for now, (used, tail, rank, _) in enumerate(uses):
        pair.use(used, tail, rank, now)
    for asked in [prompt, *(used for used, *_ in uses)]:
        blocks = blocks_of(asked)
        known = {block for used, *_ in uses for block in blocks_of(used)}
        expected = 0
        while expected < len(blocks) and blocks[expected] in known:
            expected += 1
        assert pair.index.known(blocks) == expected


def nodes_weight(prompts: list[tuple]) -> int:
    """The most that a prompt can weigh: every block of it a node."""
    return max(len(prompt) for prompt in prompts) * (1 + NODE_WEIGHT)


def blocks(tokens: int) -> int:
    return bisect_right(ENDS, tokens)


@given(USES, st.sampled_from([5, 12, 30, 60]), st.sampled_from([0, 40]))
def test_the_limit(uses: list[tuple], limit: int, capacity: int) -> None:
    pair = Pair(RANKS, capacity, limit)
    index = pair.index
    for now, (prompt, tail, rank, back) in enumerate(uses):
        before = index.weight
        pair.use(prompt, tail, rank, max(0, now - back))
        check(index)
        nodes = len(index._recent)
        assert index.weight <= limit or nodes == 1
        assert index.weight <= max(limit, before) + nodes_weight([prompt])
    if not capacity:  # no block is held that is not held without a limit
        for prompt, tail, *_ in uses:
            got, expected = pair.held(prompt, tail)
            assert all(blocks(got[rank]) <= blocks(expected[rank]) for rank in got)


@given(st.permutations(range(8)), st.integers(1, 7))
def test_the_limit_evicts_the_least_recently_used(order: list[int], kept: int) -> None:
    limit = kept * (3 + NODE_WEIGHT)
    pair = Pair(1, limit=limit)
    for now, letter in enumerate([*range(8), *order]):
        pair.use((letter, 0, 1), 0, 0, now)
    last = order[-kept:]
    assert [letter for letter in range(8) if pair.held((letter, 0, 1), 0)[0]] == sorted(last)
    assert pair.footprints[0].total == kept * ENDS[2]


def test_the_limit_evicts_leaves_and_keeps_what_they_share() -> None:
    pair = Pair(1, limit=3 + 2 * (NODE_WEIGHT + 3) + NODE_WEIGHT)
    for now, letter in enumerate(range(3)):
        pair.use((7, 7, 7, letter, 0, 1), 0, 0, now)
        check(pair.index)
    held = [pair.held((7, 7, 7, letter, 0, 1), 0)[0].get(0, 0) for letter in range(3)]
    assert held == [ENDS[2], ENDS[5], ENDS[5]]


@given(USES, PROMPTS)
def test_namespaces_never_match(uses: list[tuple], prompt: tuple) -> None:
    index = PrefixIndex(ENDS, {rank: Footprint(0, 0, 0) for rank in range(RANKS)}, 1 << 20)
    for now, (used, tail, rank, _) in enumerate(uses):
        index.use(blocks_of(used, 1), tokens_of(used, tail), rank, now)
    for asked in [prompt, *(used for used, *_ in uses)]:
        assert index.held(blocks_of(asked, 2), tokens_of(asked, 0)) == {}
        assert index.known(blocks_of(asked, 2)) == 0


def test_the_tail() -> None:
    """A prompt that came as it is is held whole, not only up to its last block."""
    pair = Pair(2)
    pair.use((0, 1, 2), 3, 0, 0)
    end = ENDS[2]
    assert pair.held((0, 1, 2), 3)[0] == {0: end + 3}
    assert pair.held((0, 1, 2), 1)[0] == {0: end + 1}  # no more than there is
    assert pair.held((0, 1, 2, 5), 0)[0] == {0: end + 3}  # and goes on there
    assert pair.held((0, 1), 2)[0] == {0: ENDS[1]}
    pair.use((0, 1, 2, 5), 2, 0, 1)
    assert pair.held((0, 1, 2), 3)[0] == {0: end}  # how it went on after the block is not known
    assert pair.held((0, 1, 2, 5), 3)[0] == {0: ENDS[3] + 2}
    pair.use((0, 1, 2, 6), 1, 1, 2)
    assert pair.held((0, 1, 2, 5), 3)[0] == {0: ENDS[3] + 2, 1: end}


def test_capacity_unknown_evicts_nothing_and_known_does() -> None:
    pair = Pair(2)
    pair.footprints[1].capacity = pair.naive.ranks[1].capacity = 5 * ENDS[2]
    for now in range(50):
        for rank in (0, 1):
            pair.use((now, 0, 1), 0, rank, now)
    held = [pair.held((now, 0, 1), 0)[0] for now in range(50)]
    assert [now for now in range(50) if 0 in held[now]] == list(range(50))
    assert [now for now in range(50) if 1 in held[now]] == list(range(45, 50))


def test_the_reference_tells_tails_from_blocks() -> None:
    """The reference itself, by hand."""
    naive = Naive(Pair(1).naive.ranks)
    naive.use((0, 1), ENDS[1] + 2, 0, 0)
    assert naive.held((0, 1), ENDS[1] + 3) == {0: ENDS[1] + 2}
    assert naive.held((0, 2), ENDS[1]) == {0: ENDS[0]}
    assert naive.held((1,), ENDS[0]) == {}
