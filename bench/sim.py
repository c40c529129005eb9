"""Arms on a workload in virtual time, for scripts.

    python -m bench.sim --workload agentic --arm round_robin --arm prefix_affinity --seeds 5 --json

Every figure is of the MODEL (docs/results.md says how far to trust it). Equal arguments print equal
bytes. Differences are arm minus baseline, paired by seed, with 95% intervals.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from bench.arms import ARMS
from bench.cells import Cell, run_cell, server_from
from bench.html.text import text_table
from bench.outcome import Outcome, summarize
from bench.statistics import Run, compare_runs
from bench.workloads import REGISTRY, TRACES, WorkloadError


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"workloads: {', '.join(REGISTRY)}\narms: {', '.join(ARMS)}\n"
        "both take parameters: name:param=value:...",
    )
    add = parser.add_argument
    add("--workload", required=True, metavar="NAME")
    add("--arm", required=True, action="append", metavar="NAME", help="may be given again")
    add("--baseline", metavar="NAME", help="arm to compare with (default: the first)")
    add("--seeds", type=int, default=3, metavar="N", help="how many seeds (default: 3)")
    add("--first-seed", type=int, default=0, metavar="N", help="seeds from N on (default: 0)")
    add("--server", action="append", default=[], metavar="FIELD=VALUE",
        help="of the modelled server: ranks, lockstep, rank.cache_tokens, steps.table, "
        "steps.shared, steps.prefill_scale, ...")  # fmt: skip
    add("--traces", type=Path, default=TRACES, metavar="DIR")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def entry(outcome: Outcome) -> dict[str, Any]:
    """Figures of one run; tpot_ms is its mean over requests."""
    summary = summarize(outcome)
    spread = summary.pop("tpot_ms")
    summary["tpot_ms"] = spread and spread["mean"]
    return {"arm": outcome.arm, "seed": outcome.seed, **summary}


def main() -> int:
    options = arguments().parse_args()
    baseline = options.baseline or options.arm[0]
    try:
        if options.seeds < 1:
            raise ValueError(f"seeds: {options.seeds} is less than 1")
        if baseline not in options.arm:
            raise ValueError(f"baseline: {baseline!r} is none of the arms")
        server = server_from(options.server)
        outcomes = []
        for arm in dict.fromkeys(options.arm):
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                begun = time.monotonic()
                cell = Cell(options.workload, arm, seed, server)
                outcomes.append(run_cell(cell, options.traces))
                spent = time.monotonic() - begun
                print(f"{arm} seed {seed}: {len(outcomes[-1].rows)} requests in {spent:.1f} s",
                      file=sys.stderr)  # fmt: skip
    except (WorkloadError, ValueError) as error:
        print(f"bench.sim: {error}", file=sys.stderr)
        return 2
    comparisons = compare_runs([Run.of(outcome) for outcome in outcomes], baseline)
    if options.json:
        result = {
            "kind": "model in virtual time",
            "workload": options.workload,
            "server": server,
            "baseline": baseline,
            "runs": [entry(outcome) for outcome in outcomes],
            "comparisons": comparisons,
        }
        print(msgspec.json.encode(result).decode())
    else:
        print("MODEL, virtual time")
        print(text_table(comparisons))
    return 0


if __name__ == "__main__":
    sys.exit(main())
