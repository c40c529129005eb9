"""Controllers, ranks and a sidecar in processes of their own, under load, and what they saw."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.chaos.board import Board
from bench.chaos.controller import Cast
from bench.chaos.disk import small_disk
from bench.chaos.process import SidecarProcess, Stuck, Weight, child, environment, until
from bench.chaos.records import Reader, Record

CHECKOUT = str(Path(__file__).resolve().parents[2])
SLACK = 3
"""Requests by which a view of a rank's load may differ from the truth while requests come and go:
one is being sent, one reported, one has just ended."""


class Rig:
    """Everything up and idle; `rate` of the board starts the load. Use it as a context."""

    def __init__(
        self,
        *,
        ranks: int = 8,
        sessions: int = 50,
        deadline_ms: int = 5,
        held_seconds: float = 0.03,
        sidecar_flags: tuple[str, ...] = (),
        obeys_modes: bool = False,
        small_sockets: bool = False,
    ) -> None:
        self._ending = contextlib.ExitStack()
        folder = self._ending.enter_context(tempfile.TemporaryDirectory(prefix="dps-", dir="/tmp"))
        self.folder = Path(folder)
        self.how: dict[str, Any] = {
            "env": environment(PYTHONPATH=CHECKOUT),
            "preexec_fn": child(obeys_modes=obeys_modes),
        }
        """More for Popen, of every process."""
        self.sockets = self.folder / "s"
        self._small_sockets = small_sockets
        self.endpoint = f"ipc://{self.sockets}/q"
        self.log = self.folder / "sidecar.log"
        self.flags = sidecar_flags
        self.cast = Cast(self.folder, self.endpoint, ranks, sessions, deadline_ms)
        self.board = self._new_board(held_seconds)
        self._readers: dict[str, Reader] = {}
        self.controllers: dict[str, int] = {}
        """Name -> process id."""
        self.ranks: dict[int, int] = {}
        """Rank -> process id."""
        self.died: list[tuple[float, int]] = []
        """When (monotonic seconds) the process of which rank was dead: what it had from before that
        may move. A start in the place of another is noted here."""
        self.notes: list[str] = []
        """What a fault wants to tell people."""
        self.sidecar: SidecarProcess

    def _new_board(self, held_seconds: float) -> Board:
        board = Board(self.folder / "board")
        self._ending.callback(board.close)
        board.live = list(range(self.cast.ranks))
        board.held_seconds = held_seconds
        return board

    def __enter__(self) -> "Rig":
        try:
            self._start()
        except BaseException:
            self._ending.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.close()

    def defer(self, task: Callable[[], object]) -> None:
        """Do this when the rig ends, before what was there earlier is taken down."""
        self._ending.callback(task)

    @contextlib.contextmanager
    def beside(self, module: str, *args: str) -> Iterator["subprocess.Popen[bytes]"]:
        """`python -m bench.chaos.MODULE ARGS`, within the block."""
        command = [sys.executable, "-m", f"bench.chaos.{module}", *args]
        with (self.folder / f"{module}.log").open("ab") as out:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out, **self.how)
        assert process.stdout is not None
        try:
            process.stdout.readline()  # it says when it begins
            yield process
        finally:
            code = process.poll()
            process.kill()
            process.communicate()
        if code is not None:
            told = (self.folder / f"{module}.log").read_text()[-2000:]
            raise Stuck(f"{module} {args} ended with {code}: {told}")

    def attack(self, name: str, *args: str) -> "contextlib.AbstractContextManager[Any]":
        """One of `attacks`, within the block."""
        return self.beside("attacks", name, self.endpoint, *args)

    def _start(self) -> None:
        if self._small_sockets:
            self._ending.enter_context(small_disk(self.sockets, 16))
        with (self.folder / "troupe.log").open("wb") as out:
            self._troupe = subprocess.Popen(
                [sys.executable, "-m", "bench.chaos.troupe"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                **self.how,
            )
        self._ending.callback(self._end_troupe)
        self.start_sidecar()
        for rank in range(self.cast.ranks):
            self.start_rank(rank)
        self.start_controller()

    def _end_troupe(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._troupe.kill()
        self._troupe.communicate()

    def start_sidecar(self, *flags: str, wait: bool = True, **how: Any) -> SidecarProcess:
        """Another sidecar, from now on `sidecar`; it ends with the rig. how: more for Popen."""
        how = {**self.how, **how}
        started = SidecarProcess(self.endpoint, self.log, *self.flags, *flags, **how)
        self._ending.callback(started.end)
        self.sidecar = started
        if wait:
            started.wait_listening()
        return started

    def restart(self, *flags: str, **how: Any) -> float:
        """Start another sidecar; monotonic seconds of when it listens."""
        return self.start_sidecar(*flags, wait=False, **how).wait_listening()

    def start_controller(self, name: str = "controller", **changes: Any) -> int:
        """A controller process; changes: fields of its Cast. Raises Stuck."""
        cast = self.cast._replace(name=name, **changes)
        pid = self.controllers[name] = self._fork(cast, None)
        if name not in self._readers:
            self._readers[name] = Reader(cast.records)
        return pid

    def start_rank(self, rank: int, **changes: Any) -> int:
        """The process of a rank; whoever held its place must be gone."""
        if rank in self.ranks:
            self.died.append((time.monotonic(), rank))
        pid = self.ranks[rank] = self._fork(self.cast._replace(**changes), rank)
        return pid

    def _fork(self, cast: Cast, rank: int | None) -> int:
        order = {"folder": str(cast.folder), "cast": cast[1:], "rank": rank}
        assert self._troupe.stdin is not None
        assert self._troupe.stdout is not None
        print(json.dumps(order), file=self._troupe.stdin, flush=True)
        answer = self._troupe.stdout.readline()
        if not answer:
            raise Stuck(f"no process: {(self.folder / 'troupe.log').read_text()[-2000:]}")
        return int(answer)

    def records(self, name: str = "controller") -> list[Record]:
        """All requests of a controller (and of those before it of that name) until now."""
        return self._readers[name].read()

    def remote_since(self, since: float, name: str = "controller") -> Record | None:
        """The first request after `since` (monotonic seconds) that a sidecar decided."""
        for record in reversed_until(self.records(name), since):
            if record.boot:
                return record
        return None

    def wait_remote(self, since: float, name: str = "controller") -> float:
        """When the first remote decision after `since` was made. Raises Stuck."""
        found = until(lambda: self.remote_since(since, name), "a remote decision")
        return float(found.at + found.seconds)

    def exact(self, slack: int = SLACK) -> bool:
        """Whether the sidecar's view of each live rank is the truth, give or take `slack`."""
        before = self.truth()
        told = self.sidecar.status(self.cast.instance)
        after = self.truth()
        if told is None:
            return False
        ranks = {one["rank"]: one for one in told["ranks"]}
        live = self.board.live
        if not all(rank in ranks and ranks[rank]["received"] is not None for rank in live):
            return False
        return all(
            min(before[r], after[r]) - slack <= ranks[r]["load"] <= max(before[r], after[r]) + slack
            for r in live
        )

    def truth(self) -> dict[int, int]:
        """Rank -> requests that it runs (what was sent arrives within microseconds)."""
        return {rank: self.board.rank(rank).running for rank in self.board.live}

    def wait_exact(self) -> float:
        """When the sidecar's view was the truth for the first time from now on. Raises Stuck."""
        until(self.exact, "an exact view")
        return time.monotonic()

    def quiet(self) -> bool:
        """Stop the load; whether the sidecar then counts nothing in flight and no load at all.

        An assignment whose answer came too late is taken back with the next query, so there are
        some more of these.
        """
        rate = self.board.rate
        try:
            return any(self._idle() for _ in range(5))
        finally:
            self.board.rate = rate

    def _idle(self) -> bool:
        self.board.rate = 20.0
        time.sleep(0.15)
        self.board.rate = 0.0
        try:
            until(lambda: self.exact(0) and not any(self.truth().values()), "an idle view", 2.0)
        except Stuck:
            return False
        return True

    def hook_weight(self) -> Weight:
        """Of controllers and ranks."""
        return Weight([*self.controllers.values(), *self.ranks.values()])

    def sidecar_weight(self) -> Weight:
        return Weight([self.sidecar.pid])


def reversed_until(records: list[Record], since: float) -> Iterator[Record]:
    """Those after `since`, in their order."""
    first = len(records)
    while first and records[first - 1].at >= since:
        first -= 1
    yield from records[first:]
