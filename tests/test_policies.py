"""Each policy on a load view: the guard at its threshold, the order of spills, ties, parameters."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import ConfigError
from sidecar.hashing import key_hash, rank_bytes
from sidecar.loads import LoadView
from sidecar.policies import REGISTRY, make_policy
from sidecar.wire import Want
from tests.support import key_preferring, keyed, keyless, order_of

REASONS = {
    "prefix_affinity": {
        *("affinity_hit", "spill", "stale_skip", "fallback"),
        *("token_affinity_hit", "token_spill", "token_stale_skip"),
    },
    "kv_affinity": {
        *("placed", "affinity_hit", "spill", "stale_skip"),
        *("prefix_hit", "replica_hit", "prefix_spill"),
    },
    "round_robin": {"round_robin"},
    "total_requests": {"least_requests"},
    "total_tokens": {"least_tokens"},
}
LOAD_AWARE = ["total_requests", "total_tokens"]


def make_view(requests, tokens=None, usable=None, counted=None, ranks=None) -> LoadView:
    size = len(requests)
    ranks = list(range(size)) if ranks is None else ranks
    counted = [True] * size if counted is None else counted
    return LoadView(
        ranks=ranks,
        rank_bytes=rank_bytes(ranks),
        requests=list(requests),
        tokens=list(requests if tokens is None else tokens),
        usable=list(counted if usable is None else usable),
        counted=counted,
        total=sum(n for n, c in zip(requests, counted, strict=True) if c),
        known=sum(counted),
    )


def placed(policy, view: LoadView, facts) -> tuple[int, str]:
    choice = policy.choose(facts, view)
    return view.ranks[choice.position], choice.reason


def test_registry() -> None:
    assert set(REGISTRY) == set(REASONS)
    assert all(policy.name == name for name, policy in REGISTRY.items())


@pytest.mark.parametrize(
    ("loads", "admitted"),
    [
        ([3, 2, 2, 2, 2, 2, 2, 1], True),  # average 2: up to 3
        ([4, 2, 2, 2, 2, 2, 2, 0], False),
        ([1, 0, 0, 0, 0, 0, 0, 0], True),  # average 1/8 counts as 1: up to 1.5
        ([2, 0, 0, 0, 0, 0, 0, 0], False),
        ([6, 4, 4, 4, 4, 4, 4, 2], True),  # exactly 1.5 times the average is not overload
        ([7, 4, 4, 4, 4, 4, 4, 1], False),
        ([0] * 8, True),
    ],
)
@pytest.mark.parametrize("by_token", [False, True])
def test_the_rule_of_the_pr(loads: list[int], admitted: bool, by_token: bool) -> None:
    policy = make_policy("prefix_affinity", {"min_load_gap": 0.0})
    facts = keyed(key_preferring(0, range(8)))
    order = order_of(key_hash(facts.routing_key), range(8))
    if by_token:
        facts = keyless(prefix=key_hash(facts.routing_key))
    rank, reason = placed(policy, make_view(loads), facts)
    token = "token_" if by_token else ""
    if admitted:
        assert (rank, reason) == (0, f"{token}affinity_hit")
    else:
        limit = 1.5 * max(sum(loads) / 8, 1)
        assert rank == next(r for r in order if loads[r] <= limit) != 0
        assert reason == f"{token}spill"


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=16),
    st.floats(1.0, 4.0),
    st.floats(0.0, 50.0),
    st.integers(0, 50),
)
def test_threshold_and_order_of_spills(loads: list[int], skew: float, gap: float, key: int) -> None:
    policy = make_policy("prefix_affinity", {"max_load_skew": skew, "min_load_gap": gap})
    view, facts = make_view(loads), keyed(f"key-{key}")
    average = sum(loads) / len(loads)
    limit = max(skew * max(average, 1), average + gap)
    assert policy.threshold(view) == limit
    order = order_of(key_hash(facts.routing_key), range(len(loads)))
    choice = policy.choose(facts, view)
    assert choice.position == next(rank for rank in order if loads[rank] <= limit)
    assert choice.preferred == order[0]
    assert (choice.reason == "affinity_hit") is (choice.position == order[0])


def test_case_3_an_absolute_margin_keeps_the_session() -> None:
    loads = [4, 3, 3, 3, 3, 3, 3, 6]
    facts = keyed(key_preferring(7, range(8)))
    with_gap = make_policy("prefix_affinity", {"min_load_gap": 4.0})
    assert placed(with_gap, make_view(loads), facts) == (7, "affinity_hit")
    assert placed(make_policy("prefix_affinity"), make_view(loads), facts) == (7, "affinity_hit")
    without = make_policy("prefix_affinity", {"min_load_gap": 0.0})
    assert placed(without, make_view(loads), facts)[1] == "spill"


def test_case_8_resident_tokens_are_no_overload() -> None:
    view = make_view([0, 2, 2, 2], tokens=[800_000, 10, 10, 10])
    facts = keyed(key_preferring(0, range(4)))
    assert placed(make_policy("prefix_affinity"), view, facts) == (0, "affinity_hit")


def test_spill_walks_on_past_overloaded_and_stale_candidates() -> None:
    facts, ranks = keyed("session-1"), [3, 5, 9, 12, 40]
    first, second, third, fourth, fifth = order_of(key_hash(b"session-1"), ranks)
    loads = {first: 90, second: 80, third: 0, fourth: 3, fifth: 2}
    usable = [rank != third for rank in ranks]
    view = make_view([loads[r] for r in ranks], counted=usable, usable=usable, ranks=ranks)
    policy = make_policy("prefix_affinity", {"min_load_gap": 0.0})
    assert placed(policy, view, facts) == (fourth, "spill")


@pytest.mark.parametrize("by_token", [False, True])
def test_a_stale_preferred_rank_is_skipped_and_named(by_token: bool) -> None:
    facts = keyed("session-1")
    first, second, *_ = order_of(key_hash(b"session-1"), range(4))
    if by_token:
        facts = keyless(prefix=key_hash(b"session-1"))
    usable = [rank != first for rank in range(4)]
    expected = (second, "token_stale_skip" if by_token else "stale_skip")
    view = make_view([0] * 4, counted=usable)
    assert placed(make_policy("prefix_affinity"), view, facts) == expected


def test_no_known_load_switches_the_guard_off() -> None:
    facts = keyed(key_preferring(2, range(4)))
    view = make_view([0, 0, 900, 0], counted=[False] * 4, usable=[True] * 4)
    assert placed(make_policy("prefix_affinity"), view, facts) == (2, "affinity_hit")


def test_routing_key_goes_before_prefix() -> None:
    facts = keyed(key_preferring(2, range(4)))
    facts.prefix_hash = key_hash(key_preferring(1, range(4)))
    assert placed(make_policy("prefix_affinity"), make_view([0] * 4), facts)[0] == 2


@pytest.mark.parametrize("key", [b"", b"   ", b"\t", "\u2003".encode(), "\x85 ".encode()])
def test_case_17_blank_is_no_key(key: bytes) -> None:
    policy = make_policy("prefix_affinity")
    assert placed(policy, make_view([1, 0, 1]), keyed(key)) == (1, "fallback")


@pytest.mark.parametrize("on", [False, True])
def test_token_fallback(on: bool) -> None:
    policy = make_policy("prefix_affinity", {"token_fallback": on})
    prefix = key_hash(key_preferring(2, range(4)))
    expected = (2, "token_affinity_hit") if on else (0, "fallback")
    assert placed(policy, make_view([0] * 4), keyless(prefix=prefix)) == expected


@pytest.mark.parametrize("fallback", ["round_robin", "total_requests", "total_tokens"])
def test_fallback_method(fallback: str) -> None:
    policy = make_policy("prefix_affinity", {"fallback": fallback})
    view = make_view([5, 3, 0, 9], tokens=[7, 7, 9, 1])
    expected = {"round_robin": 0, "total_requests": 2, "total_tokens": 3}[fallback]
    assert placed(policy, view, keyless()) == (expected, "fallback")


def test_total_tokens_breaks_ties_by_requests() -> None:
    view = make_view([4, 2, 2, 1], tokens=[10, 10, 10, 11])
    policy = make_policy("total_tokens")
    assert [placed(policy, view, keyless())[0] for _ in range(4)] == [1, 2, 1, 2]


@pytest.mark.parametrize("name", ["round_robin", *LOAD_AWARE])
def test_unusable_ranks_are_avoided(name: str) -> None:
    view = make_view([0, 5, 5, 5], usable=[False, True, False, True])
    policy = make_policy(name)
    assert [placed(policy, view, keyless())[0] for _ in range(4)] == [1, 3, 1, 3]


@pytest.mark.parametrize("name", ["round_robin", *LOAD_AWARE, "prefix_affinity"])
@pytest.mark.parametrize("size", [1, 2, 8, 320])
def test_ties_take_turns(name: str, size: int) -> None:
    policy, view = make_policy(name), make_view([3] * size)
    counts = Counter(placed(policy, view, keyless())[0] for _ in range(size * 10))
    assert counts == dict.fromkeys(range(size), 10)


@pytest.mark.parametrize("name", ["round_robin", *LOAD_AWARE])
def test_turns_go_on_when_ranks_leave_and_return(name: str) -> None:
    policy, view, turns = make_policy(name), make_view([0] * 5), []
    for live in ([0, 1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4], [1, 4], [0, 2]):
        now = make_view([0] * len(live), ranks=live)
        now.cursor = view.cursor
        turns.append(placed(policy, now, keyless())[0])
        view = now
    assert turns == [0, 1, 3, 4, 1, 2]


def test_want() -> None:
    for name in ("round_robin", *LOAD_AWARE):
        assert make_policy(name).want == Want()
    assert make_policy("prefix_affinity").want == Want(prefix_tokens=4096)
    assert make_policy("prefix_affinity", {"hash_tokens": 7}).want == Want(prefix_tokens=7)
    assert make_policy("prefix_affinity", {"token_fallback": False}).want == Want()


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("nonsense", {}, ["nonsense", *REASONS]),
        ("round_robin", {"x": 1}, ["round_robin", "x"]),
        ("prefix_affinity", {"max_load_skew": 0.99}, ["max_load_skew", "1.0"]),
        ("prefix_affinity", {"max_load_skew": float("nan")}, ["max_load_skew"]),
        ("prefix_affinity", {"max_load_skew": float("inf")}, ["max_load_skew"]),
        ("prefix_affinity", {"min_load_gap": -1}, ["min_load_gap", "0.0"]),
        ("prefix_affinity", {"hash_tokens": 0}, ["hash_tokens", "1"]),
        ("prefix_affinity", {"hash_tokens": 2**20 + 1}, ["hash_tokens", "1048576"]),
        ("prefix_affinity", {"token_fallback": "yes"}, ["token_fallback", "bool"]),
        ("prefix_affinity", {"fallback": "random"}, ["fallback", "random"]),
        ("prefix_affinity", {"load_skew": 2}, ["load_skew"]),
    ],
)
def test_bad_parameters_are_named(name: str, params: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_policy(name, params)
    assert not [word for word in words if word not in str(caught.value)]
