"""The prefix cache: against a set of page prefixes, and against SGLang's own RadixCache."""

from array import array
from itertools import count
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bench.model.radix import Node, RadixCache

PROMPTS = st.lists(st.integers(0, 2), max_size=7).map(tuple)


def nodes_of(cache):
    """Every node but the root."""
    found, left = [], list(cache.root.children.values())
    while left:
        node = left.pop()
        found.append(node)
        left += node.children.values()
    return found


def path_of(node):
    pages = ()
    while node.parent is not None:
        pages = (*node.pages, *pages)
        node = node.parent
    return pages


def cached_prefixes(cache):
    """Every prefix of whole pages that the tree holds."""
    found = set()
    for node in nodes_of(cache):
        path = path_of(node)
        found |= {path[:end] for end in range(len(path) - len(node.pages) + 1, len(path) + 1)}
    return found


def prefixes(pages):
    return [tuple(pages[:end]) for end in range(1, len(pages) + 1)]


class AgainstASet(RuleBasedStateMachine):
    """The tree holds what a set of prefixes with a time of last use would."""

    def __init__(self):
        super().__init__()
        self.cache = RadixCache(1000)
        self.used: dict[tuple[int, ...], int] = {}
        """When a prefix was last part of a match or an insertion."""
        self.near: dict[tuple[int, ...], int] = {}
        """The same, or later: SGLang renews the rest of a node it splits, wherever that is."""
        self.now = 0
        self.locks: list[tuple[Node, tuple[int, ...]]] = []

    def longest(self, pages):
        return next((end for end in range(len(pages), 0, -1) if pages[:end] in self.used), 0)

    def touch(self, pages):
        self.now += 1
        for prefix in prefixes(pages):
            self.used[prefix] = self.near[prefix] = self.now
        for prefix in self.used:
            if prefix[:1] == pages[:1]:
                self.near[prefix] = self.now

    @rule(pages=PROMPTS)
    def match(self, pages):
        node, size = self.cache.match(pages)
        assert size == self.longest(pages)
        assert path_of(node) == pages[:size]
        self.touch(pages[:size])

    @rule(pages=PROMPTS)
    def peek(self, pages):
        shape = [(id(node), node.used, len(node.pages)) for node in nodes_of(self.cache)]
        assert self.cache.peek(pages) == self.longest(pages)
        assert [(id(n), n.used, len(n.pages)) for n in nodes_of(self.cache)] == shape

    @rule(pages=PROMPTS)
    def insert(self, pages):
        node = self.cache.insert(pages)
        assert path_of(node) == pages
        self.touch(pages)
        assert self.cache.peek(pages) == len(pages)

    @rule(pages=PROMPTS)
    def lock(self, pages):
        node, size = self.cache.match(pages)
        self.touch(pages[:size])
        self.cache.lock(node)
        self.locks.append((node, pages[:size]))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data):
        place = data.draw(st.integers(0, len(self.locks) - 1))
        node, pages = self.locks.pop(place)
        assert path_of(node) == pages, "a split must not move what was locked"
        self.cache.unlock(node)

    @rule(pages=st.integers(0, 6))
    def evict(self, pages):
        before, evictable = set(self.used), self.cache.evictable
        freed = self.cache.evict(pages)
        after = cached_prefixes(self.cache)
        gone = before - after
        assert after <= before
        assert freed == len(gone)
        assert freed >= min(pages, evictable)
        leaves = after - {prefix[:-1] for prefix in after} - self.pinned
        if gone and leaves:
            assert max(self.used[x] for x in gone) <= min(self.near[x] for x in leaves)
        for prefix in gone:
            del self.used[prefix], self.near[prefix]

    @property
    def pinned(self):
        return {prefix for _, pages in self.locks for prefix in prefixes(pages)}

    @invariant()
    def counts_are_those_of_the_tree(self):
        cache, nodes = self.cache, nodes_of(self.cache)
        assert cached_prefixes(cache) == set(self.used), "leaf first: prefixes are never torn"
        assert cache.pages == sum(len(node.pages) for node in nodes) == len(self.used)
        assert cache.pinned == sum(len(n.pages) for n in nodes if n.locks) == len(self.pinned)
        assert cache.evictable == cache.pages - cache.pinned
        assert self.pinned <= set(self.used)

    @invariant()
    def the_tree_is_well_formed(self):
        for node in nodes_of(self.cache):
            assert node.pages
            assert node.parent.children[node.pages[0]] is node
            assert node.locks >= max((child.locks for child in node.children.values()), default=0)
            assert node.locks >= 0

    def teardown(self):
        """With every lock undone, all can go."""
        for node, _ in self.locks:
            self.cache.unlock(node)
        assert self.cache.pinned == 0
        assert self.cache.evict(1000) == len(self.used)
        assert (self.cache.pages, nodes_of(self.cache)) == (0, [])


TestAgainstASet = AgainstASet.TestCase
TestAgainstASet.settings = settings(max_examples=60, stateful_step_count=30)


def test_an_empty_cache_has_nothing():
    cache = RadixCache(4)
    assert cache.match((1, 2)) == (cache.root, 0)
    assert cache.match(()) == (cache.root, 0)
    assert cache.insert(()) is cache.root
    assert cache.evict(3) == 0
    assert (cache.pages, cache.pinned, cache.evictable) == (0, 0, 0)


def test_leaves_go_before_what_they_continue_and_the_oldest_first():
    cache = RadixCache(100)
    cache.insert((1, 2))
    cache.insert((1, 2, 3))
    cache.insert((7,))
    cache.insert((1, 2, 4))
    assert cache.evict(1) == 1
    assert [cache.peek(x) for x in ((1, 2, 3), (7,), (1, 2, 4))] == [2, 1, 3]
    assert cache.evict(1) == 1
    assert [cache.peek(x) for x in ((7,), (1, 2, 4))] == [0, 3]
    assert cache.evict(1) == 1
    assert cache.peek((1, 2, 4)) == 2
    assert cache.evict(1) == 2, "a leaf goes whole"


def test_a_match_renews():
    cache = RadixCache(100)
    cache.insert((1,))
    cache.insert((2,))
    cache.match((1,))
    cache.evict(1)
    assert (cache.peek((1,)), cache.peek((2,))) == (1, 0)


def test_a_peek_renews_nothing():
    cache = RadixCache(100)
    cache.insert((1,))
    cache.insert((2,))
    cache.peek((1,))
    cache.evict(1)
    assert (cache.peek((1,)), cache.peek((2,))) == (0, 1)


def test_a_split_below_a_lock_keeps_both_parts_pinned():
    cache = RadixCache(100)
    node = cache.insert((1, 2, 3, 4))
    cache.lock(node)
    cache.insert((1, 2, 9))
    assert cache.pinned == 4
    assert cache.evict(100) == 1
    assert cache.peek((1, 2, 3, 4)) == 4
    cache.unlock(node)
    assert cache.pinned == 0
    assert cache.evict(100) == 4


def test_two_locks_need_two_unlocks():
    cache = RadixCache(100)
    node = cache.insert((1, 2))
    cache.lock(node)
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict(100) == 0
    cache.unlock(node)
    assert cache.evict(100) == 2


def test_clear_forgets_everything():
    cache = RadixCache(100)
    cache.insert((1, 2))
    cache.clear()
    assert (cache.pages, cache.peek((1, 2)), cache.evict(5)) == (0, 0, 0)
    cache.insert((1, 2))
    assert cache.evict(5) == 2


def test_new_pages_are_never_the_same_and_never_a_prompt_s():
    cache = RadixCache(100)
    pages = [*cache.new_pages(3), *cache.new_pages(0), *cache.new_pages(2)]
    assert len(set(pages)) == 5
    assert not any(isinstance(page, int) for page in pages)


def test_long_runs_are_compared_exactly():
    cache = RadixCache(10_000)
    run = tuple(range(1000))
    for other in (1, 2, 3, 499, 500, 997, 999):
        cache.clear()
        cache.insert(run)
        assert cache.peek((*run[:other], -1, *run[other + 1 :])) == other
        assert cache.match((*run[:other], -1))[1] == other
        assert cache.match(run)[1] == 1000


# SGLang's own


class Peer:
    """SGLang's RadixCache over pages of `size` tokens."""

    def __init__(self, monkeypatch, size):
        pytest.importorskip("sglang")
        from sglang.srt.mem_cache import radix_cache as module

        # Equal times would leave the order of eviction to chance.
        clock = count(1)
        ticks = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=lambda: 0.0)
        monkeypatch.setattr(module, "time", ticks)
        allocator = SimpleNamespace(device="cpu", free_segment=lambda value, start_pos: None)
        self.module, self.size = module, size
        self.cache = module.RadixCache.create_simulated(mock_allocator=allocator, page_size=size)

    def key(self, pages):
        ids = (page * self.size + i for page in pages for i in range(self.size))
        return self.module.RadixKey(token_ids=array("q", ids))

    def insert(self, pages):
        return self.cache.insert(self.module.InsertParams(key=self.key(pages))).last_device_node

    def match(self, pages):
        if not pages:
            return self.cache.root_node, 0
        found = self.cache.match_prefix(self.module.MatchPrefixParams(key=self.key(pages)))
        return found.last_device_node, found.device_prefix_len // self.size

    def evict(self, pages):
        tokens = self.module.EvictParams(num_tokens=pages * self.size)
        return self.cache.evict(tokens).num_tokens_evicted // self.size

    def prefixes(self):
        found, left = set(), [(self.cache.root_node, ())]
        while left:
            node, path = left.pop()
            run = [token // self.size for token in node.key.token_ids[:: self.size]]
            found |= {(*path, *run[:end]) for end in range(1, len(run) + 1)}
            left += [(child, (*path, *run)) for child in node.children.values()]
        return found

    def counts(self):
        cache = self.cache
        return cache.evictable_size() // self.size, cache.protected_size() // self.size


@pytest.fixture
def peer(monkeypatch):
    return lambda size=1: Peer(monkeypatch, size)


def draw(rng):
    return tuple(rng.randrange(1, 4) for _ in range(rng.randrange(8)))


@pytest.mark.sglang
@pytest.mark.parametrize("size", [1, 4])
def test_sglang_finds_the_same_prefixes(peer, size):
    for seed in range(20):
        rng, ours, theirs = Random(seed), RadixCache(1000), peer(size)
        for _ in range(60):
            pages = draw(rng)
            if rng.random() < 0.5:
                ours.insert(pages)
                theirs.insert(pages)
            else:
                assert ours.match(pages)[1] == theirs.match(pages)[1]
        assert cached_prefixes(ours) == theirs.prefixes()


@pytest.mark.sglang
def test_sglang_counts_and_pins_the_same(peer):
    for seed in range(20):
        rng, ours, theirs, locked = Random(seed), RadixCache(1000), peer(), []
        for _ in range(80):
            pages, what = draw(rng), rng.random()
            if what < 0.4:
                ours.insert(pages)
                theirs.insert(pages)
            elif what < 0.7:
                (mine, size), (its, same) = ours.match(pages), theirs.match(pages)
                assert size == same
                ours.lock(mine)
                theirs.cache.inc_lock_ref(its)
                locked.append((mine, its))
            elif locked:
                mine, its = locked.pop(rng.randrange(len(locked)))
                ours.unlock(mine)
                theirs.cache.dec_lock_ref(its)
            assert (ours.evictable, ours.pinned) == theirs.counts()


def same_after_evictions(rng, ours, theirs, prompts):
    locked = []
    for step in range(80):
        pages, what = rng.choice(prompts), rng.random()
        if what < 0.4:
            ours.insert(pages)
            theirs.insert(pages)
        elif what < 0.6:
            assert ours.match(pages)[1] == theirs.match(pages)[1]
        elif what < 0.75:
            mine, its = ours.match(pages)[0], theirs.match(pages)[0]
            ours.lock(mine)
            theirs.cache.inc_lock_ref(its)
            locked.append((mine, its))
        elif what < 0.85 and locked:
            mine, its = locked.pop(rng.randrange(len(locked)))
            ours.unlock(mine)
            theirs.cache.dec_lock_ref(its)
        else:
            wanted = rng.randrange(1, 5)
            assert ours.evict(wanted) == theirs.evict(wanted), step
        assert cached_prefixes(ours) == theirs.prefixes(), step


@pytest.mark.sglang
def test_sglang_evicts_the_same_where_no_node_is_split(peer):
    # Whole branches of trunks that are always pinned: every prompt ends where a node ends.
    trunks = [(trunk, trunk + 1) for trunk in range(1, 4)]
    prompts = trunks + [(*trunk, i, i) for trunk in trunks for i in range(10, 13)]
    for seed in range(30):
        rng, ours, theirs = Random(seed), RadixCache(1000), peer()
        for prompt in trunks:
            ours.lock(ours.insert(prompt))
            theirs.cache.inc_lock_ref(theirs.insert(prompt))
        same_after_evictions(rng, ours, theirs, prompts)


@pytest.mark.sglang
def test_sglang_evicts_the_same(peer):
    for seed in range(30):
        rng = Random(seed)
        prompts = [draw(rng) for _ in range(12)]
        same_after_evictions(rng, RadixCache(1000), peer(), prompts)


@pytest.mark.sglang
def test_the_rest_of_a_split_node_is_as_new_as_in_sglang(peer):
    """SGLang stamps the child before it splits it (RadixCache and UnifiedTreeCore alike)."""
    ours, theirs = RadixCache(100), peer()
    for cache in (ours, theirs):
        cache.insert((1, 2, 3))
        cache.insert((8, 9))
        cache.match((1, 2))
        cache.evict(1)
    assert theirs.prefixes() == {(1,), (1, 2), (1, 2, 3)}
    assert cached_prefixes(ours) == theirs.prefixes()
