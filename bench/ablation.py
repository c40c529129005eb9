"""What does each part of kv_affinity do, and does any parameter need tuning?

    python -m bench.ablation [--seeds 5] [--first-seed 0] [--half even] [--json]

MODEL, virtual time. Each row takes a part away, or halves or doubles a parameter; each cell is
requests/s, TTFT mean and reuse as ratios to the policy as shipped on the same seeds (geometric
means). Traces are halved: what is chosen on the even half is judged on the odd one.
docs/policies.md quotes the table.
"""

import argparse
import sys
from pathlib import Path

from bench import report
from bench.cells import Cell, server_from
from bench.ratios import ratios, run_all
from bench.statistics import Run
from bench.workloads import TRACES
from sidecar.policies.kv_affinity import KvAffinityParams

POLICY = "kv_affinity"
WORKLOADS = (
    "published-16x32",
    "published-64x8",
    "agentic",
    "agentic-trace-64:half={half}",
    "agentic-trace-128:half={half}",
    "mooncake:half={half}",
    "hot-key",
    "short-chats",
    "gsp",
)
PARTS = {
    "no balance of what ranks had to do lately": (":recent_weight=0", ()),
    "requests in queue and decode count nothing": (":request_tokens=0", ()),
    "no margin: always the least cost": (":move_tokens=0:move_ratio=1", ()),
    "absolute margin only": (":move_ratio=1", ()),
    "ratio only": (":move_tokens=0", ()),
    "no prefix index": (":block_tokens=65536", ()),
    "no figures of the cache from the engine": ("", ("cache_figures=false",)),
}
SCALED = (
    "move_tokens",
    "request_tokens",
    "recent_weight",
    "recent_seconds",
    "block_tokens",
)
FIGURES = ("req_per_s", "ttft_ms_mean", "reuse")


Key = tuple[str, str, int]
"""Row, workload, seed."""


def variants() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name of a row -> parameters of the arm, fields of the server."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {"as shipped": ("", ()), **PARTS}
    default = KvAffinityParams()
    for name in SCALED:
        for scale in (0.5, 2):
            value = getattr(default, name) * scale
            found[f"{name} {value:g}"] = (f":{name}={value:g}", ())
    for ratio in (1.5, 3):
        found[f"move_ratio {ratio:g}"] = (f":move_ratio={ratio:g}", ())
    return found


def main() -> int:
    parser = report.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--half", choices=("even", "odd"), default="even", help="of the traces")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR")
    options = parser.parse_args()
    workloads = [workload.format(half=options.half) for workload in WORKLOADS]
    runs = _measure(options, workloads)
    rows = [["req/s TTFT reuse", *workloads]]
    table = {}
    for name in variants():
        table[name] = {each: _ratios(runs, options, name, each) for each in workloads}
        cells = [" ".join(f"{v:.2f}" for v in each.values()) for each in table[name].values()]
        rows.append([name, *cells])
    report.show({"model": True, "ratios_to": POLICY, "table": table}, rows, as_json=options.json)
    return 0


def _measure(options: argparse.Namespace, workloads: list[str]) -> dict[Key, Run]:
    cells = {
        (name, workload, seed): Cell(workload, POLICY + arm, seed, server_from(server))
        for seed in _seeds(options)
        for workload in workloads
        for name, (arm, server) in variants().items()
    }
    return run_all(cells, options.traces)


def _seeds(options: argparse.Namespace) -> range:
    return range(options.first_seed, options.first_seed + options.seeds)


def _ratios(
    runs: dict[Key, Run], options: argparse.Namespace, name: str, workload: str
) -> dict[str, float]:
    """A row / as shipped."""
    pairs = (
        (runs[name, workload, seed], runs["as shipped", workload, seed]) for seed in _seeds(options)
    )
    return ratios(pairs, FIGURES)


if __name__ == "__main__":
    sys.exit(main())
