"""What is done to the processes of a soak, and when.

The middle third leaves the sidecar's process alone, so that one incarnation lives long enough for
its memory to be judged by itself; it begins with a new controller. In the other two a sidecar is
replaced every LIFE seconds, by kill -9 and take-over in turn.
"""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from bench.replace import RANKS

LIFE = 90.0
"""Seconds of a sidecar in the first and the last third."""
CHURN = 5.0
"""Seconds from the leaving of a rank to that of the next."""
AWAY = 2.0
CHECK = 20.0
SIGSTOPS = 40.0
SCHEDULER = 90.0


class Event(NamedTuple):
    at: float
    """Seconds since the start."""
    what: str
    """Name of a method of World."""
    rank: int | None = None


def plan(seconds: float, seed: int = 1) -> list[Event]:
    """Every event of a soak of that length, in order. Short ones get their share of each kind."""
    # In one of seconds all comes closer together, but each kind comes.
    scale = min(1.0, max(0.1, seconds / 180))
    events = [
        *_churn(seconds, scale, Random(seed)),
        *_every(CHECK * scale, seconds, "check"),
        *_every(SIGSTOPS * scale, seconds, "stop_and_go"),
        *_replacements(seconds, min(LIFE * scale, seconds / 4)),
        Event(seconds / 3, "restart_controller"),
    ]
    return sorted(events)


def _every(period: float, seconds: float, what: str) -> Iterator[Event]:
    for number in range(1, int(seconds / period) + 1):
        yield Event((number - 0.3) * period, what)


def _replacements(seconds: float, life: float) -> Iterator[Event]:
    third = seconds / 3
    each = int(third / life)
    first = [life * number for number in range(1, each + 1)]
    last = [2 * third + life * number for number in range(each + 1)]
    for number, at in enumerate(at for at in (*first, *last) if at < seconds - life / 4):
        yield Event(at, ("kill_sidecar", "take_over")[number % 2])


def _churn(seconds: float, scale: float, random: Random) -> Iterator[Event]:
    """A rank leaves and returns; now and then its scheduler is another by then."""
    next_restart = period = min(SCHEDULER * scale, seconds / 2)
    at = CHURN * scale
    while at < seconds - CHURN * scale:
        rank = random.randrange(RANKS)
        if at >= next_restart:
            next_restart += period
            yield Event(at, "restart_scheduler", rank)
        else:
            yield Event(at, "leave", rank)
            yield Event(at + AWAY * scale, "come_back", rank)
        at += CHURN * scale
