"""What does a request wait for when the sidecar is killed or stopped?

`python -m bench.outage [--json]` asks as the controller does, 200 requests a second, through the
hook's own Chooser and client: while the sidecar answers, after SIGSTOP, after kill -9, and with
none there from the start, which is the reference. To reach: one request waits one deadline (5 ms)
after the fault, the others cost what they cost without a sidecar.
"""

import os
import signal
import tempfile
import time
from array import array
from pathlib import Path
from statistics import median
from typing import Any

from bench import report
from bench.roundtrip import sidecar
from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser, Dispatch

DEADLINE_MS = 5
REQUESTS = 200
PER_SECOND = 200
PROMPT = array("q", range(4096))


def make_chooser(endpoint: str) -> tuple[Chooser, SidecarClient]:
    """The hook as the controller has it."""
    chooser = Chooser("bench", time.time_ns(), {}, lambda: list(range(8)), 1 << 17)
    client = SidecarClient(endpoint, DEADLINE_MS, 1, 0.05, chooser.probe)
    client.heard, chooser.ask = chooser.heard, client.ask
    client.greet()
    return chooser, client


def latencies(chooser: Chooser) -> dict[str, Any]:
    """Microseconds of each of REQUESTS decisions."""
    times = []
    before = chooser.bypassed.total()
    for i in range(REQUESTS):
        begun = time.perf_counter_ns()
        rank = chooser.choose_one(Dispatch(f"session-{i % 50}", PROMPT, (None, None, None)))
        times.append((time.perf_counter_ns() - begun) / 1000)
        chooser.sent.count(rank or 0, len(PROMPT))
        time.sleep(1 / PER_SECOND)
    times, first = sorted(times), max(times[:3])
    return {
        "p50_us": round(median(times), 1),
        "p99_us": round(times[int(len(times) * 0.99) - 1], 1),
        "max_us": round(times[-1], 1),
        "worst_of_first_3_us": round(first, 1),
        "over_half_a_deadline": sum(t > DEADLINE_MS * 500 for t in times),
        "bypassed": chooser.bypassed.total() - before,
    }


def run() -> dict[str, Any]:
    """All four situations."""
    result = {}
    with tempfile.TemporaryDirectory(prefix="dps-") as folder:
        endpoint = f"ipc://{Path(folder, 'q')}"
        with sidecar(endpoint, 0) as pid:
            chooser, client = make_chooser(endpoint)
            while client.standing():  # until it answers
                client.greet()
            result["answering"] = latencies(chooser)
            os.kill(pid, signal.SIGSTOP)
            result["stopped"] = latencies(chooser)
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)
            result["killed"] = latencies(chooser)
            client.close()
        chooser, client = make_chooser(endpoint)
        result["never there"] = latencies(chooser)
        client.close()
    return result


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    result = run()
    names = list(next(iter(result.values())))
    rows = [["", *names]]
    rows += [[kind, *(str(figures[name]) for name in names)] for kind, figures in result.items()]
    report.show(result, rows, as_json=options.json)


if __name__ == "__main__":
    main()
