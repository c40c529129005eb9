"""A dispatcher whose shadow follows, and worlds for it."""

from collections import deque
from typing import Any

from sidecar.dispatcher import Dispatcher
from sidecar.shadow import Comparison
from sidecar.wire import LoadReport, Query, Reply, RequestFacts
from tests.kv.world import World
from tests.support import INSTANCE

BUG = RuntimeError("bug")


def followed(dispatcher: Dispatcher, late: int = 0) -> Dispatcher:
    """Let the shadow follow as the server does, up to `late` messages behind."""
    waiting: deque[tuple[Any, ...]] = deque()
    handle, take_in = dispatcher.handle, dispatcher.report

    def work_off(limit: int) -> None:
        while len(waiting) > limit:
            message, reply, now = waiting.popleft()
            if dispatcher.shadow is None:
                continue
            if reply is None:
                dispatcher.shadow.report(message, now)
            else:
                deque(dispatcher.shadow.follow(message, reply, now), maxlen=0)

    def decide(asked: Query, now: float) -> Reply:
        reply = handle(asked, now)
        waiting.append((asked, reply, now))
        work_off(late)
        return reply

    def hear(said: LoadReport, now: float) -> None:
        take_in(said, now)
        waiting.append((said, None, now))
        work_off(late)

    dispatcher.handle, dispatcher.report = decide, hear  # type: ignore[method-assign]
    return dispatcher


def found(dispatcher: Dispatcher, instance: str = INSTANCE) -> Comparison:
    assert dispatcher.shadow is not None
    return dispatcher.shadow.comparisons[instance]


EVERYTHING = ["ask"] * 5 + ["report"] * 3 + ["tick"] * 2
EVERYTHING += ["reports", "silence", "pinned", "history", "flush", "restart", "controller", "ranks"]


def batch_of_samples(world: World) -> None:
    """Samples of one prompt in one query, as n > 1 in a batch."""
    facts = world.facts()
    copies = [
        RequestFacts(facts.routing_key, 0, facts.tokens, None, facts.block_hashes) for _ in range(6)
    ]
    world.replies.append(world.server.put(*copies))


def play(world: World, steps: int = 500, names: list[str] = EVERYTHING) -> World:
    for _ in range(steps):
        if world.drawn.random() < 0.05:
            batch_of_samples(world)
        getattr(world, world.drawn.choice(names))()
    return world
