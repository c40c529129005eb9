"""What a workload is: scripts of calls, the same for every arm and for every driver.

A prompt is a tuple of page ids. Equal ids at the same place mean equal tokens, so prompts share a
prefix as far as their tuples do; what the tokens are matters to nobody but a live server, for which
`bench.live` makes them. Answers are recorded, not generated: what a later prompt holds of an
earlier answer is another page than what the server generated, in virtual time as on a live server.
"""

import heapq
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Protocol, TypeAlias

import msgspec


class Call(msgspec.Struct, eq=False):
    """One request of a client."""

    id: int
    """Unique within a workload and seed, whoever ends first: the session's number times 1,000,000
    (`common.CALLS`) plus the turn. Not dense, not in the order of sending."""
    session: int
    """What belongs together for a person: a session, a group, a user; plots have a line each."""
    turn: int
    """Counts the calls of its session from 0, sub-agents included, as they are recorded; numbers
    are given out before sub-agents start side by side."""
    key: str
    """Routing key; empty: none is sent."""
    pages: tuple[int, ...]
    """Prompt; the last page may be partly filled."""
    prompt_tokens: int
    """Over (len(pages) - 1) * page_tokens, at most len(pages) * page_tokens."""
    output_tokens: int
    """The answer's length, at least 1; servers are told to ignore ends of sequence."""


class Send(msgspec.Struct):
    """A script's step: send `call` `delay` seconds after the step before is over."""

    call: Call
    delay: float = 0.0


class Fork(msgspec.Struct):
    """A script's step: run other scripts side by side; it is over when all of them are."""

    scripts: "list[Script]"
    delay: float = 0.0


Script: TypeAlias = Generator[Send | Fork, None, None]


class Workload(Protocol):
    """A workload at one setting; `make` may be called again and again."""

    name: str
    page_tokens: int
    """Tokens of a page."""
    description: str
    """A sentence with every number that matters, for the report."""

    def make(self, seed: int) -> "Source":
        """The calls of a seed: keys, lengths and order depend on nothing else."""
        ...


class Source:
    """Walks scripts: which calls are due at the start, and which after a call is done.

    starts: pairs of a time (seconds) and a script (open loop), ascending. slots: how many scripts
    may be active (closed loop): the others wait until one ends, whatever their time.
    """

    def __init__(self, starts: Iterable[tuple[float, Script]], slots: int | None = None) -> None:
        self._starts = iter(starts)
        self._slots = slots
        self._active = 0
        self._after: dict[int, Callable[[float], list[tuple[float, Call]]]] = {}

    def start(self) -> "Iterator[tuple[float, Call]]":
        """The first calls with their times, ascending; open loop: lazily, as there may be many.

        Scripts of an open loop begin without a delay, so that their order is that of `starts`.
        """
        if self._slots is None:
            for at, script in self._starts:
                yield from self._advance(script, at, self._ended)
            return
        first: list[tuple[float, Call]] = []
        while self._active < self._slots:
            due = self._next_script(0.0)
            if due is None:
                break
            first += due
        yield from sorted(first, key=lambda pair: pair[0])

    def done(self, call: Call, now: float) -> list[tuple[float, Call]]:
        """Calls that become due when `call` is done at `now`, with their times (>= now)."""
        return self._after.pop(call.id)(now)

    def _next_script(self, now: float) -> list[tuple[float, Call]] | None:
        found = next(self._starts, None)
        if found is None:
            return None
        self._active += 1
        return self._advance(found[1], max(now, found[0]), self._ended)

    def _ended(self, now: float) -> list[tuple[float, Call]]:
        if self._slots is None:
            return []
        self._active -= 1
        return self._next_script(now) or []

    def _advance(
        self, script: Script, now: float, ended: Callable[[float], list[tuple[float, Call]]]
    ) -> list[tuple[float, Call]]:
        step = next(script, None)
        if step is None:
            return ended(now)
        if isinstance(step, Send):
            self._after[step.call.id] = lambda at: self._advance(script, at, ended)
            return [(now + step.delay, step.call)]
        left = [len(step.scripts)]
        if not step.scripts:
            return self._advance(script, now + step.delay, ended)

        def joined(at: float) -> list[tuple[float, Call]]:
            left[0] -= 1
            return [] if left[0] else self._advance(script, at, ended)

        due = [self._advance(each, now + step.delay, joined) for each in step.scripts]
        return list(heapq.merge(*due, key=lambda pair: pair[0]))
