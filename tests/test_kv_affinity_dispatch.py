"""kv_affinity through the dispatcher: prompts without keys, emptied caches, odd servers."""

from collections import Counter

import pytest

from sidecar.hashing import block_hashes, namespace_hash
from sidecar.wire import RequestFacts
from tests.kv.server import WANT, Server, prompt
from tests.support import STALE_SECONDS, make_dispatcher
from tests.test_kv_affinity import bound, fail, make_server, one


def bare_server(ranks: object = range(8)) -> Server:
    """A server that never reported."""
    server = Server(make_dispatcher("kv_affinity"), list(ranks))
    server.dispatcher.on_policy_error = fail
    return server


@pytest.mark.parametrize("reports", [True, False])
def test_a_growing_prompt_keeps_its_rank(reports: bool) -> None:
    server, homes = bare_server(), {}
    for tokens in (200, 300, 1500, 1501, 6000, 40_000, 41_000):
        for name in map(str, range(16)):
            server.now += 0.5
            rank, reason = one(server, prompt(name, tokens))
            assert reason == ("prefix_hit" if name in homes else "placed")
            assert homes.setdefault(name, rank) == rank
            if reports:
                server.finish()
    assert max(Counter(homes.values()).values()) <= 4


# One at a time and with tails of 100 tokens, a copy of the system prompt elsewhere would cost more
# than it saves; nobody waits.
LOADS = [*((64, 60, own) for own in (100, 952, 8000)), *((8, 200, own) for own in (100, 952, 8000))]


@pytest.mark.parametrize(("concurrent", "most", "own"), [*LOADS, (0, 200, 952), (0, 200, 8000)])
def test_a_system_prompt_of_everybody_does_not_collect_them(
    concurrent: int, most: int, own: int
) -> None:
    server, ranks = make_server(), []
    for n in range(400):
        facts = prompt(f"{n}", 2048 + own, shared="system", shared_tokens=2048)
        ranks.append(one(server, facts)[0])
        server.now += 0.02
        running = Counter(ranks[-concurrent:] if concurrent else [])
        for rank, scheduler in server.schedulers.items():
            scheduler.take_in()
            server.say(rank, running=running[rank])
    assert max(Counter(ranks).values()) <= most


def test_namespaces_never_match() -> None:
    tokens, servers = list(range(5000)), [make_server(), make_server()]
    blocks = [
        block_hashes(tokens, WANT.block_tokens, WANT.max_blocks, number, WANT.block_growth)
        for number in (0, namespace_hash("a", None, None), namespace_hash(None, "a", None))
    ]
    for some in blocks:
        assert one(servers[0], RequestFacts(b"", 0, 5000, None, some))[1] == "placed"
    for some in blocks:
        assert one(servers[0], RequestFacts(b"", 0, 5000, None, some))[1] == "prefix_hit"


@pytest.mark.parametrize("how", ["flush", "restart"])
def test_an_emptied_cache_loses_its_keys_and_prefixes_at_once(how: str) -> None:
    server = make_server(range(3))
    server.put(*(bound(f"k{rank}", rank, 20_000) for rank in range(3)))
    server.now += 1.0
    server.finish()
    for rank in range(3):
        assert one(server, prompt(f"of k{rank}", 20_000)) == (rank, "prefix_hit")
    server.now += 1.0
    server.finish()
    if how == "flush":
        server.schedulers[1].add(flushes=1)
    else:
        server.restart(1)
    server.report(1)
    server.now += 0.01
    held = server.view.memory.held(prompt("of k1", 20_000))
    assert held == {}
    assert one(server, prompt("of k1", 20_000))[1] == "placed"
    assert one(server, prompt("of k0", 20_000)) == (0, "prefix_hit")
    assert one(server, prompt("p", 10, "k0"))[1] == "affinity_hit"
    rank, reason = one(server, prompt("p", 10, "k1"))
    assert reason == "placed"
    # Where it was placed, it is at home, whichever rank that was.
    for _ in range(3):
        server.now += 0.5
        assert one(server, prompt("p", 10, "k1")) == (rank, "affinity_hit")


def test_a_key_that_came_after_the_flush_is_at_home() -> None:
    server = make_server(range(3))
    server.schedulers[1].add(flushes=1)
    server.now += 5.0
    server.report(1)
    server.now += 1.0
    assert one(server, bound("k", 1, age_ms=900)) == (1, "affinity_hit")
    assert one(server, bound("j", 1, age_ms=1100))[1] == "placed"
    assert one(server, bound("i", 1, age_ms=-1)) == (1, "affinity_hit")  # nobody knows when


def test_a_key_that_came_after_the_restart_is_at_home() -> None:
    """The new process was there before its first report was: such a key may be in its cache."""
    server = make_server(range(3))
    server.now += 5.0
    server.report(1)
    server.now += 4.0
    server.restart(1)
    server.report(1)
    server.now += 1.0
    assert one(server, bound("k", 1, age_ms=4900)) == (1, "affinity_hit")
    assert one(server, bound("j", 1, age_ms=5100))[1] == "placed"


@pytest.mark.parametrize("ranks", [range(1), range(2), [0, 5, 9], range(320)])
def test_without_any_report(ranks: object) -> None:
    server, counts = bare_server(ranks), Counter()
    for n in range(3 * len(server.ranks)):
        server.now += 1.0
        counts[one(server, prompt(f"{n}", 100, f"k{n}"))[0]] += 1
    assert counts == dict.fromkeys(server.ranks, 3)
    for n in range(len(server.ranks)):
        assert one(server, prompt(f"{n}", 100, f"k{n}"))[1] == "affinity_hit"


@pytest.mark.parametrize("ranks", [[0, 5, 9], range(320)])
def test_with_reports(ranks: object) -> None:
    server, counts = make_server(ranks), Counter()
    for n in range(3 * len(server.ranks)):
        server.now += 0.001
        rank, _ = one(server, prompt(f"{n}", 3000, f"k{n}"))
        counts[rank] += 1
        server.schedulers[rank].take_in()
        server.say(rank)
    assert counts == dict.fromkeys(server.ranks, 3)


def test_stale_reports_of_one_rank() -> None:
    server = make_server(range(4))
    server.put(bound("k", 2, 200))
    server.finish()
    for _ in range(5):
        server.now += STALE_SECONDS / 4
        for rank in (0, 1, 3):
            server.report(rank)
    for facts in (bound("k", 2), prompt("of k", 200)):
        rank, reason = one(server, facts)
        assert (rank != 2, reason) == (True, "stale_skip")
    new = Counter(one(server, prompt(f"{n}", 10, f"n{n}"))[0] for n in range(60))
    assert set(new) == {0, 1, 3}
    server.report(2)
    assert one(server, bound("k", 2)) == (2, "affinity_hit")


def test_stale_reports_of_all_ranks() -> None:
    server = make_server(range(4))
    server.now += 10 * STALE_SECONDS
    assert one(server, bound("k", 2)) == (2, "affinity_hit")
    new = Counter(one(server, prompt(f"{n}", 10, f"n{n}"))[0] for n in range(60))
    assert set(new) == {0, 1, 2, 3}


def test_one_rank() -> None:
    server = make_server([7])
    for facts in (bound("k", 7), bound("j", 3), prompt("p", 500), prompt("p", 900), prompt("", 0)):
        assert one(server, facts)[0] == 7


@pytest.mark.parametrize("last", [1, 6, 99, 65_535])
def test_a_last_rank_that_is_not_live(last: int) -> None:
    server = make_server([0, 5, 9])
    assert one(server, bound("k", last))[1] == "placed"
    assert one(server, bound("j", -1))[1] == "placed"


def test_requests_without_blocks() -> None:
    """An older hook knows no blocks, or they are not wanted yet."""
    server, counts = make_server(), Counter()
    for n in range(80):
        facts = RequestFacts(b"" if n % 2 else f"k{n}".encode(), 0, 5000)
        rank, reason = one(server, facts)
        counts[rank] += 1
        assert reason == "placed"
    assert max(counts.values()) <= 11
    assert one(server, RequestFacts(b"k", 0, 5000, None, [], 3, 10)) == (3, "affinity_hit")


def test_more_blocks_than_wanted() -> None:
    server = make_server()
    for tokens in (5000, 5001):
        facts = prompt("p", tokens)
        facts.block_hashes = list(range(1, 2 * WANT.max_blocks))
        rank, _ = one(server, facts)
    assert one(server, facts) == (rank, "prefix_hit")
    assert one(server, prompt("p", 100))[1] == "placed"


@pytest.mark.parametrize(
    ("key", "tokens"),
    [
        ("", 3000),
        *(("k", tokens) for tokens in (0, 40, 3000, 40_000)),
    ],
)
def test_samples_of_one_prompt_stay_together(key: str, tokens: int) -> None:
    server = make_server()
    ranks = server.put(*(prompt("p", tokens, key) for _ in range(4)))
    assert len({*ranks}) == 1
