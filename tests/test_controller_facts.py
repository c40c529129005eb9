"""What the controller side of the hook remembers, counts, hashes and tells."""

from collections import Counter

import pytest

from sglang_hook.controller import LastRanks, SentCounters
from sidecar import hashing
from sidecar.wire import Query, Reply, Want
from tests.support import STALE_SECONDS
from tests.test_controller import RANKS, Hook, one


def told(query: Query) -> tuple[object, object, object]:
    return query.bypassed, query.abstained, query.about


NOTHING = (None, None, None)


def test_sent_travels_for_the_live_ranks() -> None:
    hook = Hook(0, live=[1, 4, 9])
    for rank, tokens in ((1, 10), (9, 5), (9, 6), (3, 100)):
        hook.chooser.sent.count(rank, tokens)
    hook.choose("a")
    assert (hook.queries[0].sent, hook.queries[0].sent_tokens) == ([1, 0, 2], [10, 0, 11])


@pytest.mark.parametrize("live", [[0], [0, 1, 2], [2], [0, 2], [0, 1, 2, 3], [1, 3, 40]])
def test_sent_counters_of_any_ranks(live: list[int]) -> None:
    sent, truth = SentCounters(), Counter()
    for rank in (2, 0, 2, 40, 2):
        assert sent.of(live) == ([truth[r] for r in live], [7 * truth[r] for r in live])
        sent.count(rank, 7)
        truth[rank] += 1
    assert sent.of(live) == ([truth[r] for r in live], [7 * truth[r] for r in live])
    assert sent.of([]) == ([], [])


def test_last_rank_and_age_travel() -> None:
    hook = Hook([6], [1])
    hook.choose("a")
    hook.now += 1.5
    hook.choose("a")
    hook.now += STALE_SECONDS
    hook.answers = [[0, 0]]
    hook.choose("a", "b")
    known = [[(f.last_rank, f.last_age_ms) for f in query.requests] for query in hook.queries]
    assert known == [[(-1, -1)], [(6, 1500)], [(1, 5000), (-1, -1)]]


def test_an_explicit_rank_is_remembered() -> None:
    hook = Hook("deadline")
    hook.chooser.remember(one("a"), 7)
    hook.chooser.remember(one(None), 3)
    assert hook.choose("a") == [7]
    assert len(hook.chooser.last_ranks) == 1
    assert not hook.chooser.bypassed - Counter(deadline=1)


def test_last_ranks_are_bounded_and_forget_the_oldest() -> None:
    table = LastRanks(3)
    for key in (1, 2, 3, 1, 4, 5):
        table.put(key, key * 10, 0.0)
        assert len(table) <= 3
    assert [table.get(key) for key in range(1, 6)] == [
        *((10, 0.0), None, None),
        *((40, 0.0), (50, 0.0)),
    ]
    hook = Hook(0, keys=10)
    for i in range(1000):
        hook.choose(f"key-{i}")
    assert len(hook.chooser.last_ranks) == 10


def test_counts_travel_only_when_they_changed() -> None:
    hook = Hook(0)
    for _ in range(3):
        hook.choose("a")
    assert [told(q) for q in hook.queries] == [({}, {}, {"hook": "1"}), NOTHING, NOTHING]
    hook.chooser.bypass("hook_error")
    hook.chooser.abstain("pinned")
    hook.answers = ["deadline", 0]
    for _ in range(4):
        hook.choose("a")
    assert [told(q) for q in hook.queries[3:]] == [
        ({"hook_error": 1}, {"pinned": 1}, None),
        ({"hook_error": 1, "deadline": 1}, {"pinned": 1}, None),  # the first got no answer
        NOTHING,
        NOTHING,
    ]


def test_a_new_sidecar_is_told_everything() -> None:
    hook = Hook(0)
    hook.chooser.bypass("deadline", 2)
    hook.choose("a")
    hook.choose("a")
    hook.boot = 2
    hook.choose("a")  # answered by a sidecar that knows nothing
    hook.choose("a")
    hook.choose("a")
    whole = ({"deadline": 2}, {}, {"hook": "1"})
    assert [told(q) for q in hook.queries] == [whole, NOTHING, NOTHING, whole, NOTHING]


def test_a_probe_tells_everything_and_asks_nothing() -> None:
    hook = Hook(0)
    hook.choose("a")
    hook.chooser.bypass("deadline")
    probe = hook.probe()
    assert (probe.requests, probe.ranks) == ([], RANKS)
    assert told(probe) == ({"deadline": 1}, {}, {"hook": "1"})
    hook.boot = 2
    hook.chooser.heard(Reply(1, probe.seq, 2, "test", 1, [], [], Want()))
    hook.choose("a")
    assert told(hook.queries[-1]) == NOTHING
    assert hook.queries[-1].seq == probe.seq + 1


@pytest.mark.parametrize(
    ("want", "keyed", "keyless"),
    [
        (Want(), (0, None, 0), (0, None, 0)),
        (Want(prefix_tokens=4), (0, None, 0), (1, 4, 0)),
        (Want(prefix_tokens=4, prefix_with_key=True), (1, 4, 0), (1, 4, 0)),
        (Want(block_tokens=2, max_blocks=3), (1, None, 3), (1, None, 3)),
        (Want(4, False, 2, 9), (1, None, 5), (1, 4, 5)),
        (Want(block_tokens=2, max_blocks=9, block_growth=1), (1, None, 3), (1, None, 3)),
    ],
)
def test_only_what_is_wanted_is_hashed(want: Want, keyed: tuple, keyless: tuple) -> None:
    hook, tokens = Hook(0), list(range(10))
    hook.want = want
    hook.choose("first, to learn what is wanted")
    space = ("extra", None, "lora")
    hook.choose("a", None, tokens=tokens, namespace=space)
    number = hashing.namespace_hash(*space)
    for facts, (spaced, prefix, blocks) in zip(
        hook.queries[-1].requests, (keyed, keyless), strict=True
    ):
        assert facts.namespace == (number if spaced else 0)
        assert facts.prefix_hash == (
            hashing.prefix_hash(tokens, prefix, number) if prefix else None
        )
        assert facts.block_hashes == hashing.block_hashes(
            tokens, 2, blocks, number, want.block_growth
        )
    hook.want = Want()
    hook.choose("a")
    hook.choose(None, tokens=tokens)
    assert hook.queries[-1].requests[0].prefix_hash is None


def test_case_23_the_same_prompt_in_two_namespaces() -> None:
    hook = Hook(0)
    hook.want = Want(prefix_tokens=4096)
    hook.choose("first")
    spaces = [(None,) * 3, ("a", None, None), (None, "a", None), (None, None, "a")]
    hook.chooser.choose([one(None, [1, 2, 3], namespace=space) for space in spaces])
    assert len({facts.prefix_hash for facts in hook.queries[-1].requests}) == 4
