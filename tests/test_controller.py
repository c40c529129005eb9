"""The controller side of the hook against a scripted sidecar: whose rank it takes, and when."""

from array import array

import pytest

from sglang_hook.controller import Chooser, Dispatch
from sidecar import wire
from sidecar.hashing import key_hash, preferred
from sidecar.wire import Query, Reply, Want
from tests.support import key_preferring, make_dispatcher, order_of

RANKS = list(range(8))


class Hook:
    """A Chooser, its clock and its sidecar: each query is answered by `answers`, last one again."""

    def __init__(self, *answers: object, live: list[int] | None = None, keys: int = 100) -> None:
        self.answers = list(answers) or [[0]]
        self.live = RANKS if live is None else live
        self.now = 100.0
        self.queries: list[Query] = []
        self.boot, self.version, self.want = 1, 1, Want()
        self.chooser = Chooser(
            instance="i",
            epoch=5,
            about={"hook": "1"},
            live_ranks=lambda: self.live,
            last_rank_keys=keys,
            clock=lambda: self.now,
        )
        self.chooser.ask = self.ask

    def ask(self, payload: bytes, seq: int) -> Reply | str:
        query = wire.decode_query(payload)
        assert query.seq == seq
        self.queries.append(query)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            return answer
        ranks = answer if isinstance(answer, list) else [answer] * len(query.requests)
        reply = Reply(1, seq, self.boot, "test", self.version, ranks, [], self.want)
        self.chooser.heard(reply)
        return reply

    def choose(self, *keys: str | None, **fields: object) -> list[int | None]:
        return self.chooser.choose([one(key, **fields) for key in keys])

    def probe(self) -> Query:
        return wire.decode_query(self.chooser.probe())


def one(key: str | None = None, tokens: object = (), **fields: object) -> Dispatch:
    space = fields.pop("namespace", (None, None, None))
    return Dispatch(key, tokens, space, **fields)


def home(key: str, live: list[int] | None = None) -> int:
    return preferred(key_hash(key.encode()), live or RANKS)


def test_a_batch_is_one_query() -> None:
    hook = Hook([3, 1, 2])
    batch = [one("a", [1, 2]), one(None, array("q", [1])), one("b", None)]
    assert hook.chooser.choose(batch) == [3, 1, 2]
    (query,) = hook.queries
    assert (query.instance, query.epoch, query.ranks, query.seq) == ("i", 5, RANKS, 1)
    assert [(f.routing_key, f.tokens) for f in query.requests] == [(b"a", 2), (b"", 1), (b"b", 0)]
    assert not hook.chooser.bypassed
    hook.answers = [[0]]
    assert hook.choose("c") == [0]
    assert hook.queries[-1].seq == 2


@pytest.mark.parametrize("rank", [99, -1, 8, 2**40])
@pytest.mark.parametrize("key", ["session-1", None])
def test_case_2_a_rank_that_is_not_alive(rank: int, key: str | None) -> None:
    hook = Hook(rank)
    assert hook.choose(key) == [home(key) if key else None]
    assert hook.chooser.bypassed == {"invalid_rank": 1}


def test_case_2_a_dead_rank_in_part_of_a_batch() -> None:
    live = [0, 1, 3]
    hook = Hook([1, 2, 2, 3], live=live)
    assert hook.choose("a", "b", None, None) == [1, home("b", live), None, 3]
    assert hook.chooser.bypassed == {"invalid_rank": 2}


@pytest.mark.parametrize("ranks", [[], [1], [1, 2, 3]])
def test_case_2_a_reply_of_another_length(ranks: list[int]) -> None:
    hook = Hook(ranks)
    assert hook.choose("a", None) == [home("a"), None]
    assert hook.chooser.bypassed == {"malformed": 2}


@pytest.mark.parametrize(
    "cause", ["unreachable", "deadline", "breaker_open", "malformed", "mismatched", "refused"]
)
def test_silence_is_counted_by_cause(cause: str) -> None:
    hook = Hook(cause)
    assert hook.choose("a", None, "b") == [home("a"), None, home("b")]
    assert hook.chooser.bypassed == {cause: 3}
    hook.answers = [5]
    hook.choose("c")
    assert hook.queries[-1].bypassed == {cause: 3}


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_local_choice_is_the_sidecars_without_load(size: int) -> None:
    live = list(range(0, 3 * size, 3))
    hook, dispatcher = Hook("deadline", live=live), make_dispatcher()
    keys = [f"session-{i}" for i in range(50)] + ["é🦊", "k" * 5000, "\ud800", "a b "]
    local = hook.choose(*keys)
    facts = hook.queries[0].requests
    for rank, fact in zip(local, facts, strict=True):
        hook.queries[0].requests = [fact]
        hook.queries[0].epoch += 1  # no load of those before
        reply = dispatcher.handle(hook.queries[0], 0.0)
        assert (reply.ranks, reply.reasons) == ([rank], ["affinity_hit"])


def test_a_token_prefix_alone_is_no_local_choice() -> None:
    """The hook has no guard: a prefix that everybody shares would land on one rank."""
    hook, dispatcher = Hook(0), make_dispatcher()
    hook.want = dispatcher.policy.want
    hook.choose("learn what is wanted")
    hook.answers = ["deadline"]
    assert hook.choose(None, tokens=[5, 6, 7]) == [None]
    assert dispatcher.handle(hook.queries[-1], 0.0).reasons == ["token_affinity_hit"]


@pytest.mark.parametrize("key", [None, "", "   ", "\u3000", "\t"])
def test_no_key_no_local_choice(key: str | None) -> None:
    hook = Hook("deadline")
    assert hook.choose(key, tokens=[1, 2, 3]) == [None]
    assert hook.queries[0].requests[0].routing_key == b""
    assert len(hook.chooser.last_ranks) == 0


def test_the_last_rank_is_kept_while_the_sidecar_is_silent() -> None:
    away = next(rank for rank in RANKS if rank != home("a"))
    hook = Hook([away], "deadline")
    assert hook.choose("a") == [away]
    assert hook.choose("a") == [away]  # where its cache is, not where its hash points
    hook.live = [rank for rank in RANKS if rank != away]
    assert hook.choose("a") == [home("a", hook.live)]
    hook.live = RANKS
    assert hook.choose("a") == [home("a", [r for r in RANKS if r != away])]


def test_sessions_are_never_asked_for() -> None:
    hook = Hook([4])
    assert hook.choose(None, session="s1") == [home("s1")]
    assert not hook.queries
    batch = [one(None, session="s1"), one("a"), one("b", session="s2")]
    assert hook.chooser.choose(batch)[:2] == [home("s1"), 4]
    assert [facts.routing_key for facts in hook.queries[0].requests] == [b"a"]
    assert hook.chooser.bypassed == {"session": 3}


@pytest.mark.parametrize("key", ["", "   ", "\u3000"])
def test_a_session_with_a_blank_key_has_its_rank(key: str) -> None:
    hook = Hook([4])
    assert hook.choose(key, session="s1") == [home("s1")]


@pytest.mark.parametrize("key", ["user", None], ids=["with a key", "named like a key"])
def test_a_session_stays_when_the_guard_moves_its_key(key: str | None) -> None:
    """A session's state lives in one scheduler: a spill of others' requests must not move it."""
    hook = Hook(0)
    session = {"session": "user"}
    (first,) = hook.choose(key, **session)
    hook.answers = [next(rank for rank in RANKS if rank != first)]  # a spill
    hook.choose("user")
    assert hook.choose(key, **session) == [first]


def test_a_session_stays_when_its_key_changes() -> None:
    hook = Hook(0)
    keys = [key_preferring(rank, RANKS).decode() for rank in (1, 2)]
    first, second = (hook.choose(key, session="s1")[0] for key in keys)
    assert first == second


def test_no_live_rank() -> None:
    hook = Hook(0, live=[])
    assert hook.choose("a", None, "b") == [None] * 3
    assert not hook.queries
    assert hook.chooser.bypassed == {"no_live_rank": 3}
    assert hook.probe().ranks == []


def test_an_empty_batch_asks_nothing() -> None:
    hook = Hook(0)
    assert hook.chooser.choose([]) == []
    assert not hook.queries


def test_oversized_batches_are_decided_locally() -> None:
    hook = Hook(0)
    assert hook.choose(*["a"] * wire.MAX_BATCH) == [0] * wire.MAX_BATCH
    hook.answers = [1]
    ranks = hook.choose(*["a"] * wire.MAX_BATCH, "b")
    assert ranks == [0] * wire.MAX_BATCH + [home("b")]
    assert len(hook.queries) == 1
    assert hook.chooser.bypassed == {"oversized": wire.MAX_BATCH + 1}


def test_oversized_messages_are_decided_locally() -> None:
    hook = Hook(0)
    hook.want = Want(block_tokens=1, max_blocks=4096)
    hook.choose("first")
    batch = [one(f"key-{i}", array("q", range(4096))) for i in range(260)]
    assert hook.chooser.choose(batch) == [home(f"key-{i}") for i in range(260)]
    assert hook.chooser.bypassed == {"oversized": 260}


def test_320_ranks() -> None:
    live = list(range(320))
    hook = Hook([319], "deadline", live=live)
    assert hook.choose("a") == [319]
    assert hook.choose("b") == [order_of(key_hash(b"b"), live)[0]]
