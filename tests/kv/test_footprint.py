"""A footprint against a dictionary of everything that is held, summed up anew each time."""

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.policies.kv.footprint import Footprint

TOKENS = [1, 2, 3, 5, 8, 13, 21]


@dataclass
class Naive:
    """Item -> span of its last use, of what is held."""

    capacity: int
    oldest: int = 0
    since: int = 0
    spans: dict[int, int] = field(default_factory=dict)

    def use(self, item: int, span: int) -> None:
        if item not in self.spans and span < self.oldest:
            return
        self.spans[item] = max(span, self.spans.get(item, span))
        while self.capacity and self.total > self.capacity and len({*self.spans.values()}) > 1:
            first = min(self.spans.values())
            self.spans = {i: s for i, s in self.spans.items() if s > first}
            self.oldest = first + 1

    @property
    def total(self) -> int:
        return sum(TOKENS[item] for item in self.spans)

    @property
    def active(self) -> int:
        return sum(TOKENS[item] for item, span in self.spans.items() if span >= self.since)


USES = st.tuples(st.just("use"), st.integers(0, len(TOKENS) - 1), st.integers(0, 6))
OPERATIONS = st.lists(
    st.one_of(
        USES,
        USES,
        USES,
        st.tuples(st.just("advance"), st.integers(1, 3)),
        st.tuples(st.just("age"), st.integers(-2, 4)),
        st.tuples(st.just("drop"), st.integers(0, len(TOKENS) - 1)),
        st.tuples(st.just("clear")),
        st.tuples(st.just("capacity"), st.sampled_from([0, 4, 20, 40, 1000])),
    ),
    max_size=80,
)


@given(OPERATIONS, st.sampled_from([0, 1, 10, 25, 40, 1000]), st.integers(0, 5))
@example([("use", 6, 0), ("use", 5, 0), ("advance", 1), ("use", 4, 0), ("use", 6, 0)], 40, 0)
def test_against_a_dictionary(operations: list[tuple], capacity: int, window: int) -> None:
    now, footprint, naive = 10, Footprint(capacity, 0, 0), Naive(capacity)
    seen: dict[int, int] = {}  # what an owner keeps for each item
    for name, *args in operations:
        if name == "use":
            item, span = args[0], now - args[1]
            seen[item] = footprint.use(TOKENS[item], seen.get(item, -1), span)
            naive.use(item, span)
        elif name == "advance":  # as a clock does: by one, and the window with it
            for _ in range(args[0]):
                now += 1
                naive.since = max(0, now - window)
                footprint.age(naive.since)
        elif name == "age":  # anywhere
            naive.since = max(0, naive.since + args[0])
            footprint.age(naive.since)
        elif name == "drop" and args[0] in seen:
            footprint.drop(TOKENS[args[0]], seen.pop(args[0]))
            naive.spans.pop(args[0], None)
        elif name == "clear":
            now += 1
            footprint.clear(now)
            naive.spans, naive.oldest = {}, now
        elif name == "capacity":
            footprint.capacity = naive.capacity = args[0]
        assert (footprint.total, footprint.active) == (naive.total, naive.active)
        assert footprint.oldest == naive.oldest
        assert {item: span for item, span in seen.items() if footprint.holds(span)} == naive.spans


def use(footprint: Footprint, *uses: tuple[int, int]) -> list[int]:
    return [footprint.use(tokens, -1, span) for tokens, span in uses]


def test_the_oldest_span_is_evicted_whole_and_the_last_never() -> None:
    footprint = Footprint(100, 0, 0)
    assert use(footprint, (30, 1), (40, 2), (30, 1)) == [1, 2, 1]
    assert (footprint.total, footprint.oldest) == (100, 0)  # full, not over
    use(footprint, (1, 3))
    assert (footprint.total, footprint.oldest) == (41, 2)
    use(footprint, (500, 3))
    assert (footprint.total, footprint.oldest) == (501, 3)  # more than fits, in one span
    assert footprint.holds(3)
    assert not footprint.holds(2)


def test_capacity_unknown_evicts_nothing() -> None:
    footprint = Footprint(0, 0, 0)
    use(footprint, *((1000, span) for span in range(50)))
    assert (footprint.total, footprint.oldest) == (50_000, 0)


def test_evicted_while_active_and_used_again() -> None:
    footprint = Footprint(10, 0, 0)
    (first,) = use(footprint, (8, 1))
    use(footprint, (8, 2))
    assert not footprint.holds(first)
    assert (footprint.total, footprint.active) == (8, 8)
    again = footprint.use(8, first, 3)
    assert again == 3
    assert (footprint.total, footprint.active) == (8, 8)
    footprint.age(4)
    assert footprint.active == 0


@pytest.mark.parametrize("span", [3, 4, 5])
def test_an_older_use_never_makes_younger_or_older(span: int) -> None:
    footprint = Footprint(0, 0, 4)
    seen = footprint.use(7, -1, 5)
    assert footprint.use(7, seen, span) == 5
    assert (footprint.total, footprint.active) == (7, 7)


def test_what_was_gone_before_it_is_told_of_is_not_held() -> None:
    footprint = Footprint(10, 0, 0)
    use(footprint, (8, 3), (8, 5))
    assert not footprint.holds(footprint.use(4, -1, 2))
    assert (footprint.total, footprint.active) == (8, 8)
