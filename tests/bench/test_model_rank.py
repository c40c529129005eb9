"""One rank's scheduler: memory, order, chunks, what is cached, and the load that it reports."""

from itertools import count
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.model.radix import RadixCache
from bench.model.rank import Rank
from bench.model.request import Load, RankSpec, Request
from bench.model.steps import Work

PAGE = 4
fresh_pages = count(10**6)


def make_rank(**changes):
    defaults = {"page_tokens": PAGE, "cache_tokens": 4000, "chunk_tokens": 16}
    return Rank(RankSpec(**(defaults | changes)))


def request(prompt=8, output=1, pages=None, name=""):
    """A request whose pages nobody else has, unless they are given."""
    if pages is None:
        pages = [next(fresh_pages) for _ in range(ceil(prompt / PAGE))]
    return Request(tuple(pages), prompt, output, name)


def in_rank(rank):
    """Requests that hold memory."""
    held = {id(r): r for r in [*rank.fresh, *rank.batch, *(entry[2] for entry in rank.running)]}
    if rank.chunked is not None:
        held[id(rank.chunked)] = rank.chunked
    return list(held.values())


def check_memory(rank):
    """What the cache holds and what was promised fits, and only what is in use is pinned."""
    held = in_rank(rank)
    promised = sum(r.prompt_tokens + r.output_tokens - r.stored for r in held)
    page = rank.spec.page_tokens
    assert rank.cache.pages * page + promised <= rank.cache.capacity * page
    assert rank.cache.pinned * page <= sum(r.stored for r in held)
    assert len(held) == rank.active <= rank.spec.max_running


def step(rank):
    """One step; returns its work, who got a first token and who ended."""
    work = rank.plan()
    check_memory(rank)
    if work is None:
        return None, [], []
    assert work.tokens > 0
    if work.prefill:
        assert work.tokens <= rank.spec.chunk_tokens
    firsts, ended = rank.finish(work.prefill)
    check_memory(rank)
    return work, firsts, ended


def run(rank, limit=10_000):
    """Until nothing is left: works, first tokens and ends, in order."""
    works, firsts, ended = [], [], []
    for _ in range(limit):
        work, first, end = step(rank)
        if work is None:
            return works, firsts, ended
        works.append(work)
        firsts += first
        ended += end
    raise AssertionError("the rank does not come to an end")


def serve(rank, *requests):
    for each in requests:
        rank.add(each)
    return run(rank)


def check_idle(rank):
    assert (rank.requests, rank.active, rank.to_prefill) == (0, 0, 0)
    assert (rank.waiting_tokens, rank.waiting_uncached, rank.context) == (0, 0, 0)
    assert rank.cache.pinned == 0
    assert rank.load() == Load(0, 0, 0, 0)


SHARED = list(range(1, 13))


@st.composite
def arrivals(draw):
    """Requests with a few shared beginnings, each with the number of steps before it."""
    found = []
    for _ in range(draw(st.integers(1, 14))):
        prompt, output = draw(st.integers(1, 40)), draw(st.integers(1, 20))
        shared = draw(st.integers(0, prompt // PAGE))
        pages = [p + 100 * draw(st.integers(0, 1)) for p in SHARED[:shared]]
        pages += [next(fresh_pages) for _ in range(ceil(prompt / PAGE) - shared)]
        found.append((draw(st.integers(0, 6)), request(prompt, output, pages)))
    return found


@given(
    arrivals=arrivals(),
    cache=st.sampled_from([60, 64, 100, 400]),
    chunk=st.sampled_from([1, 3, 4, 16, 64]),
    most=st.sampled_from([1, 2, 5, 256]),
)
@settings(max_examples=150)
def test_memory_holds_and_every_request_is_served_once(arrivals, cache, chunk, most):
    rank = make_rank(cache_tokens=cache, chunk_tokens=chunk, max_running=most)
    firsts, ended = [], []
    for pause, each in arrivals:
        for _ in range(pause):
            _, first, end = step(rank)
            firsts += first
            ended += end
        rank.add(each)
    _, first, end = run(rank)
    firsts += first
    ended += end
    assert firsts == [each for _, each in arrivals], "first come, first served"
    assert len(ended) == len(arrivals)
    assert set(map(id, ended)) == set(map(id, firsts))
    assert all(0 <= r.cached <= r.prompt_tokens - 1 for r in ended)
    assert all(r.cached % PAGE == 0 for r in ended)
    check_idle(rank)
    assert rank.prompt_tokens == sum(r.prompt_tokens for _, r in arrivals)
    assert rank.cached_tokens == sum(r.cached for _, r in arrivals)


@given(arrivals=arrivals(), chunk=st.sampled_from([3, 16, 64]))
def test_all_new_tokens_are_computed_once(arrivals, chunk):
    rank = make_rank(chunk_tokens=chunk)
    works, _, _ = serve(rank, *(each for _, each in arrivals))
    prefilled = sum(work.tokens for work in works if work.prefill)
    assert prefilled == rank.prompt_tokens - rank.cached_tokens
    decoded = sum(work.tokens for work in works if not work.prefill)
    assert decoded == sum(each.output_tokens - 1 for _, each in arrivals)


@given(arrivals=arrivals(), chunk=st.sampled_from([3, 16, 64]), jump=st.data())
def test_several_steps_at_once_are_as_one_after_the_other(arrivals, chunk, jump):
    one, many = make_rank(chunk_tokens=chunk), make_rank(chunk_tokens=chunk)
    for rank in (one, many):
        for number, (_, each) in enumerate(arrivals):
            rank.add(Request(each.pages, each.prompt_tokens, each.output_tokens, number))
    for _ in range(10_000):
        work = one.plan()
        assert work == many.plan()
        if work is None:
            break
        steps = jump.draw(st.integers(1, one.alike(work.prefill)))
        load = None if work.prefill else many.load(decoded=steps)
        gone = []
        for left in range(steps, 0, -1):
            if left < steps:
                assert one.plan()[:2] == work[:2], "a step like the one before"
            if left == 1 and load is not None:
                last = one.load(decoded=1)
                assert last._replace(tokens=0) == load._replace(tokens=0)
                # Tokens that a sibling has cached meanwhile are told apart when they are stored.
                assert last.tokens <= load.tokens
            gone += map(names, one.finish(work.prefill))
        assert gone[-2:] == [*map(names, many.finish(work.prefill, steps))]
        assert not any(gone[:-2]), "nobody ends within a jump"
    check_idle(one)
    check_idle(many)


def names(requests):
    return [each.call for each in requests]


# Requests that end early


@given(arrivals=arrivals(), chunk=st.sampled_from([3, 16, 64]), choice=st.data())
def test_an_abort_gives_back_what_was_held(arrivals, chunk, choice):
    rank = make_rank(cache_tokens=100, chunk_tokens=chunk)
    left = [each for _, each in arrivals]
    for each in left:
        rank.add(each)
    while left:
        for _ in range(choice.draw(st.integers(0, 5))):
            gone = set(map(id, step(rank)[2]))
            left = [each for each in left if id(each) not in gone]
        if left:
            victim = left.pop(choice.draw(st.integers(0, len(left) - 1)))
            was = rank.requests
            rank.abort(victim)
            assert rank.requests == was - 1
            check_memory(rank)
            assert rank.cache.peek(victim.pages) >= min(victim.done, victim.prompt_tokens) // PAGE
    assert rank.plan() is None
    check_idle(rank)


def test_a_flush_empties_the_cache_unless_something_is_under_way():
    rank = make_rank()
    pages = [1, 2, 3]
    serve(rank, request(12, 4, pages))
    rank.add(request(12, 4))
    assert not rank.flush()
    run(rank)
    assert rank.flush()
    assert (rank.cache.pages, rank.uncached_of(tuple(pages), 12)) == (0, 12)
    again = request(12, 4, pages)
    serve(rank, again)
    assert again.cached == 0


# Chunks


@pytest.mark.parametrize("uncached", [1, 15, 16, 17, 32, 33, 100])
def test_a_prompt_takes_as_many_steps_as_it_has_chunks(uncached):
    works, firsts, ended = serve(make_rank(), request(uncached, 1))
    assert len(works) == ceil(uncached / 16)
    assert sum(work.tokens for work in works) == uncached
    assert len(firsts) == len(ended) == 1


def test_only_what_is_not_cached_is_chunked():
    rank = make_rank()
    shared = list(range(1, 11))
    serve(rank, request(40, 1, shared))
    later = request(60, 1, [*shared, 91, 92, 93, 94, 95])
    works, _, _ = serve(rank, later)
    assert later.cached == 40
    assert [work.tokens for work in works] == [16, 4]
    # pairs of (new token, token before it): 40 cached, then 56
    assert [work.pairs for work in works] == [16 * 48, 4 * 58]


def test_pairs_of_a_chunked_prompt_add_up_to_a_triangle():
    works, _, _ = serve(make_rank(), request(100, 1))
    assert sum(work.pairs for work in works) == 100 * 100 / 2


def test_a_cached_prompt_still_computes_its_last_token():
    rank = make_rank()
    pages = [1, 2, 3, 4]
    serve(rank, request(16, 1, pages))
    again = request(16, 1, pages)
    assert rank.uncached_of(again.pages, 16) >= 1
    works, _, _ = serve(rank, again)
    assert again.cached == 12, "whole pages before the last token"
    assert works == [Work(True, 4, 4 * 14.0, 0)]
    partly = request(17, 1, [*pages, 5])
    works, _, _ = serve(rank, partly)
    assert partly.cached == 16
    assert works == [Work(True, 1, 16.5, 0)]


def test_the_rest_of_a_step_goes_to_the_next_prompt():
    rank = make_rank()
    first, second = request(20, 1), request(20, 1)
    works, firsts, _ = serve(rank, first, second)
    assert [work.tokens for work in works] == [16, 16, 8]
    assert firsts == [first, second]


def test_one_prompt_in_chunks_at_a_time():
    rank = make_rank()
    for _ in range(5):
        rank.add(request(40, 3))
    while rank.requests:
        rank.plan()
        begun = [r for r in rank.batch if r.uncached]
        assert begun in ([], [rank.chunked])
        rank.finish(bool(rank.batch))


def test_a_prompt_is_in_the_cache_as_far_as_it_is_computed():
    rank = make_rank()
    long = request(32, 1)
    rank.add(long)
    step(rank)
    assert rank.cache.peek(long.pages) == 4
    sibling = request(36, 1, [*long.pages, 777])
    assert rank.uncached_of(sibling.pages, 36) == 20
    rank.add(sibling)
    run(rank)
    assert sibling.cached == 32, "it waited, so all of the first prompt was there"


def test_prompts_in_one_step_do_not_see_each_other():
    rank = make_rank(chunk_tokens=64)
    pages = [1, 2, 3, 4, 5]
    first, second = request(20, 4, pages), request(20, 4, pages)
    serve(rank, first, second)
    assert (first.cached, second.cached) == (0, 0)
    assert rank.cache.evictable * PAGE <= 20 + 2 * 4, "what is there twice is kept once"


# Order


def test_prefill_goes_before_decode():
    rank = make_rank()
    rank.add(request(8, 10))
    kinds = []
    for turn in range(6):
        if turn == 2:
            rank.add(request(32, 10))
        kinds.append(step(rank)[0].prefill)
    assert kinds == [True, False, True, True, False, False]


def test_an_answer_of_one_token_ends_with_the_prefill():
    works, firsts, ended = serve(make_rank(), request(8, 1))
    assert works == [Work(True, 8, 32.0, 0)]
    assert firsts == ended


@pytest.mark.parametrize("output", [2, 3, 17])
def test_an_answer_takes_a_decode_step_for_each_further_token(output):
    works, _, _ = serve(make_rank(), request(8, output))
    assert [work.prefill for work in works] == [True] + [False] * (output - 1)
    # The first decode step reads the prompt and the first answer token.
    assert [work.context for work in works[1:]] == [9 + i for i in range(output - 1)]
    assert {work.tokens for work in works[1:]} == {1}


def test_no_more_run_than_may():
    rank = make_rank(max_running=2, chunk_tokens=64)
    requests = [request(8, 5, name=i) for i in range(5)]
    for each in requests:
        rank.add(each)
    most = 0
    firsts, works = [], []
    while rank.requests:
        work, first, _ = step(rank)
        works.append(work)
        firsts += first
        most = max(most, rank.active)
    assert most == 2
    assert firsts == requests
    # Two, four decode steps, two, four, one, four.
    assert [work.tokens for work in works if work.prefill] == [16, 16, 8]


def test_who_does_not_fit_waits_and_holds_up_those_behind():
    rank = make_rank(cache_tokens=48)
    big, bigger, small = request(16, 16), request(24, 8), request(4, 2)
    for each in (big, bigger, small):
        rank.add(each)
    step(rank)
    assert (rank.active, len(rank.waiting)) == (1, 2)
    _, firsts, ended = run(rank)
    assert firsts == [bigger, small]
    assert ended[0] is big
    check_idle(rank)


def test_a_refused_admission_pins_nothing():
    rank = make_rank(cache_tokens=48)
    pages = [1, 2, 3]
    serve(rank, request(12, 1, pages))
    rank.add(request(16, 16))
    step(rank)
    pinned = rank.cache.pinned
    rank.add(request(24, 4, [*pages, 4, 5, 6]))
    for _ in range(3):
        step(rank)
        assert rank.cache.pinned == pinned
    assert len(rank.waiting) == 1


def test_what_was_cached_makes_room_for_who_comes():
    rank = make_rank(cache_tokens=48)
    old = request(40, 1)
    serve(rank, old)
    serve(rank, request(40, 8))
    assert rank.cache.peek(old.pages) == 0, "evicted whole"


def test_a_request_that_can_never_fit_is_refused():
    rank = make_rank(cache_tokens=40)
    rank.add(request(32, 8))
    with pytest.raises(ValueError, match="40"):
        rank.add(request(33, 8))
    assert len(rank.waiting) == 1


def test_what_is_accepted_is_served_even_if_pages_do_not_fill_the_cache():
    """10 tokens of cache are 2 pages of 4: 9 tokens are refused or served, not kept for ever."""
    rank = make_rank(cache_tokens=10)
    try:
        rank.add(request(8, 1))
    except ValueError:
        return
    _, _, ended = run(rank)
    assert len(ended) == 1


# What is cached


def test_an_answer_is_cached_but_nobody_s_prompt():
    rank = make_rank()
    pages = [1, 2]
    serve(rank, request(8, 9, pages))
    # 16 of 17 tokens have KV: the prompt's two pages and two of the answer
    assert rank.cache.pages == 4
    later = request(16, 1, [*pages, 3, 4])
    serve(rank, later)
    assert later.cached == 8


def test_a_partly_filled_last_page_is_not_the_prompt_s():
    rank = make_rank()
    serve(rank, request(10, 7, [1, 2, 3]))
    later = request(13, 1, [1, 2, 3, 4])
    serve(rank, later)
    assert later.cached == 8, "the server filled page 3 with the answer"


def test_an_answer_that_a_prompt_may_hold_is_reused():
    rank = make_rank()
    first = request(8, 9, [1, 2])
    first.answer_pages = (31, 32)
    serve(rank, first)
    later = request(20, 1, [1, 2, 31, 32, 5])
    serve(rank, later)
    assert later.cached == 16


def test_a_shared_cache_serves_both_ranks():
    cache = RadixCache(100)
    spec = RankSpec(page_tokens=PAGE, cache_tokens=400, chunk_tokens=16)
    one, two = Rank(spec, cache), Rank(spec, cache)
    serve(one, request(16, 1, [1, 2, 3, 4]))
    other = request(17, 1, [1, 2, 3, 4, 5])
    serve(two, other)
    assert other.cached == 16


# Load, as SGLang's get_loads counts it


def test_waiting_requests_are_counted_with_their_tokens():
    rank = make_rank()
    rank.add(request(8, 4))
    rank.add(request(12, 4))
    assert rank.load() == Load(0, 2, 20, 20)
    assert (rank.requests, rank.active, rank.to_prefill) == (2, 0, 20)


def test_a_prefill_under_way_is_in_no_count_of_requests_but_in_the_tokens():
    rank = make_rank()
    rank.add(request(8, 4))
    rank.plan()
    assert rank.load() == Load(0, 0, 8, 0)
    assert rank.requests == rank.active == 1


def test_decoding_requests_run_and_their_tokens_grow():
    rank = make_rank()
    rank.add(request(8, 6))
    step(rank)
    rank.plan()
    before = rank.load()
    assert (before.running, before.waiting) == (1, 0)
    assert rank.load(decoded=2).tokens == before.tokens + 2
    rank.finish(False)
    rank.plan()
    assert rank.load().tokens == before.tokens + 1


def test_a_prompt_in_chunks_counts_what_is_left_of_it():
    rank = make_rank()
    rank.add(request(40, 4))
    rank.add(request(8, 4))
    rank.plan()
    load = rank.load()
    # SGLang's snapshot is taken with the chunk planned: 40 - 16 to go, and what waits.
    assert (load.running, load.waiting, load.waiting_uncached) == (0, 1, 24 + 8)
    assert load.tokens == 16 + 8


def test_what_waits_is_estimated_by_the_hit_rate():
    """SGLang does not match waiting prompts under FCFS; it takes its cache hit rate for them."""
    rank = make_rank()
    pages = [1, 2, 3, 4, 5]
    serve(rank, request(20, 1, pages), request(20, 1, pages))
    rate = rank.cached_tokens / rank.prompt_tokens
    assert 0 < rate < 1
    rank.add(request(20, 1, pages))
    assert rank.load().waiting_uncached == int(20 * (1 - rate))


def test_cached_tokens_that_two_requests_share_are_in_use_once():
    rank = make_rank(chunk_tokens=64)
    pages = [1, 2, 3, 4]
    serve(rank, request(16, 1, pages))
    for i in range(2):
        rank.add(request(17, 8, [*pages, 50 + i]))
    step(rank)
    rank.plan()
    # 16 shared; each holds its prompt's last token and room for nothing more yet but one
    assert 16 + 2 * 1 <= rank.load().tokens <= 16 + 2 * 2
