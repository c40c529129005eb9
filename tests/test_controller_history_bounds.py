"""The bounds of what the hook remembers of past dispatches, and of what one query tells of it."""

from array import array

import pytest

from sglang_hook import memory
from sglang_hook.memory import HASHES_AN_ENTRY, PART_ENTRIES, History
from sidecar import wire
from sidecar.wire import RequestFacts, Want
from tests.test_controller import Hook, one
from tests.test_controller_history import PROMPT, WANT, ask, learn, lose, told


def test_one_entry_a_conversation() -> None:
    hook = learn(want=Want(4, False, 8, 4, 0, 1000))
    for tokens in (PROMPT, PROMPT[:20]):
        ask(hook, "a", tokens=tokens)
    assert len(hook.chooser.history) == 1
    ask(hook, tokens=PROMPT)  # four blocks
    ask(hook, tokens=PROMPT[:36])  # the same four
    assert len(hook.chooser.history) == 2
    ask(hook, tokens=PROMPT[:16])  # two
    assert len(hook.chooser.history) == 3
    ask(hook, tokens=PROMPT[:7])  # none, but a prefix
    ask(hook, tokens=PROMPT[:5])  # the same prefix
    assert len(hook.chooser.history) == 4
    ask(hook)
    hook.choose(None, session="s")
    assert len(hook.chooser.history) == 4


def test_no_more_than_is_wanted_the_newest() -> None:
    hook = learn(want=Want(history=3))
    lose(hook, *"abcde")
    ask(hook)
    assert told(ask(hook)) == ["e", "d", "c"]
    assert told(ask(hook)) == []
    hook.boot = 2
    ask(hook)
    assert told(ask(hook)) == ["e", "d", "c"]
    assert told(ask(hook)) == []


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    assert Hook().chooser.history.capacity == memory.HISTORY_ENTRIES == 8192
    hook = learn()
    hook.chooser.history.capacity = 3
    lose(hook, *"abcad")
    assert len(hook.chooser.history) == 3
    ask(hook)
    assert told(ask(hook)) == ["d", "a", "c"]


def test_a_query_tells_a_part() -> None:
    hook = learn()
    keys = [f"{i}" for i in range(300)]
    lose(hook, *keys)
    ask(hook)
    parts = [told(ask(hook)) for _ in range(4)]
    assert [len(part) for part in parts] == [PART_ENTRIES, PART_ENTRIES, 44, 0]
    assert [key for part in parts for key in part] == keys[::-1]


@pytest.mark.parametrize(("blocks", "entries"), [(64, 128), (100, 81), (4096, 2), (1, 128)])
def test_a_query_tells_so_many_hashes(blocks: int, entries: int) -> None:
    hook = learn(want=Want(block_tokens=1, max_blocks=4096, history=1000))
    lose(hook, *[f"{i}" for i in range(130)], tokens=array("q", range(blocks)))
    ask(hook)
    history = ask(hook).history
    assert len(history) == entries
    hashes = sum(len(past.facts.block_hashes) for past in history)
    assert hashes == entries * blocks <= PART_ENTRIES * HASHES_AN_ENTRY


def test_an_unanswered_query_tells_half_as_much_the_next_time() -> None:
    hook = learn()
    lose(hook, *[f"{i}" for i in range(300)])
    sizes = []
    for _ in range(9):
        ask(hook)
        lose(hook, "x")
        sizes.append(len(hook.queries[-1].history))
    assert sizes == [128, 64, 32, 16, 8, 4, 2, 1, 1]
    ask(hook)
    assert [len(ask(hook).history) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 64, 128, 46]


def test_the_longest_entry_is_told_however_little_a_query_may_tell() -> None:
    hook = learn(want=Want(block_tokens=1, max_blocks=4096, history=1000))
    lose(hook, *"abc", tokens=array("q", range(4096)))
    for _ in range(9):
        ask(hook)
        lose(hook, "x")
    ask(hook)
    assert [told(ask(hook)) for _ in range(3)] == [["x"], ["c"], ["b"]]


def test_history_never_makes_a_query_too_large() -> None:
    """A batch that fits without it travels without it, and it is told later."""
    hook = learn(want=Want(block_tokens=1, max_blocks=4096, history=1000))
    lose(hook, *[f"{i}" for i in range(3)], tokens=array("q", range(4096)))
    ask(hook)
    batch = [one(f"key-{i}", array("q", range(i, i + 4096))) for i in range(227)]
    assert hook.chooser.choose(batch) == [0] * 227
    size = len(wire.encode(hook.queries[-1]))
    assert size <= wire.MAX_MESSAGE_BYTES < size + 9 * 4096
    assert hook.queries[-1].history == []
    assert told(ask(hook)) == ["2", "1"]


def test_a_swap_that_wants_another_number() -> None:
    """The same sidecar and policy wants history from now on, or no longer."""
    hook = learn(want=Want())
    lose(hook, "a")
    ask(hook, "b")
    hook.want = Want(history=5)
    ask(hook)
    assert told(ask(hook)) == ["a"]
    lose(hook, "c")
    hook.want = Want()
    ask(hook)
    assert told(ask(hook)) == []


def test_entries_are_compact() -> None:
    """8,192 lists of 128 integers would be some 40 MB."""
    history = History()
    facts = RequestFacts(b"a", block_hashes=[2**64 - 1] * 128)
    history.put(1, facts, WANT, 0, 0.0, decided=False)
    (entry,) = history._table.values()
    assert (entry.blocks.typecode, len(entry.blocks)) == ("Q", 128)


def test_equal_wants_are_one_object() -> None:
    hook = learn()
    first = hook.chooser.want
    hook.want = Want(block_tokens=4, max_blocks=8, history=1000)
    ask(hook)
    assert hook.chooser.want is first
