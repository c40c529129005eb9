"""The main job, shown: a real SGLang server with simulated ranks, without and with the sidecar.

`make demo` (`python -m bench.demo [--json FILE]`). 8 DP ranks with DP attention; sessions that
share one long system prompt, a routing key each, several turns. First SGLang's own round robin,
then the sidecar, then the sidecar is killed under load and started again. Times to first token are
of SIMULATED ranks on this machine: they say how the arms differ, not how fast a GPU is.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import report
from bench.client import Row, Sessions, read_journal, summarize
from bench.simulated.launch import SimulatedServer, free_port
from sidecar.config import PolicyConfig

SESSIONS, TURNS, OUTAGE_TURNS = 24, 6, 8
SYSTEM_WORDS, TURN_WORDS, MAX_TOKENS = 2500, 250, 12
POLICY = PolicyConfig().name
SPILLS = ("spill", "token_spill", "prefix_spill", "stale_skip", "token_stale_skip")
_begun = time.monotonic()


def say(text: str) -> None:
    """A line of progress with the time since the start."""
    print(f"[{time.monotonic() - _begun:5.0f} s] {text}", flush=True)


class Progress:
    """Says how many requests are done, every two seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.failed, self._next = total, 0, 0, 0.0

    def __call__(self, row: Row) -> None:
        self.done += 1
        self.failed += bool(row.error)
        now = time.monotonic()
        if now >= self._next or self.done == self.total:
            self._next = now + 2
            say(f"  {self.done}/{self.total} requests, {self.failed} failed")


class Sidecar:
    """A sidecar process that can be killed and started again."""

    def __init__(self, folder: Path, policy: str = POLICY) -> None:
        self.policy = policy
        self.endpoint, self.port = f"ipc://{folder / 'query.sock'}", free_port()
        self.log = (folder / "sidecar.log").open("ab")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "sidecar", "serve", f"--endpoint={self.endpoint}"]
        command += [f"--admin-port={self.port}", f"--policy={self.policy}"]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        self.log.close()

    def status(self) -> dict[str, Any] | None:
        """The instance's part of /status; None while the sidecar or the instance is away."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status", timeout=5) as body:
                found: list[dict[str, Any]] = json.load(body)["instances"]
                return found[0] if found else None
        except OSError:
            return None

    def decisions(self) -> dict[str, int]:
        """Reason -> requests, all policies together."""
        reasons: dict[str, int] = {}
        for counts in ((self.status() or {}).get("decisions") or {}).values():
            for reason, count in counts.items():
                reasons[reason] = reasons.get(reason, 0) + count
        return reasons


@contextlib.contextmanager
def serving(folder: Path, name: str, env: dict[str, str]) -> Iterator[tuple[SimulatedServer, Path]]:
    """A ready server and its journal."""
    journal = folder / f"{name}.journal"
    log = folder / f"{name}.log"
    say("starting the SGLang server: 8 DP ranks, DP attention, simulated schedulers ...")
    env = {"SIMULATED_JOURNAL": str(journal), **env}
    with SimulatedServer(dp_size=8, env=env, log_path=log) as server:
        last = [0.0]

        def waiting(elapsed: float) -> None:
            if elapsed - last[0] >= 10:
                last[0] = elapsed
                say("  still starting (every process imports SGLang)")

        server.wait_ready(180, waiting)
        say("  ready")
        yield server, journal
        say("stopping the server")


def new_sessions(server: SimulatedServer) -> Sessions:
    return Sessions(server.base_url, SESSIONS, SYSTEM_WORDS, TURN_WORDS, MAX_TOKENS)


async def stock_arm(folder: Path) -> dict[str, Any]:
    with serving(folder, "stock", {}) as (server, journal):
        say("arm 1: SGLang's round_robin")
        sessions = new_sessions(server)
        rows = await sessions.run(TURNS, Progress(SESSIONS * TURNS))
        await sessions.close()
        arm = summarize(rows, read_journal(journal))
    return {"name": "round_robin (stock)", **arm, "spills": 0, "fallbacks": 0}


async def sidecar_arm(folder: Path, sidecar: Sidecar) -> tuple[dict[str, Any], dict[str, Any]]:
    sidecar.start()
    env = {"DP_SIDECAR_ENDPOINT": sidecar.endpoint}
    with serving(folder, "sidecar", env) as (server, journal):
        say(f"arm 2: the sidecar's {POLICY}")
        sessions = new_sessions(server)
        rows = await sessions.run(TURNS, Progress(SESSIONS * TURNS))
        arm = summarize(rows, read_journal(journal))
        reasons = sidecar.decisions()
        arm |= {
            "name": f"{POLICY} (sidecar)",
            "spills": sum(reasons.get(reason, 0) for reason in SPILLS),
            "fallbacks": reasons.get("fallback", 0),
        }
        outage = await kill_and_restart(sidecar, sessions, rows, journal)
        await sessions.close()
    return arm, outage


async def kill_and_restart(
    sidecar: Sidecar, sessions: Sessions, before: list[Row], journal: Path
) -> dict[str, Any]:
    """Kill the sidecar under load, start it again while the load goes on.

    before: rows of the arm that ran first; where each session was then is its home.
    """
    total = SESSIONS * OUTAGE_TURNS
    progress = Progress(total)
    load = asyncio.create_task(sessions.run(OUTAGE_TURNS, progress))
    await until(lambda: progress.done >= total // 4 or load.done())
    say("kill -9 of the sidecar")
    sidecar.kill()
    await until(lambda: progress.done >= total // 2 or load.done())
    say("starting the sidecar again")
    begun = time.monotonic()
    sidecar.start()
    first = None
    while not load.done():
        if first is None and sidecar.decisions():
            first = round(time.monotonic() - begun, 2)
            say(f"  it decided again {first} s after its process was started")
        await asyncio.sleep(0.02)
    rows = await load
    bypassed = (sidecar.status() or {}).get("bypassed", {})
    ranks = read_journal(journal)
    homes = {row.session: ranks[row.request_id] for row in before if not row.error}
    good = [row for row in rows if not row.error]
    moved = {row.session for row in good if ranks[row.request_id] != homes[row.session]}
    return {
        "requests": len(rows),
        "failed": sum(bool(row.error) for row in rows),
        "moved_sessions": len(moved),
        "bypassed": sum(bypassed.values()),
        "bypassed_by_cause": bypassed,
        "seconds_to_first_remote_decision": first,
    }


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def table(arms: list[dict[str, Any]]) -> list[list[str]]:
    """The arms as rows, the header first."""

    def row(arm: dict[str, Any]) -> list[str]:
        return [
            arm["name"],
            str(arm["requests"]),
            str(arm["failed"]),
            f"<= {arm['max_ranks_per_session']}",
            f"{arm['cached_token_share']:.1%}",
            str(arm["spills"]),
            str(arm["fallbacks"]),
            f"{arm['ttft_ms']['p50']:.0f}",
            f"{arm['ttft_ms']['p99']:.0f}",
        ]

    head = ["", "requests", "failed", "ranks a session", "cached tokens", "spills", "fallbacks"]
    return [[*head, "TTFT p50 ms*", "TTFT p99 ms*"], *map(row, arms)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the result to FILE")
    options = parser.parse_args()
    os.environ.pop("DP_SIDECAR_ENDPOINT", None)
    with tempfile.TemporaryDirectory(prefix="dps-demo-") as name:
        folder = Path(name)
        sidecar = Sidecar(folder)
        try:
            stock = asyncio.run(stock_arm(folder))
            ours, outage = asyncio.run(sidecar_arm(folder, sidecar))
        finally:
            sidecar.stop()
    result = {"arms": [stock, ours], "outage": outage, "simulated": True}
    print()
    report.show(result, table([stock, ours]), as_json=False)
    print("* simulated ranks: real HTTP, tokenizer, controller and hook; no model, no GPU")
    print(
        f"outage: {outage['requests']} requests, {outage['failed']} failed, "
        f"{outage['moved_sessions']} sessions moved, {outage['bypassed']} decided by the hook "
        f"alone, first remote decision {outage['seconds_to_first_remote_decision']} s after the "
        "start of the new process"
    )
    if options.json:
        Path(options.json).write_text(
            json.dumps({"machine": report.machine(), **result}, indent=1), encoding="utf-8"
        )
    failed = stock["failed"] + ours["failed"] + outage["failed"]
    return 1 if failed or outage["moved_sessions"] else 0


if __name__ == "__main__":
    sys.exit(main())
