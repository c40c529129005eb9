"""What does the hook cost the controller per request, the wait excluded? 4,096-token prompts.

`python -m bench.hook [--json]` runs SGLang's real DataParallelController against a real sidecar
process: median CPU time of the controller's thread in a dispatch, less that inside the blocking
receive, with the hook less without it. The ranks' sockets are stand-ins that take and forget: what
SGLang itself spends on a request is not measured. Also the cost of a scheduler step. To reach:
25 us a request, 20 us a step.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import zmq

from bench import report
from bench.roundtrip import sidecar
from bench.stock import make_controller, make_request

RANKS = 8
REQUESTS = 1500
REPEATS = 7
PROMPT_TOKENS = 4096
STEPS = 20_000
RUNNING = 64


class Forgetful:
    """Stands for a rank's socket."""

    def send_pyobj(self, obj: Any, flags: int = 0, protocol: int = 0) -> None:
        """Take a request."""


class TimedSocket(zmq.Socket):  # type: ignore[type-arg]
    """The client's socket; knows what waiting for answers cost."""

    waited = 0

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        begun = time.thread_time_ns()
        try:
            return super().recv(*args, **kwargs)
        finally:
            TimedSocket.waited += time.thread_time_ns() - begun


class TimedContext(zmq.Context):  # type: ignore[type-arg]
    _socket_class = TimedSocket


def median_us(dispatch: Callable[[Any], Any], keys: list[str | None]) -> float:
    """Median CPU microseconds of a dispatch, the wait excluded."""
    times = []
    for i, key in enumerate(keys):
        # Made just before, as SGLang's controller has just unpickled it.
        request = make_request(f"bench-{i}", range(i, i + PROMPT_TOKENS), key)
        TimedSocket.waited = 0
        begun = time.thread_time_ns()
        dispatch(request)
        times.append(time.thread_time_ns() - begun - TimedSocket.waited)
    return median(times) / 1000


def request_costs(endpoint: str) -> dict[str, list[float]]:
    """Added microseconds per request, for each repeat: with a routing key and without."""
    from sglang.srt.managers import data_parallel_controller as module

    from sglang_hook import patches
    from sglang_hook.controller_seam import ControllerSeam
    from sglang_hook.sending import LISTENERS
    from sglang_hook.settings import Settings

    costs: dict[str, list[float]] = {"keyed": [], "keyless": []}
    made = make_controller([Forgetful() for _ in range(RANKS)])
    stock = made.dispatching
    patches._attach_controller(module)
    seam = ControllerSeam(made, Settings(endpoint=endpoint, deadline_ms=1000))
    seam.client._peer._context, seam.client._peer._pid = TimedContext(), os.getpid()
    seam.attach()
    for repeat in range(REPEATS + 1):
        for kind, added in costs.items():
            keys = [f"session-{i}" if kind == "keyed" else None for i in range(REQUESTS)]
            LISTENERS.clear()
            without = median_us(stock, keys)
            LISTENERS[:] = [seam.sent]
            with_hook = median_us(made.dispatching, keys)
            if repeat:  # the first warms up
                added.append(with_hook - without)
    if seam.chooser.bypassed:
        raise SystemExit(f"the sidecar did not answer: {dict(seam.chooser.bypassed)}")
    seam.client.close()
    LISTENERS.clear()
    return costs


def step_cost(endpoint: str) -> float:
    """Mean CPU microseconds that reporting adds to a scheduler step whose queues change."""
    from sglang_hook.scheduler_seam import SchedulerSeam
    from sglang_hook.settings import Settings

    reqs = [SimpleNamespace(finished=lambda: False) for _ in range(RUNNING)]
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(port=1),
        load_snapshot_writer=SimpleNamespace(dp_rank=0, write=lambda snapshot: None),
        waiting_queue=[],
        running_batch=SimpleNamespace(reqs=reqs),
        last_batch=None,
        chunked_req=None,
    )
    seam = SchedulerSeam(scheduler, Settings(endpoint=endpoint))
    spent = 0
    for step in range(STEPS):
        scheduler.waiting_queue = [None] * (step % 3)
        begun = time.thread_time_ns()
        seam.step([])
        spent += time.thread_time_ns() - begun
    seam.reporter.close()
    return spent / STEPS / 1000


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="dps-") as folder:
        endpoint = f"ipc://{Path(folder, 'q')}"
        with sidecar(endpoint, 0):
            costs = {kind: report.spread(us) for kind, us in request_costs(endpoint).items()}
            step = step_cost(endpoint)
    rows = [["request", "min us", "median us", "max us"]]
    for kind, cost in costs.items():
        rows.append([kind, *(f"{cost[k]:.1f}" for k in ("min", "median", "max"))])
    result = {
        "us_per_request": max(cost["median"] for cost in costs.values()),
        "spread": costs,
        "us_per_scheduler_step": round(step, 2),
    }
    report.show(result, rows, as_json=options.json)
    if not options.json:
        print(f"scheduler step: {step:.2f} us")


if __name__ == "__main__":
    main()
