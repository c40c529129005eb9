"""What `make bench` measures on a real SGLang server: a target, one it starts, simulated ranks.

The default run has a small agentic workload on simulated ranks: in the model's virtual time the
same arms serve the same seeds, so that the two drivers can be compared with each other.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.live.ab import STOCK, policy_of, run_live
from bench.live.cells import Options
from bench.live.launch import SIMULATED, Launch, check_arm, run_model
from bench.live.target import find_control
from bench.outcome import Outcome
from bench.plan import BASELINE
from bench.workloads import make_workload
from sidecar.control import Control

SWITCHED = f"sidecar_{BASELINE}"
"""SGLang's baseline as the sidecar does it: a running server can be switched to it."""
ARMS = (SWITCHED, "prefix_affinity", "kv_affinity")
"""Arms of one warm server."""
TWIN = "agentic:sessions=16:turns=5:think=1"
"""Small enough for simulated ranks in real time, where eleven processes share two cores."""
TWIN_SEEDS = 2
TARGET_WORKLOADS = ("published-16x32", "agentic")
TARGET_SEEDS, TARGET_REPEATS = 3, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of a run on a server."""
    add = parser.add_argument
    add("--target", metavar="URL", help="a running server with the hook")
    add("--model", metavar="PATH", help="start a server of this model, or `simulated`")
    add("--arm", action="append", metavar="NAME", help="with --target or --model: only these")
    add("--repeats", type=int, default=TARGET_REPEATS, help="runs of each arm and key set")
    add("--endpoint", metavar="ipc://PATH", default="", help="with --target: the sidecar's socket")
    add("--control", metavar="PATH", default="", help="its control socket (default: by endpoint)")
    add("--admin", metavar="URL", default="http://127.0.0.1:9477", help="its /status")
    add("--ranks", type=int, default=8, help="with --model: DP ranks")
    add("--server-arg", action="append", default=[], help="with --model: argument of the server")


def workloads(options: argparse.Namespace) -> list[str]:
    """Those of a run on a target or model; for simulated ranks the small one."""
    default = (TWIN,) if options.model == SIMULATED else TARGET_WORKLOADS
    return list(options.workload or default)


def measure(options: argparse.Namespace) -> Iterator[Outcome]:
    """Arms at the target, or on servers of the model; an outcome as soon as it is there.

    Raises ArmError, WorkloadError, ControlError, TargetError, DriveError or ServerDied.
    """
    seeds = range(options.seeds or TARGET_SEEDS)
    arms = options.arm or ((*ARMS, *STOCK) if options.model else (*ARMS, "sidecar_total_tokens"))
    for arm in arms:
        (policy_of if options.target else check_arm)(arm)
    made = [make_workload(spec, options.traces) for spec in workloads(options)]
    if options.target:
        path = find_control(options.endpoint, options.control)
    for workload in made:
        if options.target:
            target, admin = options.target.rstrip("/"), options.admin.rstrip("/")
            yield from run_live(
                target, Control(path), admin, workload, arms, seeds, options.repeats
            )
        else:
            launch = Launch(
                model=options.model, ranks=options.ranks, arguments=tuple(options.server_arg)
            )
            yield from run_model(launch, workload, arms, seeds, options.repeats)


def twin(traces: Path, arms: Sequence[str] = ARMS) -> Iterator[Outcome]:
    """The small agentic workload on the real server with simulated ranks in real time."""
    launch = Launch(model=SIMULATED)
    workload = make_workload(TWIN, traces)
    for outcome in run_model(launch, workload, arms, range(TWIN_SEEDS), 1, Options()):
        outcome.workload = TWIN
        yield outcome
