"""What do requests see while the policy is changed, again and again?

`python -m bench.swap [--seconds 6] [--rate 1000] [--json]` asks as the controller does, through the
hook's own Chooser and client with its deadline of 5 ms, with eight reporters beside it, while
another process changes the policies of the sidecar twice a second. Blocks of every kind of change
take turns with quiet ones in one run; the ratios are to those. `reload` imports a policy from
outside, which takes 300 ms, waiting or computing. To reach: no request without a rank, none on
another rank where every policy keeps sessions, and no more than a deadline of added latency.
"""

import contextlib
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import report
from bench.replace import DEADLINE_MS, Decision, Traffic, drive, moved
from bench.roundtrip import CLIENT_CORE, SERVER_CORE, pin
from sidecar.control import Control

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

EVERY = 0.5
"""Seconds between changes."""
ROUNDS = 2
QUIET = "no change"
OUTSIDE = """
import time

from sidecar.policies.kv_affinity import KvAffinity, KvAffinityParams

{wait}


class Slow(KvAffinity):
    name = "slow"
    Params = KvAffinityParams
"""
WAITING = "time.sleep(0.3)"
COMPUTING = "end = time.monotonic() + 0.3\nwhile time.monotonic() < end:\n    pass"


class Target(NamedTuple):
    """The sidecar whose policies are changed, and the folder of its settings."""

    folder: Path
    pid: int

    @property
    def control(self) -> Control:
        """Its control socket."""
        return Control(f"{self.folder}/q.control", timeout=30)

    def reload(self, wait: str, times: int) -> None:
        """Another state of the outside policy's file, and SIGHUP."""
        (self.folder / "slow.py").write_text(OUTSIDE.format(wait=wait) + "#" * times)
        (self.folder / "sidecar.toml").write_text('[policy]\nname = "slow:Slow"\n')
        os.kill(self.pid, signal.SIGHUP)

    def reset(self) -> None:
        """The default policy, nothing beside it."""
        (self.folder / "sidecar.toml").write_text("")
        self.control.reload()


def _params(target: Target, turn: int) -> None:
    target.control.set_policy("kv_affinity", {"move_tokens": 16_384 + turn})


def _policy(target: Target, turn: int) -> None:
    target.control.set_policy("kv_affinity" if turn % 2 else "prefix_affinity")


def _shadow(target: Target, turn: int) -> None:
    if turn % 2:
        target.control.shadow_off()
    else:
        target.control.set_shadow("round_robin")


def _canary(target: Target, turn: int) -> None:
    if turn % 2:
        target.control.canary_off()
    else:
        target.control.set_canary("kv_affinity", 0.5, {"move_ratio": 3})


def _waiting(target: Target, turn: int) -> None:
    target.reload(WAITING, turn)


def _computing(target: Target, turn: int) -> None:
    target.reload(COMPUTING, turn)


CHANGES: dict[str, Callable[[Target, int], None]] = {
    "other parameters": _params,
    "another policy": _policy,
    "shadow on, off": _shadow,
    "canary on, off": _canary,
    "reload, import waits": _waiting,
    "reload, import computes": _computing,
}


def change(target: Target, kind: str, until: float) -> None:
    """Make changes of one kind until then (monotonic seconds), and undo them."""
    turn, due = 0, time.monotonic() + EVERY / 2
    while due < until and kind != QUIET:
        time.sleep(max(0.0, due - time.monotonic()))
        CHANGES[kind](target, turn)
        turn, due = turn + 1, due + EVERY
    time.sleep(max(0.0, until - time.monotonic()))
    if kind != QUIET:
        target.reset()


def changer(target: Target, orders: "Connection") -> None:
    """In a process of its own: make the changes that are asked for; each answered when undone."""
    while True:
        change(target, *orders.recv())
        orders.send(None)


@contextlib.contextmanager
def changing(target: Target) -> Iterator["Connection"]:
    """A process that changes policies while the context lasts; up when it begins."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=changer, args=(target, theirs), daemon=True)
    process.start()
    ours.send((QUIET, 0.0))
    ours.recv()
    try:
        yield ours
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Target]:
    """A sidecar process with a configuration to change."""
    (folder / "sidecar.toml").write_text("")
    command = [sys.executable, "-m", "sidecar", "serve", f"--endpoint=ipc://{folder}/q"]
    command += [f"--config={folder}/sidecar.toml", "--admin-port=0", "--log-level=warning"]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    pin(SERVER_CORE)
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    pin(CLIENT_CORE)
    with child:
        try:
            yield Target(folder, child.pid)
        finally:
            child.terminate()


def block(
    traffic: Traffic, orders: "Connection", kind: str, seconds: float, rate: float
) -> list[Decision]:
    """Decisions of one block of traffic, while changes of that kind are made and undone."""
    first, until = len(traffic.decisions), time.monotonic() + seconds
    orders.send((kind, until))
    drive(traffic, rate, until)
    while not orders.poll():
        drive(traffic, rate, time.monotonic() + 0.1)
    orders.recv()
    drive(traffic, rate, time.monotonic() + 0.5)  # what the undoing costs counts too
    return traffic.decisions[first:]


def figures(blocks: list[list[Decision]]) -> dict[str, float]:
    """Of all decisions of one kind."""
    decisions = list(chain.from_iterable(blocks))
    times = [decision.seconds * 1e6 for decision in decisions]
    return {
        "requests": len(decisions),
        "failed": sum(decision.rank is None for decision in decisions),
        "moved": sum(moved(part) for part in blocks),
        "decided_alone": sum(decision.boot is None for decision in decisions),
        "late": sum(us > DEADLINE_MS * 1000 for us in times),
        "p50_us": round(median(times), 1),
        "p99_us": round(quantiles(times, n=100)[98], 1),
        "max_us": round(max(times), 1),
    }


def run(seconds: float, rate: float) -> dict[str, Any]:
    """Every kind, in blocks that take turns with quiet ones."""
    found: dict[str, list[list[Decision]]] = {kind: [] for kind in (QUIET, *CHANGES)}
    with (
        tempfile.TemporaryDirectory(prefix="dps-") as name,
        serving(Path(name)) as target,
        changing(target) as orders,
    ):
        traffic = Traffic(f"ipc://{name}/q")
        traffic.meet()
        drive(traffic, rate, time.monotonic() + 1)
        for _ in range(ROUNDS):
            for kind in CHANGES:
                for one in (QUIET, kind):
                    found[one].append(block(traffic, orders, one, seconds / ROUNDS, rate))
        traffic.close()
    result = {kind: figures(blocks) for kind, blocks in found.items()}
    for row in result.values():
        for name in ("p50", "p99", "max"):
            row[f"{name}_ratio"] = round(row[f"{name}_us"] / result[QUIET][f"{name}_us"], 2)
    return result


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each kind of change")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    options = parser.parse_args()
    result = run(options.seconds, options.rate)
    names = list(result[QUIET])
    rows = [["", *names]]
    rows += [[kind, *(f"{row[name]:g}" for name in names)] for kind, row in result.items()]
    report.show(result, rows, as_json=options.json)


if __name__ == "__main__":
    main()
