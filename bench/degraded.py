"""What is left of kv_affinity where its facts are late or missing, on one rank and on 320?

    python -m bench.degraded [--seeds 5] [--workload NAME ...] [--json]

MODEL, virtual time. TTFT mean and requests/s of kv_affinity with load reports 1 s and 10 s late,
with none at all and without routing keys, as ratios with 95 % intervals, paired by seed: to itself
undisturbed and to round_robin, which one rank must equal. 320 ranks are filled by a workload of
their own.
"""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
from tqdm import tqdm

from bench import report
from bench.arms import Arm, make_arm
from bench.cells import server_from
from bench.model.cluster import Cluster
from bench.model.server import Chooser, Placement
from bench.model.simulate import simulate
from bench.statistics import METRICS, Run, paired
from bench.workloads import TRACES, Call, make_workload

POLICY, BASELINE = "kv_affinity", "round_robin"
WORKLOADS = (
    *("published-16x32", "agentic", "agentic-trace-64:sessions=120", "hot-key"),
    *("short-chats", "mooncake:requests=2000", "random"),
)
WIDE = "short-chats:chats=1280:turns=4:concurrency=1280"
FIGURES = ("ttft_ms_mean", "req_per_s")


class Setting(NamedTuple):
    """One run less its seed."""

    workload: str
    arm: str = POLICY
    server: tuple[str, ...] = ()
    keys: bool = True


CONDITIONS = {
    "undisturbed": Setting(""),
    "reports 1 s late": Setting("", server=("report_delay_seconds=1",)),
    "reports 10 s late": Setting("", server=("report_delay_seconds=10",)),
    # Later than any of these workloads ends.
    "no reports": Setting("", server=("report_delay_seconds=3600",)),
    "no keys": Setting("", keys=False),
}
Ratios = dict[str, list[float | None]]
"""Name of FIGURES -> ratio, and the bounds of its interval."""
Table = dict[tuple[str, str, str], tuple[Setting, Setting]]
"""Workload, condition, reference -> what is compared with what."""


class _Keyless:
    """A chooser that is not told the routing keys."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def choose(self, call: Call, now: float) -> Placement:
        return self._chooser.choose(msgspec.structs.replace(call, key=""), now)


def without_keys(arm: Arm) -> Arm:
    def make(cluster: Cluster) -> Chooser:
        return _Keyless(arm.make(cluster))

    return msgspec.structs.replace(arm, make=make)


def run(setting: Setting, seed: int, traces: Path) -> Run:
    arm, workload = make_arm(setting.arm), make_workload(setting.workload, traces)
    server = server_from(setting.server)
    return Run.of(simulate(workload, arm if setting.keys else without_keys(arm), seed, server))


def plan(workloads: Sequence[str], wide: str) -> Table:
    """Every comparison."""
    table: Table = {}
    for workload in workloads:
        plain, basis = Setting(workload), Setting(workload, BASELINE)
        for name, condition in CONDITIONS.items():
            changed = condition._replace(workload=workload)
            if changed != plain:
                table[workload, name, "undisturbed"] = (changed, plain)
            table[workload, name, BASELINE] = (changed, basis)
        alone = ("ranks=1",)
        one = (plain._replace(server=alone), basis._replace(server=alone))
        table[workload, "one rank", BASELINE] = one
    for arm in (BASELINE, "least_waiting_uncached") if wide else ():
        many = Setting(wide, server=("ranks=320",))
        table[wide, "320 ranks", arm] = (many, many._replace(arm=arm))
    return table


def measure(
    table: Table, seeds: int, traces: Path, jobs: int
) -> dict[tuple[str, str, str], Ratios]:
    """Run every setting once a seed, and compare."""
    settings = sorted({setting for pair in table.values() for setting in pair})
    cells = [(setting, seed, traces) for setting in settings for seed in range(seeds)]
    with ProcessPoolExecutor(jobs) as pool:
        runs = pool.map(run, *zip(*cells, strict=True))
        done: dict[Setting, list[Run]] = {setting: [] for setting in settings}
        for (setting, _, _), each in zip(cells, tqdm(runs, total=len(cells)), strict=True):
            done[setting].append(each)
    return {name: compare(done[a], done[b]) for name, (a, b) in table.items()}


def compare(a: Sequence[Run], b: Sequence[Run]) -> Ratios:
    ratios: Ratios = {}
    for metric in (metric for metric in METRICS if metric.name in FIGURES):
        pairs = [(metric.of(x.summary), metric.of(y.summary)) for x, y in zip(a, b, strict=True)]
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        found = paired([x for x, _ in known], [y for _, y in known])
        bounds = (found.ratio, found.ratio_low, found.ratio_high)
        ratios[metric.name] = [None if bound is None else round(bound, 4) for bound in bounds]
    return ratios


def cell(ratio: float | None, low: float | None, high: float | None) -> str:
    bounds = "" if low is None or high is None else f" [{low:.2f} {high:.2f}]"
    return ("?" if ratio is None else f"{ratio:.2f}") + bounds


def main() -> int:
    parser = report.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--workload", action="append", metavar="NAME")
    parser.add_argument("--wide", default=WIDE, metavar="NAME", help="of 320 ranks; empty: none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR")
    options = parser.parse_args()
    table = plan(options.workload or WORKLOADS, options.wide)
    found = measure(table, options.seeds, options.traces, options.jobs)
    rows = [["workload", "", "compared with", *FIGURES]]
    rows += [[*name, *(cell(*ratios[key]) for key in FIGURES)] for name, ratios in found.items()]
    result = [{"of": name, "ratios": ratios} for name, ratios in found.items()]
    report.show({"model": True, "policy": POLICY, "table": result}, rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
