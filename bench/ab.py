"""`make bench`: the A/B, and its report in bench/out/<time>/.

Without arguments: every workload at one setting, the main arms, in virtual time (MODEL), then the
agentic workload on the real server with simulated ranks. `--full` (FULL=1) runs every arm, every
setting and the sweep of the guard, and goes on where an interrupted run stopped. `--target`
(TARGET=http://host:port) compares policies on a live server with the hook, `--model` (MODEL=path)
starts that server itself; see bench/live.
"""

import argparse
import contextlib
import datetime
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import plan, report
from bench.cells import Cell, Store, code_digest, run_cells
from bench.html import write_report
from bench.html.text import text_table
from bench.outcome import Outcome
from bench.statistics import Run, compare_runs
from bench.workloads import TRACES, make_workload

REPOSITORY = Path(__file__).resolve().parents[1]
OUT = Path("bench/out")
BAR = "{l_bar}{bar}| {elapsed} < {remaining}{postfix}"
NEEDED_BYTES = 500 << 20
"""A full run's rows take some 200 MB, its report a few; checked before anything runs."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--full", action="store_true", help="every arm and setting, and the sweep of the guard")
    add("--seeds", type=int, default=5, metavar="N", help="seeds 0 to N-1 (default: 5)")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    add("--workload", action="append", metavar="NAME", help="only these; may be given again")
    add("--traces", type=Path, default=TRACES, metavar="DIR")
    add("--out", type=Path, default=OUT, metavar="DIR")
    add("--no-server", action="store_true", help="virtual time alone")
    return parser


def main() -> int:
    options = arguments().parse_args()
    try:
        _check(options)
        return _run(options)
    except OSError as error:
        print(f"bench: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
    return 2


def _check(options: argparse.Namespace) -> None:
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}: {getattr(options, name)} is less than 1")
    options.out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.out).free
    if free < NEEDED_BYTES:
        raise ValueError(f"{options.out}: {free >> 20} MB free, {NEEDED_BYTES >> 20} MB are needed")


def _run(options: argparse.Namespace) -> int:
    wanted = plan.FULL_WORKLOADS if options.full else plan.QUICK_WORKLOADS
    workloads, notes = plan.available(tuple(options.workload or wanted), options.traces)
    for note in notes:
        print(note, file=sys.stderr)
    cells = plan.cells(workloads, options.seeds, full=options.full)
    store = Store(options.out / "cells", code_digest(REPOSITORY))
    done, code, why = _virtual(cells, options, store)
    if code:
        notes.append(
            f"{why}: {len(done)} of {len(cells)} runs are in this report; the same command goes on "
            "from there"
        )
        print(f"bench: {notes[-1]}", file=sys.stderr)
    live: list[Outcome] = []
    # Tables first: they need no room on disk.
    print(text_table(compare_runs(map(Run.of, _outcomes(done, store, live)), plan.BASELINE)))
    folder = options.out / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path = write_report(folder, _outcomes(done, store, live), _about(workloads, options), notes)
    print(f"report: {path}")
    return code


def _virtual(
    cells: list[Cell], options: argparse.Namespace, store: Store
) -> tuple[list[Cell], int, str]:
    """Run the cells; returns those done in the plan's order, an exit code, and what ended it."""
    done: set[Cell] = set()
    code, why = 0, ""
    with tqdm(total=sum(map(plan.seconds, cells)), desc="virtual time", bar_format=BAR) as bar:
        try:
            for cell, kept in run_cells(cells, options.traces, store, options.jobs):
                done.add(cell)
                if kept:
                    # What was done before says nothing of how fast this run is.
                    bar.total = (bar.total or 0) - plan.seconds(cell)
                else:
                    bar.update(plan.seconds(cell))
                bar.set_postfix_str(f"{len(done)}/{len(cells)} runs, {cell.workload}")
        except KeyboardInterrupt:
            code, why = 130, "INTERRUPTED"
        except OSError as error:
            code, why = 74, f"STOPPED, {error.strerror or error}"
    return [cell for cell in cells if cell in done], code, why


def _versions() -> dict[str, str]:
    found = {"time": datetime.datetime.now().astimezone().isoformat(timespec="seconds")}
    for name in ("sglang", "numpy", "msgspec"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _outcomes(done: list[Cell], store: Store, live: list[Outcome]) -> Iterator[Outcome]:
    yield from live
    # All seeds of an arm together, arms in the plan's order: how tables list them.
    for cell in sorted(done, key=lambda cell: cell.workload):
        yield store.load(cell)


def _about(workloads: list[str], options: argparse.Namespace) -> dict[str, Any]:
    described = {spec: make_workload(spec, options.traces).description for spec in workloads}
    return {**report.machine(), **_versions(), "baseline": plan.BASELINE, "workloads": described}


if __name__ == "__main__":
    sys.exit(main())
