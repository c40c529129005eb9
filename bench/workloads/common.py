"""What the families share: errors, bounds, growing prompts, keys, open and closed loops.

Whatever is drawn comes from `random.Random` seeded with a string, which is the same in every
process, whatever PYTHONHASHSEED is.
"""

from collections.abc import Iterable, Iterator
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from bench.workloads.base import Call, Script, Send, Source

PAGE = 64
"""Tokens of a page where no trace says otherwise; the real agentic sessions have it too."""
STREAM = 1 << 24
"""Page ids of one stream, so that streams never meet: a system prompt, a session, a sub-agent."""
CALLS = 1_000_000
"""Call ids of one session: its number times this, plus the turn."""

Count = Annotated[int, Meta(ge=1, le=100_000)]
Tokens = Annotated[int, Meta(ge=1, le=1_000_000)]
MaybeTokens = Annotated[int, Meta(ge=0, le=1_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]
Rate = Annotated[float, Meta(gt=0, le=100_000)]
Share = Annotated[float, Meta(ge=0, le=1)]


Half = Literal["all", "even", "odd"]
"""Which part of a trace: parameters are chosen on one half and judged on the other."""


class WorkloadError(ValueError):
    """A workload that cannot be made; the message is for the person who asked for it."""


class MissingTraces(WorkloadError):
    """The workload needs a trace that is not there: skip it, and say the message."""


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a family. Built through `msgspec.convert` only, which checks the bounds."""


class Prompt:
    """A prompt that grows by pages of its own stream, after whole pages shared with others.

    A partly filled last page gets an id that is never used again: a server with smaller pages then
    reuses no more of it than the model, and no cache can take it for the page once it is full.
    """

    def __init__(self, stream: int, shared: Iterable[int] = (), tokens: int = 0) -> None:
        """shared: the whole pages within the first `tokens` tokens, which others begin with too."""
        self._whole = list(shared)
        self._next = stream * STREAM
        self.tokens = tokens

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        self._whole += self._fresh(self.tokens // PAGE - len(self._whole))

    def pages(self) -> tuple[int, ...]:
        tail = self._fresh(1) if self.tokens % PAGE else ()
        return (*self._whole, *tail)

    def _fresh(self, count: int) -> range:
        ids = range(self._next, self._next + count)
        self._next += count
        return ids


def shared_pages(stream: int, tokens: int) -> range:
    """The pages that a prompt of `tokens` tokens fills: what its users share."""
    return range(stream * STREAM, stream * STREAM + tokens // PAGE)


def rng(*parts: object) -> Random:
    """A generator of its own for every purpose, so that no draw shifts another."""
    return Random("/".join(map(str, parts)))


def key(family: str, seed: int, index: int) -> str:
    """The routing key of a session: 64 bits that depend on nothing else."""
    return f"{rng(family, 'key', seed, index).getrandbits(64):016x}"


def once(call: Call) -> Script:
    """A script of one call."""
    yield Send(call)


def poisson(rate: float, random: Random) -> Iterator[float]:
    """Times at which things begin that know nothing of each other, `rate` a second."""
    at = 0.0
    while True:
        at += random.expovariate(rate)
        yield at


def loop(
    scripts: Iterable[Script], *, concurrency: int, rate: float | None, random: Random
) -> Source:
    """Open loop if there is a rate (scripts a second), else `concurrency` scripts at a time."""
    if rate is not None:
        return Source(zip(poisson(rate, random), scripts, strict=False))
    return Source(((0.0, script) for script in scripts), concurrency)


def pace(concurrency: int, rate: float | None, what: str, of: int) -> str:
    """How `loop` sends `of` scripts, for a description."""
    if rate is None:
        return f"closed loop, {min(concurrency, of):,} {what} at a time"
    return f"open loop, Poisson, {rate:g} {what} a second"
