"""The processes of a soak, what is done to them, and what they say of one another."""

import http.client
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.live.children import die_with_parent
from bench.replace import RANKS
from bench.simulated.launch import free_port
from bench.soak import controller, schedulers
from bench.soak.shared import PATIENCE, Child, Options, Wire

LOG_MEGABYTES = 16
"""Bound of the decision log: small, so that old files are removed all the time."""
SETTLED_WITHIN = 3.0
"""Seconds after the last request by which the load view must be the truth: what runs ends within
0.2, and a load that does not change is reported again after 0.25."""
HTTP_SECONDS = 10.0


class Usage(NamedTuple):
    """What a process takes."""

    mib: float
    """Resident."""
    descriptors: int
    threads: int


class Check(NamedTuple):
    """The load view at a quiet moment."""

    at: float
    """Seconds since the start of the soak."""
    drift: int
    """Sum over live ranks of the differences in sent, received, running, in flight and load."""
    held: int
    """Requests in flight in truth, just before, while the schedulers took in nothing."""
    held_off: int
    """Sum over live ranks of the differences in requests in flight then."""
    seconds: float
    """Until it was the truth, or until nobody waited longer."""
    after: str
    """The last thing that was done to the processes before."""
    wrong: list[str]


class World:
    """A sidecar, a controller and schedulers. folder: for sockets and logs."""

    def __init__(self, folder: Path, rate: float, keys: int) -> None:
        self.folder = folder
        self.endpoint = f"ipc://{folder / 'q'}"
        self.port = free_port()
        self.options = Options(self.endpoint, rate, keys)
        self.wire = Wire.make()
        self.counts: dict[str, int] = {}
        """Incarnations by kind of process."""
        self.born: dict[str, float] = {}
        self.live = set(range(RANKS))
        self.last_event = "start"
        self.replaced_at = 0.0
        """When a process was replaced last, monotonic seconds."""
        self.sidecar = self._start_sidecar()
        self.schedulers = self._start("schedulers")
        self.controller = self._start("controller")
        self.await_ready()

    def _name(self, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.born[kind] = time.monotonic()

    def _start(self, kind: str) -> Child:
        self._name(kind)
        serve = controller.serve if kind == "controller" else schedulers.serve
        seeded = self.options._replace(seed=self.counts[kind])
        return Child(serve, self.wire, seeded)

    def _start_sidecar(self, *more: str) -> "subprocess.Popen[bytes]":
        self._name("sidecar")
        command = [sys.executable, "-m", "sidecar", "serve", f"--endpoint={self.endpoint}"]
        command += [f"--admin-port={self.port}", "--log-level=warning"]
        command += [f"--decision-log-directory={self.folder / 'decisions'}"]
        command += [f"--decision-log-max-megabytes={LOG_MEGABYTES}", *more]
        with (self.folder / "sidecar.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=lambda: die_with_parent(signal.SIGKILL)
            )

    def get(self, path: str) -> bytes | None:
        """The body of a GET; None: nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HTTP_SECONDS)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            return body if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def await_ready(self) -> None:
        """SystemExit if the sidecar is not ready in time."""
        until = time.monotonic() + PATIENCE
        while (body := self.get("/status")) is None or json.loads(body)["pid"] != self.sidecar.pid:
            if self.sidecar.poll() is not None or time.monotonic() > until:
                log = (self.folder / "sidecar.log").read_text(errors="replace")
                raise SystemExit(f"the sidecar is not ready; its log:\n{log[-2000:]}")
            time.sleep(0.02)
        self.replaced_at = time.monotonic()

    def kill_sidecar(self) -> None:
        """kill -9, and a new one at once."""
        self.last_event = "sidecar killed"
        self.sidecar.kill()
        self.sidecar.wait()
        self.sidecar = self._start_sidecar()
        self.await_ready()

    def take_over(self) -> None:
        """A new sidecar takes the place of the old one, which ends by itself."""
        self.last_event = "take-over"
        before = self.sidecar
        self.sidecar = self._start_sidecar("--take-over")
        if before.wait(PATIENCE) != 0:
            raise SystemExit(f"the sidecar that handed over ended with {before.returncode}")
        self.await_ready()

    def stop_and_go(self) -> None:
        """SIGSTOP for 2 to 300 milliseconds, again and again, and once for a second."""
        self.last_event = "SIGSTOP"
        for pause in (0.002, 0.004, 0.008, 0.02, 0.05, 0.3, 1.0):
            self.sidecar.send_signal(signal.SIGSTOP)
            time.sleep(pause)
            self.sidecar.send_signal(signal.SIGCONT)
            time.sleep(0.05)

    def leave(self, rank: int) -> None:
        """SGLang sends nothing to a rank any more."""
        self.last_event = "rank left"
        self._set_live(self.live - {rank})

    def come_back(self, rank: int) -> None:
        self.last_event = "rank returned"
        self._set_live(self.live | {rank})

    def _set_live(self, ranks: set[int]) -> None:
        self.live = ranks
        self.controller.ask("live", sorted(ranks))

    def restart_scheduler(self, rank: int) -> None:
        """A scheduler dies, SGLang notices, a new one starts, SGLang uses it."""
        self.last_event = "scheduler restarted"
        self.schedulers.ask("kill", rank)
        time.sleep(0.2)
        self._set_live(self.live - {rank})
        time.sleep(0.8)
        self.schedulers.ask("start", rank)
        time.sleep(0.3)
        self._set_live(self.live | {rank})
        self.replaced_at = time.monotonic()

    def restart_controller(self) -> None:
        """kill -9 of the controller; another counts from zero, under the same name."""
        self.last_event = "controller restarted"
        self.controller.end()
        self.controller = self._start("controller")
        self._set_live(self.live)
        self.replaced_at = time.monotonic()

    def pids(self) -> dict[str, int]:
        """Of each process in place, by its name and number."""
        kinds = ("sidecar", "controller", "schedulers")
        return {f"{kind} {self.counts[kind]}": getattr(self, kind).pid for kind in kinds}

    def usage(self) -> dict[str, Usage]:
        """Of each process in place."""
        found = {}
        for name, pid in self.pids().items():
            process = psutil.Process(pid)
            resident = round(process.memory_info().rss / 2**20, 2)
            found[name] = Usage(resident, process.num_fds(), process.num_threads())
        return found

    def check(self, at: float) -> Check:
        """Stop the requests, and see when the sidecar's load view is the truth.

        Twice: first the schedulers leave the last requests where they are, in flight.
        """
        self.schedulers.ask("hold")
        sent = self.controller.ask("pause")
        held = sum(rank["in_flight"] for rank in self.schedulers.ask("tell")["ranks"])
        wrong, _ = self._settled(sent)
        held_off = sum(abs(a - b) for what, a, b in wrong if what.endswith("in_flight"))
        self.schedulers.ask("release")
        wrong, waited = self._settled(sent)
        self.controller.ask("go")
        drift = sum(abs(theirs - ours) for _, theirs, ours in wrong)
        named = [f"{what}: {theirs}, in truth {ours}" for what, theirs, ours in wrong]
        return Check(round(at, 1), drift, held, held_off, round(waited, 3), self.last_event, named)

    def _settled(self, sent: list[int]) -> tuple[list[tuple[str, int, int]], float]:
        """What is wrong in the end, and the seconds until nothing was, or until it is too late."""
        begun = time.monotonic()
        while True:
            wrong = self._wrong(sent)
            waited = time.monotonic() - begun
            if not wrong or waited > SETTLED_WITHIN:
                return wrong, waited
            time.sleep(0.02)

    def _wrong(self, sent: list[int]) -> list[tuple[str, int, int]]:
        """What /status has otherwise than the processes have it: what, its value, the truth."""
        body = self.get("/status")
        if body is None:
            return [("/status", 0, 1)]
        told = json.loads(body)["instances"][0]["ranks"]
        known = {rank["rank"]: rank for rank in told if rank["live"]}
        wrong = [("live ranks", len(known), len(self.live))] if set(known) != self.live else []
        truth = self.schedulers.ask("tell")["ranks"]
        for rank in sorted(self.live & set(known)):
            scheduler, view = truth[rank], known[rank]
            load = scheduler["running"] + scheduler["in_flight"]
            wrong += [
                (f"rank {rank} {name}", view[name] or 0, ours)
                for name, ours in (
                    ("sent", sent[rank]),
                    ("received", scheduler["received"]),
                    ("running", scheduler["running"]),
                    ("in_flight", scheduler["in_flight"]),
                    ("load", load),
                )
                if view[name] != ours
            ]
        return wrong

    def close(self) -> None:
        """End everything."""
        self.sidecar.kill()
        self.sidecar.wait()
        self.controller.end()
        self.schedulers.end()
