"""Mutates msgpack as values, so that messages stay messages; for targets that take whole ones."""

import random
from collections.abc import Callable
from typing import Any

import msgspec

from tests.fuzz.source import EXTREMES, OUTSIDE

WHOLE = frozenset({"query", "report", "answer"})
"""Targets whose inputs are one message."""
_ATOMS: tuple[Any, ...] = (*EXTREMES, *OUTSIDE, None, True, b"", b"\xff", "", "i", 0.5, [], {}, "é")
MOST_STEPS = 6


def mutator(plain: Callable[[bytes, int], bytes]) -> Callable[[bytes, int, int], bytes]:
    """What libFuzzer calls: (input, most bytes, seed) -> input. plain: its own mutation."""

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return plain(data, most)
        try:
            value = msgspec.msgpack.decode(data)
            for _ in range(1 + rng.randrange(2)):
                value = _changed(value, rng, MOST_STEPS)
            changed: bytes = msgspec.msgpack.encode(value)
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError, TypeError):
            return plain(data, most)
        return changed if len(changed) <= most else plain(data, most)

    return mutate


def _changed(value: Any, rng: random.Random, steps: int) -> Any:
    """`value` with one of its parts, however deep, replaced, left out, doubled or changed."""
    if not isinstance(value, list) or not value or not steps or rng.random() < 0.1:
        return _other(value, rng)
    at, how = rng.randrange(len(value)), rng.random()
    if how < 0.05:
        return value[:at]
    if how < 0.1:
        return [*value, rng.choice(_ATOMS)]
    if how < 0.2:
        return [*value[:at], value[at], *value[at:]]
    if how < 0.25:
        return value[:at] + value[at + 1 :]
    return [*value[:at], _changed(value[at], rng, steps - 1), *value[at + 1 :]]


def _other(value: Any, rng: random.Random) -> Any:
    """A value of the same type, mostly."""
    near = _NEAR.get(type(value))
    return rng.choice(_ATOMS) if near is None or rng.random() < 0.15 else near(value, rng)


def _number(value: int, rng: random.Random) -> int:
    flipped = value ^ (1 << rng.randrange(62))
    return rng.choice((value + 1, value - 1, flipped, rng.choice(EXTREMES)))


_NEAR: dict[type, Callable[[Any, random.Random], Any]] = {
    bool: lambda value, rng: not value,
    int: _number,
    bytes: lambda value, rng: rng.choice((value + rng.randbytes(2), rng.randbytes(8))),
    str: lambda value, rng: rng.choice((value + "x", value[1:], value[::-1], "\n")),
    list: lambda value, rng: value * 2 or [rng.choice(_ATOMS)],
    dict: lambda value, rng: {**value, "x": rng.choice(EXTREMES)},
}
