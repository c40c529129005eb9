"""Do the conclusions hold if the model's step times are wrong?

    python -m bench.sensitivity [--seeds 3] [--json]

MODEL, virtual time. Each row changes one parameter of the modelled server; each pair of columns is
an arm's TTFT mean and requests/s as ratios to round_robin's on the same seeds. A conclusion holds
if its side of 1 does not change. docs/results.md quotes the table.
"""

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from bench import report
from bench.cells import Cell, Store, code_digest, run_cells, server_from
from bench.plan import BASELINE, PR
from bench.statistics import METRICS, Run
from bench.workloads import TRACES

ARMS = (BASELINE, PR, "prefix_affinity", "least_waiting_uncached")
WORKLOADS = ("published-16x32", "agentic", "agentic-trace-64:sessions=120", "short-chats")
VARIANTS = (
    (),
    ("steps.prefill_scale=0.5",),
    ("steps.prefill_scale=2",),
    ("steps.decode_scale=0.5",),
    ("steps.decode_scale=2",),
    ("steps.shared=0.3",),
    ("steps.shared=0.9",),
    ("steps.context_ns=6",),
    ("steps.context_ns=24",),
    ("steps.overhead_ms=10",),
    ("rank.cache_tokens=524288",),
    ("rank.cache_tokens=2097152",),
    ("rank.chunk_tokens=512",),
    ("rank.chunk_tokens=2048",),
    ("steps.table=Qwen3.5-122B-A10B-FP8-ep@h100",),
    ("steps.table=DeepSeek-V3@h200",),
    ("lockstep=false",),
)
FIGURES = ("ttft_ms_mean", "req_per_s")


def main() -> int:
    parser = report.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR")
    options = parser.parse_args()
    runs = _measure(options)
    rows = [["", *(f"{workload} {arm}" for workload in WORKLOADS for arm in ARMS[1:])]]
    table: dict[str, dict[str, dict[str, float]]] = {}
    for variant in VARIANTS:
        label = " ".join(variant) or "as shipped"
        ratios = {
            f"{workload} {arm}": _ratios(runs, variant, workload, arm, options.seeds)
            for workload in WORKLOADS
            for arm in ARMS[1:]
        }
        table[label] = ratios
        rows.append([label, *(f"{r[FIGURES[0]]:.2f} {r[FIGURES[1]]:.2f}" for r in ratios.values())])
    report.show({"model": True, "ratios_to": BASELINE, "table": table}, rows, as_json=options.json)
    return 0


Key = tuple[tuple[str, ...], str, str, int]


def _measure(options: argparse.Namespace) -> dict[Key, Run]:
    cells = {
        (variant, workload, arm, seed): Cell(workload, arm, seed, server_from(variant))
        for variant in VARIANTS
        for workload in WORKLOADS
        for arm in ARMS
        for seed in range(options.seeds)
    }
    with tempfile.TemporaryDirectory(prefix="dps-sensitivity-") as folder:
        store = Store(Path(folder), code_digest(Path(__file__).resolve().parents[1]))
        done = run_cells(list(cells.values()), options.traces, store, os.cpu_count() or 1)
        for _ in tqdm(done, total=len(cells), desc="virtual time"):
            pass
        return {key: Run.of(store.load(cell)) for key, cell in cells.items()}


def _ratios(
    runs: dict[Key, Run], variant: tuple[str, ...], workload: str, arm: str, seeds: int
) -> dict[str, float]:
    """Geometric means over seeds of arm / baseline."""
    ratios = {}
    for metric in METRICS:
        if metric.name in FIGURES:
            logs = 0.0
            for seed in range(seeds):
                mine = metric.of(runs[variant, workload, arm, seed].summary)
                base = metric.of(runs[variant, workload, BASELINE, seed].summary)
                logs += math.log((mine or math.nan) / (base or math.nan))
            ratios[metric.name] = round(math.exp(logs / seeds), 4)
    return ratios


if __name__ == "__main__":
    sys.exit(main())
