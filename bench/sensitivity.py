"""Do the conclusions hold if the model's step times are wrong?

    python -m bench.sensitivity [--seeds 3] [--json]

MODEL, virtual time. Each row changes one parameter of the modelled server; each pair of columns is
an arm's TTFT mean and requests/s as ratios to round_robin's on the same seeds. A conclusion holds
if its side of 1 does not change. docs/results.md quotes the table.
"""

import argparse
import sys
from pathlib import Path

from bench import report
from bench.cells import Cell, server_from
from bench.plan import BASELINE, PR
from bench.ratios import ratios, run_all
from bench.statistics import Run
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
        row = {
            f"{workload} {arm}": _ratios(runs, variant, workload, arm, options.seeds)
            for workload in WORKLOADS
            for arm in ARMS[1:]
        }
        table[label] = row
        rows.append([label, *(f"{r[FIGURES[0]]:.2f} {r[FIGURES[1]]:.2f}" for r in row.values())])
    report.show({"model": True, "ratios_to": BASELINE, "table": table}, rows, as_json=options.json)
    return 0


Key = tuple[tuple[str, ...], str, str, int]


def _measure(options: argparse.Namespace) -> dict[Key, Run]:
    cells: dict[Key, Cell] = {
        (variant, workload, arm, seed): Cell(workload, arm, seed, server_from(variant))
        for variant in VARIANTS
        for workload in WORKLOADS
        for arm in ARMS
        for seed in range(options.seeds)
    }
    return run_all(cells, options.traces)


def _ratios(
    runs: dict[Key, Run], variant: tuple[str, ...], workload: str, arm: str, seeds: int
) -> dict[str, float]:
    """An arm / the baseline."""
    pairs = (
        (runs[variant, workload, arm, seed], runs[variant, workload, BASELINE, seed])
        for seed in range(seeds)
    )
    return ratios(pairs, FIGURES)


if __name__ == "__main__":
    sys.exit(main())
