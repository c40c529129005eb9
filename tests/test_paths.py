"""Where sessions went lately."""

from collections import deque
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sidecar import wire
from sidecar.keyhash import KeyHash
from sidecar.paths import MAX_SESSIONS, MAX_STEPS, Paths
from sidecar.wire import Reply, RequestFacts
from tests.support import keyed, keyless, make_dispatcher, query

SECRET = KeyHash(bytes(32))


def follow(paths: Paths, requests: list[RequestFacts], ranks: list[int], **more: Any) -> None:
    now, instance = more.get("now", 0.0), more.get("instance", "a")
    reasons = more.get("reasons", ["placed"] * len(ranks))
    asked = query(requests, instance=instance)
    reply = Reply(wire.VERSION, 1, 1, "kv_affinity", 1, ranks, reasons, wire.Want())
    deque(paths.follow(asked, reply, now), maxlen=0)


def test_a_path_over_ranks() -> None:
    paths = Paths(SECRET)
    for now, rank, reason in (
        (1.0, 3, "placed"),
        (2.0, 3, "affinity_hit"),
        (3.0, 5, "spill"),
        (4.0, 3, "spill"),
    ):
        follow(paths, [keyed("k")], [rank], reasons=[reason], now=now)
    (path,) = paths.of(b"k", 10.0)
    assert path == {
        "instance": "a",
        "key_hash": SECRET.of(b"k"),
        "steps": [
            {"rank": 3, "reason": "placed", "requests": 2, "age_seconds": 8.0},
            {"rank": 5, "reason": "spill", "requests": 1, "age_seconds": 7.0},
            {"rank": 3, "reason": "spill", "requests": 1, "age_seconds": 6.0},
        ],
    }
    assert paths.newest(10, 10.0) == [path]


def test_keys_are_not_told() -> None:
    paths = Paths(KeyHash())
    follow(paths, [keyed("SECRET-key")], [1])
    told = msgspec.json.encode(paths.newest(10, 0.0))
    assert b"SECRET" not in told
    other = Paths(KeyHash())
    follow(other, [keyed("SECRET-key")], [1])
    assert other.newest(1, 0.0)[0]["key_hash"] != paths.newest(1, 0.0)[0]["key_hash"]


def test_only_sessions_with_a_key() -> None:
    paths = Paths(SECRET)
    follow(paths, [keyless(), keyed(b"  "), keyed("k")], [1, 2, 3])
    assert [path["key_hash"] for path in paths.newest(9, 0.0)] == [SECRET.of(b"k")]
    for nothing in (b"", b"   ", b"other"):
        assert paths.of(nothing, 0.0) == []


def test_the_newest_first_and_instances_apart() -> None:
    paths = Paths(SECRET)
    for now, key, instance in ((1.0, "a", "x"), (2.0, "b", "x"), (3.0, "a", "y"), (4.0, "b", "x")):
        follow(paths, [keyed(key)], [1], now=now, instance=instance)
    newest = [(path["instance"], path["key_hash"]) for path in paths.newest(9, 5.0)]
    assert newest == [("x", SECRET.of(b"b")), ("y", SECRET.of(b"a")), ("x", SECRET.of(b"a"))]
    assert len(paths.newest(2, 5.0)) == 2
    assert paths.newest(0, 5.0) == []
    assert [path["instance"] for path in paths.of(b"a", 5.0)] == ["x", "y"]


def test_a_long_key_is_found_by_itself() -> None:
    paths, long = Paths(SECRET), b"k" * 5000
    decided = make_dispatcher().handle(query([keyed(b"k")]), 0.0)
    assert decided.ranks
    follow(paths, [keyed(long)], [2])
    assert len(paths.of(long, 0.0)) == 1


def test_sessions_and_steps_are_bounded() -> None:
    paths = Paths(SECRET)
    for start in range(0, 3 * MAX_SESSIONS, 512):
        follow(paths, [keyed(f"k{start + i}") for i in range(512)], [1] * 512)
    assert len(paths.newest(10**6, 0.0)) == MAX_SESSIONS
    assert paths.of(b"k0", 0.0) == []
    for i in range(1000):
        follow(paths, [keyed("mover")], [i % 8], now=float(i))
    (path,) = paths.of(b"mover", 1000.0)
    assert len(path["steps"]) == MAX_STEPS
    assert path["steps"][-1] == {
        **{"rank": 7, "reason": "placed"},
        **{"requests": 1, "age_seconds": 1.0},
    }


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_requests_are_counted_and_in_order(asked: list[tuple[int, int]]) -> None:
    paths = Paths(SECRET)
    follow(paths, [keyed(f"k{key}") for key, _ in asked], [rank for _, rank in asked])
    for key in range(6):
        went = [rank for k, rank in asked if k == key]
        steps = [step for path in paths.of(b"k%d" % key, 0.0) for step in path["steps"]]
        assert [step["rank"] for step in steps for _ in range(step["requests"])] == went
        assert all(a["rank"] != b["rank"] for a, b in pairwise(steps))


def test_it_gives_way_within_a_batch() -> None:
    paths = Paths(SECRET)
    asked = query([keyed(f"{i}") for i in range(320)])
    reply = make_dispatcher().handle(asked, 0.0)
    assert len(list(paths.follow(asked, reply, 0.0))) == 10
