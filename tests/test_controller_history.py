"""What the hook remembers of past dispatches and tells to a sidecar that cannot know them."""

from array import array

import pytest

from sidecar import hashing
from sidecar.wire import Past, Query, Reply, RequestFacts, Want
from tests.test_controller import Hook, home, one

WANT = Want(block_tokens=4, max_blocks=8, history=1000)
PROMPT = array("q", range(40))


def told(query: Query) -> list[str]:
    return [past.facts.routing_key.decode() for past in query.history]


def learn(*answers: object, want: Want = WANT, **fields: object) -> Hook:
    """A hook whose sidecar has answered once, to a request of nobody, and wants history."""
    hook = Hook(0, **fields)
    hook.want = want
    hook.choose(None)
    hook.queries.clear()
    hook.answers = list(answers) or [0]
    return hook


def lose(hook: Hook, *keys: str, **fields: object) -> None:
    """Requests that the sidecar does not answer."""
    answers, hook.answers = hook.answers, ["deadline"]
    for key in keys:
        hook.choose(key, **fields)
    hook.answers = answers


def ask(hook: Hook, key: str | None = None, **fields: object) -> Query:
    hook.choose(key, **fields)
    return hook.queries[-1]


def test_what_the_sidecar_decided_is_not_told() -> None:
    hook = learn()
    for key in ("a", "b", "a"):
        ask(hook, key, tokens=PROMPT)
    assert [query.history for query in hook.queries] == [[]] * 3
    assert len(hook.chooser.history) == 2


def test_local_decisions_are_told_once_the_newest_first() -> None:
    hook = learn()
    lose(hook, "a", "b", "c")
    assert told(ask(hook)) == []  # a sidecar that is silent is told nothing until it answers
    assert told(ask(hook)) == ["c", "b", "a"]
    assert told(ask(hook)) == []


def test_a_past_dispatch_is_told_as_it_was() -> None:
    hook = learn()
    space = ("extra", None, None)
    lose(hook, "a", tokens=PROMPT, namespace=space)
    hook.now += 2.5
    ask(hook)
    (past,) = ask(hook).history
    number = hashing.namespace_hash(*space)
    blocks = hashing.block_hashes(PROMPT, 4, 8, number)
    assert past == Past(RequestFacts(b"a", number, 40, None, blocks), home("a"), 2500)


def test_a_clock_that_stands_still_or_goes_back() -> None:
    hook = learn()
    lose(hook, "a")
    hook.now -= 5
    ask(hook)
    assert [past.age_ms for past in ask(hook).history] == [0]


def test_explicit_ranks_are_told() -> None:
    hook = learn()
    hook.chooser.remember(one("a", PROMPT), 7)
    hook.chooser.remember(one(None, PROMPT), 6)
    hook.chooser.remember(one(None), 5)  # nothing to recognise it by
    history = ask(hook).history
    assert [(past.facts.routing_key, past.rank) for past in history] == [(b"", 6), (b"a", 7)]
    assert history[0].facts.block_hashes == hashing.block_hashes(PROMPT, 4, 8)


def test_a_rank_that_is_not_alive_was_not_the_sidecars_choice() -> None:
    hook = learn(99, 0)
    ask(hook, "a")
    assert told(ask(hook)) == ["a"]


@pytest.mark.parametrize("change", ["boot", "version"])
def test_a_new_sidecar_or_policy_is_told_all(change: str) -> None:
    hook = learn()
    for key in ("a", "b", "c", "a"):
        ask(hook, key)
    setattr(hook, change, 2)
    assert told(ask(hook, "d")) == []  # it is not known yet that there is another
    assert told(ask(hook)) == ["a", "c", "b"]  # d was decided by the new one
    assert told(ask(hook)) == []


@pytest.mark.parametrize("change", ["boot", "version"])
def test_what_was_told_in_the_query_that_met_a_new_sidecar_is_told_again(change: str) -> None:
    hook = learn()
    lose(hook, "a")
    ask(hook)
    setattr(hook, change, 2)
    assert told(ask(hook)) == ["a"]
    assert told(ask(hook)) == ["a"]
    assert told(ask(hook)) == []


def test_a_lost_reply_means_telling_again() -> None:
    hook = learn()
    lose(hook, "a", "b")
    ask(hook)
    lose(hook, "c")
    assert told(hook.queries[-1]) == ["b", "a"]
    ask(hook)
    assert told(ask(hook)) == ["c", "b", "a"]


def test_an_answer_to_another_query_tells_nothing() -> None:
    hook = learn()
    lose(hook, "a")
    ask(hook)
    lose(hook, "b")
    lost = hook.queries[-1]
    assert told(lost) == ["a"]
    hook.chooser.heard(Reply(1, lost.seq + 1, 1, "test", 1, [0], [], WANT))
    assert told(ask(hook)) == ["b", "a"]


def test_a_late_answer_counts() -> None:
    hook = learn()
    lose(hook, "a")
    ask(hook)
    lose(hook, "b")
    hook.chooser.heard(Reply(1, hook.queries[-1].seq, 1, "test", 1, [0], [], WANT))
    assert told(ask(hook)) == ["b"]


def test_a_late_answer_does_not_count_for_a_later_dispatch() -> None:
    hook = learn()
    lose(hook, "a")
    ask(hook)
    lose(hook, "b")
    late = hook.queries[-1]
    lose(hook, "a", tokens=PROMPT)
    hook.chooser.heard(Reply(1, late.seq, 1, "test", 1, [0], [], WANT))
    history = ask(hook).history
    assert [past.facts.tokens for past in history] == [40, 0]


def test_a_later_dispatch_replaces_and_is_told_for_itself() -> None:
    hook = learn()
    lose(hook, "a", "b", "a")
    ask(hook)
    first = ask(hook, "a")  # decided by the query that tells of the one before
    assert told(first) == ["a", "b"]
    assert told(ask(hook)) == []
    lose(hook, "a", tokens=PROMPT)
    ask(hook)
    (past,) = ask(hook).history
    assert past.facts.tokens == 40


def test_decided_by_the_sidecar_before_it_could_be_told() -> None:
    hook = learn()
    lose(hook, "a", "b")
    ask(hook, "a")
    assert told(ask(hook)) == ["b"]


def test_a_probe_tells_too_but_nothing_to_the_silent() -> None:
    hook = learn()
    hook.chooser.remember(one("a"), 7)
    probe = hook.probe()
    assert (told(probe), probe.requests) == (["a"], [])
    hook.chooser.heard(Reply(1, probe.seq, 1, "test", 1, [], [], WANT))
    assert told(ask(hook)) == []
    lose(hook, "b")
    assert told(hook.probe()) == []


def test_a_first_sidecar_is_told_what_came_before_it() -> None:
    hook = Hook("unreachable")
    hook.want = WANT
    hook.choose("a", tokens=PROMPT)
    assert told(hook.probe()) == []
    hook.answers = [0]
    assert told(ask(hook)) == []
    (past,) = ask(hook).history
    # Hashes were not wanted then; key, tokens and rank are remembered all the same.
    assert past.facts == RequestFacts(b"a", 0, 40)
    assert past.rank == home("a")


def test_nobody_is_told_what_he_does_not_want() -> None:
    hook = learn(want=Want(block_tokens=4, max_blocks=8))
    lose(hook, "a", "b", tokens=PROMPT)
    for _ in range(3):
        assert ask(hook).history == []
    hook.version, hook.want = 2, WANT
    ask(hook)
    history = ask(hook).history
    assert [(past.facts.routing_key, past.facts.block_hashes) for past in history] == [
        (b"b", []),
        (b"a", []),
    ]


@pytest.mark.parametrize(
    ("then", "blocks", "prefix"),
    [
        (Want(4, True, 4, 8, 0, 1000), 8, True),
        (Want(4, True, 4, 3, 0, 1000), 3, True),
        (Want(4, True, 4, 8, 1, 1000), 0, True),
        (Want(4, True, 8, 8, 0, 1000), 0, True),
        (Want(5, True, 4, 8, 0, 1000), 8, False),
    ],
    ids=["the same", "fewer blocks", "another growth", "another length", "another prefix"],
)
def test_hashes_of_another_schedule_are_left_out(then: Want, blocks: int, prefix: bool) -> None:
    hook = learn(want=Want(4, True, 4, 8, 0, 1000))
    lose(hook, "a", tokens=PROMPT)
    hook.version, hook.want = 2, then
    ask(hook)
    (past,) = ask(hook).history
    assert past.facts.block_hashes == hashing.block_hashes(PROMPT, 4, 8)[:blocks]
    assert past.facts.prefix_hash == (hashing.prefix_hash(PROMPT, 4) if prefix else None)


def test_facts_made_before_the_swap_keep_their_schedule() -> None:
    """The query that meets a new policy was hashed for the old one."""
    hook = learn()
    hook.version, hook.want = 2, Want(block_tokens=8, max_blocks=8, history=1000)
    ask(hook, "a", tokens=PROMPT)
    hook.boot = 2
    ask(hook)
    (past,) = ask(hook).history
    assert past.facts.block_hashes == []


def test_sessions_are_told_by_what_the_sidecar_can_recognise() -> None:
    hook = learn()
    hook.choose(None, session="s", tokens=PROMPT)
    hook.choose("a", session="t")
    hook.choose(None, session="u")
    rank_s, rank_t = (
        hashing.preferred(hashing.session_hash(session), range(8)) for session in "st"
    )
    known = [(past.facts.routing_key, past.rank) for past in ask(hook).history]
    assert known == [(b"a", rank_t), (b"", rank_s)]


def test_keyless_prompts_of_a_silent_sidecar_are_sglangs() -> None:
    hook = learn()
    lose(hook, *[None] * 3, tokens=PROMPT)
    assert len(hook.chooser.history) == 0
