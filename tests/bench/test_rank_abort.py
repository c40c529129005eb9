"""What a real-time driver of the model's rank adds: aborts, answers of no length, a flush."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.model.rank import Rank
from bench.model.request import RankSpec, Request

SPEC = RankSpec(cache_tokens=64, page_tokens=4, chunk_tokens=8, max_running=3)


def request(name: int, prompt: int, output: int) -> Request:
    pages = tuple((name, page) for page in range(prompt // SPEC.page_tokens))
    return Request(pages, prompt, output, name)


def step(rank: Rank) -> list[Request]:
    work = rank.plan()
    return rank.finish(work.prefill)[1] if work is not None else []


def assert_nothing_is_held(rank: Rank) -> None:
    assert rank.requests == 0
    assert rank.cache.pinned == 0
    assert rank.cache.reserved == 0
    assert (rank.context, rank.waiting_tokens, rank.waiting_uncached) == (0, 0, 0)
    assert rank.load().tokens == 0


def where_waiting(rank: Rank, this: Request) -> None:
    for name in range(3):
        rank.add(request(name, 8, 9))
    step(rank)
    rank.add(this)


def where_chunked(rank: Rank, this: Request) -> None:
    rank.add(this)
    step(rank)
    assert rank.chunked is this


def where_fresh(rank: Rank, this: Request) -> None:
    where_chunked(rank, this)
    step(rank)
    assert rank.fresh == [this]


def where_running(rank: Rank, this: Request) -> None:
    where_fresh(rank, this)
    step(rank)
    step(rank)
    assert rank.running


@pytest.mark.parametrize("bring", [where_waiting, where_chunked, where_fresh, where_running])
def test_an_aborted_request_holds_nothing(bring: Callable[[Rank, Request], None]) -> None:
    rank = Rank(SPEC)
    this = request(7, 14, 20)
    bring(rank, this)
    rank.abort(this)
    ended = []
    while rank.requests:
        ended += step(rank)
    assert this not in ended
    assert_nothing_is_held(rank)


def test_what_was_computed_of_it_stays_cached() -> None:
    rank = Rank(SPEC)
    this = request(7, 14, 20)
    where_running(rank, this)
    # 14 tokens of the prompt and 2 of 3 answer tokens have been read.
    this.answer_pages = ("a", "b")
    rank.abort(this)
    assert rank.cache.peek((*this.pages, "a", "b")) == 4


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 40), st.integers(0, 20)),
            st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
            st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        ),
        max_size=60,
    )
)
def test_in_any_order_all_memory_comes_back(orders: list[tuple[str, int, int]]) -> None:
    rank, alive = Rank(SPEC), []
    for name, (order, first, second) in enumerate(orders):
        if order == "add":
            alive.append(request(name % 5, first, second))
            rank.add(alive[-1])
        elif order == "step":
            for _ in range(first):
                ended = step(rank)
                alive = [each for each in alive if each not in ended]
        elif alive:
            rank.abort(alive.pop(first % len(alive)))
        assert rank.requests == len(alive)
    while rank.requests:
        step(rank)
    assert_nothing_is_held(rank)


def test_an_answer_of_no_length_ends_with_its_prefill() -> None:
    rank = Rank(SPEC)
    this = request(1, 8, 0)
    rank.add(this)
    assert step(rank) == [this]
    assert_nothing_is_held(rank)


def test_a_flush_waits_for_requests() -> None:
    rank = Rank(SPEC)
    rank.add(request(1, 8, 2))
    assert not rank.flush()
    while rank.requests:
        step(rank)
    assert rank.cache.pages
    assert rank.flush()
    assert (rank.cache.pages, rank.prompt_tokens) == (0, 0)
