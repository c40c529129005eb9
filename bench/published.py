"""How far is the load that SGLang publishes from the truth, and how long should the grace be?

    python -m bench.published

A SIMULATION in virtual time of one rank: SGLang's event loop (0.5.23, with and without overlap),
when it publishes and what its figures leave out, for three kinds of traffic. What is published goes
through the sidecar's own code; the error is taken where it matters, at each query. The loop: take
in what has arrived, form a prefill batch (or decode), launch, publish: after a prefill step always,
else with every 15th decode step, when idle on a change or once a second.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import msgspec

from sidecar import wire
from sidecar.budget import Budget
from sidecar.published.reports import Published
from sidecar.published.settings import Publisher

# An H100 with a model of the size that DP attention is for: tokens a second and a step, seconds.
PREFILL_RATE, CHUNK, DECODE_SECONDS, LAUNCH_SECONDS = 10_000, 8_192, 0.030, 0.003
OVERHEAD_SECONDS, INTERVAL, HEARTBEAT = 0.005, 15, 1.0
WARM_UP_SECONDS, STALE_SECONDS = 5.0, 5.0
GRACES_MS = (0, 25, 50, 100, 250, 500, 1000, 2000)
STARTED = 10**18
RANK = Publisher("simulated", 0, "ipc:///simulated")

Tokens = Callable[[random.Random], int]


class Event(NamedTuple):
    """At equal times a request that ends comes first, a load that is published last."""

    at: float
    order: int
    """-1: a request ends, 0: one is sent, 1: a load is published."""
    running: int = 0
    waiting: int = 0


@dataclass(slots=True)
class Request:
    prompt: int
    """Tokens still to be computed."""
    answer: int


@dataclass
class Scheduler:
    """One rank in virtual time."""

    overlap: bool
    events: list[Event] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    prefilled: list[Request] = field(default_factory=list)
    """In the batch under way: they run from the next step on."""
    chunked: Request | None = None
    last: str = ""
    steps: int = 0
    told: tuple[float, object] = (-HEARTBEAT, None)

    def step(self, now: float) -> float:
        """One turn of the loop; returns when the next begins."""
        self.running += self.prefilled
        self.prefilled = []
        kind, seconds = self._launch()
        published = self.last if self.overlap else kind
        if published:
            self._publish(now + LAUNCH_SECONDS, force=published == "prefill")
        now += seconds
        if kind == "decode":
            self._decode(now)
        self.last = kind
        return now

    def idle(self, now: float) -> None:
        self.last = ""
        self._publish(now, force=True)

    def _launch(self) -> tuple[str, float]:
        if self.chunked is None and not self.waiting:
            return "decode", DECODE_SECONDS
        left = CHUNK
        while left and (self.chunked or self.waiting):
            request = self.chunked or self.waiting.pop(0)
            taken = min(left, request.prompt)
            request.prompt -= taken
            left -= taken
            self.chunked = request if request.prompt else None
            self.prefilled += [] if request.prompt else [request]
        return "prefill", OVERHEAD_SECONDS + (CHUNK - left) / PREFILL_RATE

    def _decode(self, now: float) -> None:
        for request in self.running:
            request.answer -= 1
        self.events += [Event(now, -1) for request in self.running if request.answer <= 0]
        self.running = [request for request in self.running if request.answer > 0]

    def _publish(self, at: float, *, force: bool) -> None:
        self.steps += 1
        if not force and self.steps < INTERVAL:
            return
        self.steps = 0
        # KV tokens are told too, and change with every step of a rank that runs something.
        state = (len(self.running), len(self.waiting), at if self.running else 0)
        if state == self.told[1] and at - self.told[0] < HEARTBEAT:
            return
        self.told = at, state
        self.events.append(Event(at, 1, len(self.running), len(self.waiting)))


def simulate(overlap: bool, rate: float, tokens: Tokens, seconds: float, seed: int) -> list[Event]:
    """What happens on a rank that is sent `rate` requests a second."""
    rng, scheduler, arrivals, at = random.Random(seed), Scheduler(overlap), [], 0.0
    while at < seconds:
        at += rng.expovariate(rate)
        arrivals.append((at, Request(tokens(rng), rng.randint(50, 400))))
    scheduler.events += [Event(at, 0) for at, _ in arrivals]
    now, arrivals = 0.0, arrivals[::-1]
    while arrivals or scheduler.running or scheduler.waiting or scheduler.prefilled:
        while arrivals and arrivals[-1][0] <= now:
            scheduler.waiting.append(arrivals.pop()[1])
        parts = scheduler.waiting, scheduler.running, scheduler.prefilled
        if any(parts) or scheduler.chunked:
            now = scheduler.step(now)
            continue
        scheduler.idle(now)
        now = min(arrivals[-1][0] if arrivals else now + HEARTBEAT, scheduler.told[0] + HEARTBEAT)
    return sorted(scheduler.events)


def errors(events: Sequence[Event], grace: float) -> Iterator[int]:
    """At each query: what the sidecar takes the load for, less what it is."""
    budget, sent, load, seq = Budget(STALE_SECONDS, 1), 0, 0, 0
    instance = budget.instance(RANK.instance, 0.0)
    published = Published(
        [RANK], grace, lambda: budget, deliver=instance.apply_report, refused=_raise
    )
    for event in events:
        if event.order < 0:
            load -= 1
        elif event.order > 0:
            stat = msgspec.msgpack.encode(["LoadStat", event.running, event.waiting, 0, 0, 0])
            published.take(RANK, [b"load", seq.to_bytes(8, "big"), stat], 0, event.at)
            seq += 1
        else:
            query = wire.Query(1, 1, RANK.instance, STARTED, [0], [sent], [0], [])
            view = instance.apply_query(query, event.at)
            if event.at > WARM_UP_SECONDS:
                yield view.requests[0] - load
            instance.assign(0, 0)
            published.sent(query, instance, event.at)
            sent, load = sent + 1, load + 1


def _raise(error: Exception) -> None:
    raise error


TRAFFIC: dict[str, tuple[float, Tokens]] = {
    "short prompts": (4.0, lambda rng: 500),
    "mixed prompts": (2.0, lambda rng: int(rng.expovariate(1 / 2000)) + 50),
    "agents, 1 in 10 cold": (1.5, lambda rng: 30_000 if rng.random() < 0.1 else 1_000),
}
"""Requests a second to one rank, and uncached tokens of a prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    print("SIMULATED. Requests: mean error, mean |error| (least-most of the seeds), share of")
    print("queries at which the load is told too low by 2 or more.")
    for name, (rate, tokens) in TRAFFIC.items():
        for overlap in (True, False):
            print(f"{name}, {rate:g}/s, {'overlap' if overlap else 'no overlap'}")
            runs = [
                simulate(overlap, rate, tokens, arguments.seconds, seed)
                for seed in range(arguments.seeds)
            ]
            for grace in GRACES_MS:
                found = [list(errors(run, grace / 1000)) for run in runs]
                off = [fmean(map(abs, one)) for one in found]
                every = [error for one in found for error in one]
                low = fmean(error <= -2 for error in every)
                print(
                    f"  grace {grace:4} ms  {fmean(every):+.2f}  {fmean(off):.2f}"
                    f" ({min(off):.2f}-{max(off):.2f})  {low:.1%}"
                )


if __name__ == "__main__":
    main()
