"""The controller process: dispatches through the hook's own classes, notes every request.

What a rank is sent goes over a ZeroMQ PUSH without a bound, as SGLang's controller sends it.
"""

import os
import time
import traceback
from array import array
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import zmq

from bench.chaos.board import Board
from bench.chaos.records import KEYLESS, Record
from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser, Dispatch
from sidecar import wire

PROMPT_TOKENS = 512
KEYLESS_EVERY = 5
"""Every fifth request has no routing key, and a prompt of its own."""
LAST_RANK_KEYS = 1 << 17


class Cast(NamedTuple):
    """How the processes of a rig are made."""

    folder: Path
    """Board, records and the sockets of the ranks."""
    endpoint: str
    ranks: int
    sessions: int
    deadline_ms: int
    instance: str = "bench"
    name: str = "controller"
    """Its records are in `name`.records."""
    clock_step: float = 0.0
    """Seconds that its wall clock is off."""

    @property
    def records(self) -> Path:
        return self.folder / f"{self.name}.records"


def rank_address(folder: Path, rank: int) -> str:
    """Where the requests of a rank go."""
    return f"ipc://{folder}/rank{rank}"


class Controller:
    """One controller; `run` does not return."""

    def __init__(self, cast: Cast) -> None:
        self.board = Board(cast.folder / "board")
        epoch = time.time_ns() + int(cast.clock_step * 1e9)
        live = lambda: self.board.live  # noqa: E731 - a bound method has no such name
        self.chooser = Chooser(cast.instance, epoch, {"rig": "chaos"}, live, LAST_RANK_KEYS)
        self.client = SidecarClient(cast.endpoint, cast.deadline_ms, 1, 0.05, self.chooser.probe)
        self.chooser.ask, self.client.heard = self._ask, self.chooser.heard
        self.chooser.meter = self.client.meter
        context = zmq.Context()
        self._workers = [context.socket(zmq.PUSH) for _ in range(cast.ranks)]
        for rank, worker in enumerate(self._workers):
            worker.setsockopt(zmq.SNDHWM, 0)
            worker.setsockopt(zmq.LINGER, 0)
            worker.connect(rank_address(cast.folder, rank))
        self._out = os.open(
            cast.records, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._prompts = [array("q", range(i, i + PROMPT_TOKENS)) for i in range(cast.sessions)]
        self._turns = cycle(range(cast.ranks))
        self._count = 0
        self._boot, self._cause = 0, ""

    def run(self) -> None:
        """Requests at the rate that the board says, for ever."""
        self.client.greet()
        due = time.monotonic()
        while True:
            rate = self.board.rate
            if rate <= 0:
                time.sleep(0.005)
                due = time.monotonic()
                continue
            self._request()
            due += 1 / rate
            # A stall is not made up for: requests that nobody sent cannot have failed.
            due = max(due, time.monotonic() - 0.05)
            time.sleep(max(0.0, due - time.monotonic()))

    def _request(self) -> None:
        self._count += 1
        session = self._count % len(self._prompts)
        if self._count % KEYLESS_EVERY == 0:
            session, key = KEYLESS, None
            first = (1 << 20) + self._count * PROMPT_TOKENS % (1 << 30)
            prompt = array("q", range(first, first + PROMPT_TOKENS))
        else:
            key, prompt = f"session-{session}", self._prompts[session]
        self._boot, self._cause = 0, ""
        before = dict(self.chooser.bypassed)
        live = sum(1 << rank for rank in self.board.live)
        rank: int | None = None
        waited, begun = self._delay(), time.monotonic()
        try:
            rank = self.chooser.choose_one(Dispatch(key, prompt, (None, None, None)))
        except Exception:  # noqa: BLE001 - in SGLang it would be the end of the server
            traceback.print_exc()
            self._cause = "exception"
        spent = time.monotonic() - begun
        waited = self._delay() - waited
        for cause, count in self.chooser.bypassed.items():
            if count != before.get(cause):
                self._boot, self._cause = 0, self._cause or cause
        given = -1 if rank is None else rank
        row = Record(begun, spent, waited, live, self._boot, session, given, self._cause)
        os.write(self._out, row.pack())
        self._send(rank if rank is not None else self._next(), len(prompt))

    def _send(self, rank: int | None, tokens: int) -> None:
        if rank is None:
            return
        self._workers[rank].send(tokens.to_bytes(4, "big"), zmq.NOBLOCK)
        self.chooser.sent.count(rank, tokens)

    def _next(self) -> int | None:
        """SGLang's own method, for what the hook leaves to it: the live ranks in turn."""
        live = self.board.live
        return next(rank for rank in self._turns if rank in live) if live else None

    def _delay(self) -> float:
        """Seconds that this thread has waited for a core since it started."""
        return int(os.pread(self._schedule, 64, 0).split()[1]) / 1e9

    def _ask(self, query: bytes, seq: int) -> wire.Reply | str:
        answer = self.client.ask(query, seq)
        if not isinstance(answer, str):
            self._boot = answer.boot
        return answer
