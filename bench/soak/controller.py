"""The controller process of a soak: the hook's own Chooser and client, asked at a fixed rate.

First as many routing keys as it can remember come once each, so that its tables are full early.
Then every request is drawn: FRESH come once, others are turns of sessions, prompts without a key,
batches, or name their rank themselves.
"""

import sys
import time
from array import array
from bisect import bisect_left
from multiprocessing.connection import Connection
from random import Random
from typing import Any

from bench.outage import make_chooser
from bench.replace import RANKS
from bench.soak.shared import Options, Wire
from sglang_hook.controller import Dispatch
from sglang_hook.memory import LastRanks

FRESH, TURN, KEYLESS, BATCH = 0.85, 0.95, 0.985, 0.99
"""Cumulative shares; the rest is pinned."""
SESSIONS = 512
TURN_TOKENS = 192
MOST_TOKENS = 4096
"""Of a session, which then begins anew; longer prompts would measure the hashing of prompts."""
FRESH_TOKENS = 256
BATCH_SIZE = 4
ANSWER_EVERY = 0.02
"""Seconds between looks at the pipe: a look costs as much as half a request."""
BOUNDS_US = [round(50 * 2 ** (i / 4)) for i in range(41)]
"""Of the dispatch times: 50 microseconds to 51 milliseconds, a fifth apart."""


class Controller:
    """One incarnation; its counters begin at zero."""

    def __init__(self, wire: Wire, options: Options) -> None:
        self.wire = wire
        self.random = Random(options.seed)
        self.chooser, self.client = make_chooser(options.endpoint)
        self.chooser.last_ranks = LastRanks(options.keys)
        self.chooser.meter = self.client.meter
        self.live = list(range(RANKS))
        self.chooser.live_ranks = lambda: self.live
        self.epoch = self.chooser.epoch
        self.base = array("q", range(MOST_TOKENS))
        self.lengths = [TURN_TOKENS] * SESSIONS
        self.asked = self.stock = self.lost = self.errors = self.fresh = 0
        self.longest = 0.0
        """Seconds of the slowest dispatch since the last report."""
        self.times = [0] * (len(BOUNDS_US) + 1)

    def prompt(self, owner: int, length: int) -> "array[int]":
        """Tokens that nobody else's prompt begins with."""
        prompt = self.base[:length]
        prompt[0] = owner
        return prompt

    def one(self) -> None:
        """The next request."""
        drawn = self.random.random()
        if self.fresh < self.chooser.last_ranks.capacity or drawn < FRESH:
            self.fresh += 1
            key = f"{self.epoch}-{self.fresh}"
            self.place([Dispatch(key, self.prompt(self.fresh, FRESH_TOKENS), (None,) * 3)])
        elif drawn < TURN:
            self.place([self.turn()])
        elif drawn < KEYLESS:
            prompt = self.prompt(-1 - self.random.randrange(SESSIONS), FRESH_TOKENS)
            self.place([Dispatch(None, prompt, ("salt", None, None))])
        elif drawn < BATCH:
            self.place([self.turn() for _ in range(BATCH_SIZE)])
        else:
            self.pinned()

    def turn(self) -> Dispatch:
        """The next turn of a session: its prompt is longer than the last."""
        session = self.random.randrange(SESSIONS)
        length = self.lengths[session]
        self.lengths[session] = length + TURN_TOKENS if length < MOST_TOKENS else TURN_TOKENS
        return Dispatch(f"session-{session}", self.prompt(-session, length), (None,) * 3)

    def place(self, dispatches: list[Dispatch]) -> None:
        """Have ranks chosen, and send the requests there."""
        begun = time.perf_counter()
        try:
            if len(dispatches) == 1:
                ranks = [self.chooser.choose_one(dispatches[0])]
            else:
                ranks = self.chooser.choose(dispatches)
        except Exception as error:  # noqa: BLE001 - what must never happen is counted
            print("the hook raised", repr(error), file=sys.stderr)
            self.errors += 1
            ranks = [None] * len(dispatches)
        spent = time.perf_counter() - begun
        self.longest = max(self.longest, spent)
        self.times[bisect_left(BOUNDS_US, spent * 1e6)] += 1
        for dispatch, rank in zip(dispatches, ranks, strict=True):
            self.asked += 1
            if rank is None:
                # Without a key that is SGLang's to place where the sidecar did not.
                self.stock += dispatch.routing_key is None
                self.lost += dispatch.routing_key is not None
            elif rank not in self.live:
                self.lost += 1
                continue
            stock = self.live[self.asked % len(self.live)]
            self.send(stock if rank is None else rank, len(dispatch.tokens))

    def pinned(self) -> None:
        """A request that names its rank."""
        rank = self.random.choice(self.live)
        self.chooser.abstain("pinned")
        self.chooser.remember(self.turn(), rank)
        self.asked += 1
        self.send(rank, FRESH_TOKENS)

    def send(self, rank: int, tokens: int) -> None:
        self.chooser.sent.count(rank, tokens)
        self.wire.requests[rank] += 1
        self.wire.tokens[rank] += tokens

    def settle(self) -> list[int]:
        """Be quiet after a request that the sidecar decided; what each rank was sent by then."""
        for _ in range(2 * RANKS):
            self.place([self.turn()])
        until = time.monotonic() + 30
        while time.monotonic() < until:
            before = self.chooser.bypassed.total()
            self.place([self.turn()])
            if self.chooser.bypassed.total() == before:
                break
            time.sleep(0.02)
        return list(self.chooser.sent.of(range(RANKS))[0])

    def told(self) -> dict[str, Any]:
        """Counters since the start; dispatch times since they were told last."""
        told = {
            "asked": self.asked,
            "stock": self.stock,
            "lost": self.lost,
            "errors": self.errors,
            "fresh": self.fresh,
            "bypassed": dict(self.chooser.bypassed),
            "keys": len(self.chooser.last_ranks),
            "history": len(self.chooser.history),
            "blocks": sys.getallocatedblocks(),
            "longest_ms": round(self.longest * 1000, 3),
            "times": list(self.times),
        }
        self.longest = 0.0
        self.times = [0] * len(self.times)
        return told


def serve(pipe: Connection, wire: Wire, options: Options) -> None:
    """Requests at the rate of the options, until the pipe closes.

    ("live", ranks): the ranks that SGLang would send to. ("pause",): no more requests; what was
    sent. ("go",): on again. ("tell",): the counters.
    """
    controller, quiet = Controller(wire, options), False
    due = look = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= look or quiet:
            look = now + ANSWER_EVERY
            while pipe.poll(ANSWER_EVERY if quiet else 0):
                word, *more = pipe.recv()
                answer: Any = None
                if word == "live":
                    controller.live = list(more[0])
                elif word == "tell":
                    answer = controller.told()
                else:
                    quiet = word == "pause"
                    answer = controller.settle() if quiet else None
                pipe.send(answer)
        if quiet:
            continue
        controller.one()
        # A stall is not made up for: nobody waits for requests that were not made.
        due = max(due + 1 / options.rate, time.monotonic() - 0.05)
        time.sleep(max(0.0, due - time.monotonic()))
