"""What the processes of a soak have in common: counters in shared memory, questions over a pipe."""

import contextlib
import multiprocessing as mp
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from bench.live.children import die_with_parent
from bench.replace import RANKS

PATIENCE = 60.0
"""Seconds that a process may take to answer."""


class Options(NamedTuple):
    """What the controller and the schedulers of a soak are told."""

    endpoint: str
    rate: float
    """Requests a second."""
    keys: int
    """Routing keys that the controller remembers; so many come once each at first."""
    seed: int = 1


class Wire(NamedTuple):
    """Stands for SGLang's sockets to its schedulers: the controller adds, the schedulers read.

    Element r of each is of rank r, since the start of the soak, whichever controller it was.
    """

    requests: Any
    """multiprocessing.RawArray of unsigned 64-bit, shape (RANKS,)."""
    tokens: Any

    @classmethod
    def make(cls) -> "Wire":
        context = mp.get_context("spawn")
        return cls(context.RawArray("Q", RANKS), context.RawArray("Q", RANKS))


Serve = Callable[[Connection, Wire, Options], None]


def _child(serve: Serve, pipe: Connection, wire: Wire, options: Options) -> None:
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(pipe, wire, options)


class Child:
    """One such process. `ask` has it do or tell something; it answers between two requests."""

    def __init__(self, serve: Serve, wire: Wire, options: Options) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_child, args=(serve, theirs, wire, options), daemon=True
        )
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, *words: Any) -> Any:
        """The answer; SystemExit if there is none."""
        try:
            self._pipe.send(words)
            if self._pipe.poll(PATIENCE):
                return self._pipe.recv()
        except (EOFError, OSError):
            pass
        raise SystemExit(f"{words[0]}: process {self.pid} does not answer")

    def end(self) -> None:
        """kill -9, as a crash would."""
        self.process.kill()
        self.process.join()
        self._pipe.close()
