"""A memory that nobody needs is handed on to be freed piece by piece, whatever ended it."""

from sidecar.policies import make_policy
from sidecar.policies.kv.index import FREED_AT_ONCE
from tests.kv.server import Server, prompt
from tests.support import make_dispatcher


def full() -> Server:
    server = Server(make_dispatcher("kv_affinity"), [0, 1])
    for number in range(3 * FREED_AT_ONCE):
        server.ask(prompt(f"prompt {number}", 300))
    return server


def test_a_swap_a_canary_and_a_shadow_hand_on_what_they_knew() -> None:
    server, discarded = full(), []
    dispatcher = server.dispatcher
    dispatcher.on_discard = discarded.append
    first = server.view.memory
    dispatcher.swap_policy(make_policy("kv_affinity"))
    assert not discarded, "an equal policy keeps what is known"
    dispatcher.swap_policy(make_policy("kv_affinity", {"move_ratio": 3}))
    assert discarded == [first]
    for begin, end in (
        (lambda: dispatcher.set_canary(make_policy("kv_affinity"), 0.5), dispatcher.set_canary),
        (lambda: dispatcher.set_shadow(make_policy("kv_affinity")), dispatcher.set_shadow),
    ):
        discarded.clear()
        begin()
        assert not discarded
        end(None)
        assert discarded and server.view.memory not in discarded


def test_it_is_freed_in_pieces_and_wholly() -> None:
    server = full()
    memory = server.view.memory
    count = len(memory.index._recent)
    assert count >= 3 * FREED_AT_ONCE
    steps = 0
    left = count
    for _ in memory.taken_apart():
        steps += 1
        assert 0 < left - len(memory.index._recent) <= FREED_AT_ONCE
        left = len(memory.index._recent)
    assert steps >= 3
    assert not memory.index._recent and not memory.index._first
