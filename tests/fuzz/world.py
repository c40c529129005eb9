"""What must hold of a dispatcher, whatever it was told."""

from sidecar.budget import Instance
from sidecar.dispatcher import Dispatcher
from sidecar.policies import REASONS
from sidecar.policies.kv.memory import Memory
from sidecar.policies.kv.queue import KEPT
from sidecar.seat import Seat
from sidecar.tally import MAX_PAIRS
from sidecar.wire import MAX_RANKS, Query, Reply, decode_answer, encode

_LISTS = ("requests", "queued", "in_flight", "prefilling", "tokens", "usable", "counted")


class BrokenPromise(Exception):
    """What a target finds. Not an AssertionError: no code of ours may catch it as a peer's."""


def hold(condition: object, text: str) -> None:
    """Raises BrokenPromise unless `condition` is true."""
    if not condition:
        raise BrokenPromise(text)


def check_reply(query: Query, reply: Reply) -> None:
    """One live rank and one known reason for each request."""
    asked = len(query.requests)
    hold(len(reply.ranks) == len(reply.reasons) == asked, "not one answer for each request")
    hold(set(reply.ranks) <= set(query.ranks), "a rank that is not live")
    hold(set(reply.reasons) <= REASONS, "a reason that nobody knows")
    hold(reply.seq == query.seq, "an answer to another query")
    hold(decode_answer(encode(reply)) == reply, "an answer that is not what was meant")


def seats(dispatcher: Dispatcher) -> list[Seat]:
    """Every seat that follows the traffic."""
    found = [dispatcher.active, *dispatcher._others]
    shadow = dispatcher.shadow
    if shadow is not None:
        found += [*shadow._own.seats, *shadow._real.seats]
    return found


def check(dispatcher: Dispatcher) -> None:
    """Budgets add up, and nothing has grown beyond its bound."""
    most = dispatcher.budget.max_instances
    hold(len(dispatcher.tallies) <= most, "more tallies than instances")
    for tally in dispatcher.tallies.values():
        hold(len(tally.spills) <= MAX_PAIRS + 1, "too many pairs of ranks")
    for seat in seats(dispatcher):
        hold(len(seat.budget.instances) <= most, "more instances than there may be")
        for instance in seat.budget.instances.values():
            check_instance(instance)
    if dispatcher.shadow is not None:
        hold(len(dispatcher.shadow.comparisons) <= most, "more comparisons than instances")


def check_instance(instance: Instance) -> None:
    """The view of one instance, and what is remembered of it."""
    view, size = instance.view, len(instance.view.ranks)
    hold(len(instance.states) <= MAX_RANKS, "more ranks than there may be")
    hold(view.position == {r: p for p, r in enumerate(view.ranks)}, "positions are not those")
    for name in _LISTS:
        hold(len(getattr(view, name)) == size, f"{name}: not one for each rank")
    for name in ("requests", "queued", "in_flight", "prefilling", "tokens"):
        hold(not size or min(getattr(view, name)) >= 0, f"{name}: less than nothing")
    counted = [n for n, c in zip(view.requests, view.counted, strict=True) if c]
    hold(view.total == sum(counted), "the total is not that of the counted ranks")
    hold(view.known == len(counted), "the number of counted ranks is wrong")
    hold(view.changed <= set(range(size)), "a change of no rank")
    hold(view.retracted.keys() <= set(range(size)), "something retracted from no rank")
    instance.sync()
    for state in instance.states.values():
        hold(min(state.in_flight()) >= 0, "less than nothing is in flight")
    if isinstance(view.memory, Memory):
        check_memory(view.memory)


def check_memory(memory: Memory) -> None:
    """What `kv_affinity` keeps of one instance."""
    hold(len(memory.ranks) <= 2 * MAX_RANKS, "a memory of too many ranks")
    index = memory.index
    hold(index.weight <= index.limit or len(index._recent) == 1, "the index is over its limit")
    hold(index._size == sum(len(node.blocks) for node in index._recent), "blocks miscounted")
    for rank in memory.ranks.values():
        hold(len(rank.queue) <= KEPT, "the queue of a rank is too long")
        hold(0 <= rank.footprint.active <= rank.footprint.total, "a footprint that cannot be")
        hold(0 <= rank.engine.credit <= 1, "a credit that is no share")
