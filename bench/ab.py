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
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from bench import plan, report, servers
from bench.cells import BadCell, Cell, Store, code_digest, run_cells
from bench.html import write_report
from bench.html.text import text_table
from bench.live.drive import DriveError
from bench.live.target import TargetError
from bench.outcome import Outcome
from bench.simulated.launch import ServerDied
from bench.statistics import Run, compare_runs
from bench.workloads import TRACES, make_workload
from sidecar.errors import SidecarError

REPOSITORY = Path(__file__).resolve().parents[1]
OUT = Path("bench/out")
SEEDS = 5
TROUBLE = (TargetError, DriveError, ServerDied, SidecarError)
BAR = "{l_bar}{bar}| {elapsed} < {remaining}{postfix}"
NEEDED_BYTES = 1 << 30
"""A full run's rows take some 300 MB, twice: by cell and in the report."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--full", action="store_true", help="every arm and setting, and the sweep of the guard")
    add("--seeds", type=int, metavar="N", help="seeds 0 to N-1 (default: 5; on a target 3)")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    add("--workload", action="append", metavar="NAME", help="only these; may be given again")
    add("--traces", type=Path, default=TRACES, metavar="DIR")
    add("--out", type=Path, default=OUT, metavar="DIR")
    add("--no-server", action="store_true", help="virtual time alone")
    servers.add_arguments(parser)
    return parser


def main() -> int:
    options = arguments().parse_args()
    # A cancelled job ends with SIGTERM: as with Ctrl-C, what is measured is reported.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        _check(options)
        if options.target or options.model:
            return _on_server(options)
        return _run(options)
    except OSError as error:
        print(f"bench: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
    except (ValueError, *TROUBLE) as error:
        print(f"bench: {error}", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 2


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _check(options: argparse.Namespace) -> None:
    for name in ("seeds", "jobs", "repeats", "ranks"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise ValueError(f"{name}: {number} is less than 1")
    if options.target and options.model:
        raise ValueError("target, model: one of them")
    options.out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.out).free
    if free < NEEDED_BYTES:
        raise ValueError(f"{options.out}: {free >> 20} MB free, {NEEDED_BYTES >> 20} MB are needed")


def _on_server(options: argparse.Namespace) -> int:
    """A/B at a target or on servers of a model."""
    outcomes, code, why = _collect(servers.measure(options))
    if not outcomes and code:
        return code
    return _report(options, servers.workloads(options), outcomes.__iter__, [why] * bool(code), code)


def _run(options: argparse.Namespace) -> int:
    """The plan in virtual time, then simulated ranks in real time."""
    wanted = plan.FULL_WORKLOADS if options.full else plan.QUICK_WORKLOADS
    workloads, notes = plan.available(tuple(options.workload or wanted), options.traces)
    for note in notes:
        print(note, file=sys.stderr)
    if not workloads:
        raise ValueError("nothing to run: no workload is left")
    cells = plan.cells(workloads, options.seeds or SEEDS, full=options.full)
    on_server = not (options.no_server or options.workload)
    if on_server:
        workloads.append(servers.TWIN)
        for seed in range(servers.TWIN_SEEDS):
            cells += [Cell(servers.TWIN, arm, seed) for arm in servers.ARMS]
    store = Store(options.out / "cells", code_digest(REPOSITORY))
    done, code, why = _virtual(cells, options, store)
    if code:
        notes.append(
            f"{why}: {len(done)} of {len(cells)} runs are in this report; the same command goes on "
            "from there"
        )
    live: list[Outcome] = []
    if on_server and not code:
        live, code, why = _collect(servers.twin(options.traces))
        notes += [why] * bool(code)

    def outcomes() -> Iterator[Outcome]:
        # All workloads' seeds together, arms in the plan's order: how tables list them.
        for cell in sorted(done, key=lambda cell: cell.workload):
            try:
                yield store.load(cell)
            except BadCell as error:  # noqa: PERF203 - the others are reported without it
                done.remove(cell)
                notes.append(f"{error}; the same command runs it again")
        yield from live

    return _report(options, workloads, outcomes, notes, code)


def _collect(found: Iterator[Outcome]) -> tuple[list[Outcome], int, str]:
    """What a server gave until it ended or broke off; an exit code, and why."""
    outcomes: list[Outcome] = []
    try:
        with contextlib.closing(found):  # type: ignore[type-var]
            for outcome in found:
                outcomes.append(outcome)  # noqa: PERF402 - each must be kept as it comes
    except KeyboardInterrupt:
        return outcomes, 130, f"INTERRUPTED after {len(outcomes)} runs on the server"
    except (*TROUBLE, TimeoutError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return outcomes, 2, f"STOPPED after {len(outcomes)} runs on the server: {error}"
    return outcomes, 0, ""


def _report(
    options: argparse.Namespace,
    workloads: list[str],
    outcomes: Callable[[], Iterator[Outcome]],
    notes: list[str],
    code: int,
) -> int:
    for note in notes:
        print(f"bench: {note}", file=sys.stderr)
    # Tables first: they need no room on disk.
    print(text_table(compare_runs(map(Run.of, outcomes()), plan.BASELINE)))
    path = write_report(_new_folder(options.out), outcomes(), _about(workloads, options), notes)
    print(f"report: {path}")
    return code


def _new_folder(out: Path) -> Path:
    """A folder named by the time; a second run in that second gets another."""
    name = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1, 1000):
        folder = out / (name if number == 1 else f"{name}_{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise ValueError(f"{out}: no free name like {name}")


def _virtual(
    cells: list[Cell], options: argparse.Namespace, store: Store
) -> tuple[list[Cell], int, str]:
    """Run the cells; returns those done in the plan's order, an exit code, and what ended it."""
    done: set[Cell] = set()
    code, why = 0, ""
    kept = sum(plan.weight(cell) for cell in cells if store.path(cell).exists())
    if kept:
        print("runs kept from before, by the same code, are not run again", file=sys.stderr)
    with tqdm(
        total=sum(map(plan.weight, cells)),
        initial=kept,
        desc="virtual time",
        bar_format=BAR,
        mininterval=0.5 if sys.stderr.isatty() else 15.0,
    ) as bar:
        try:
            for cell, was_kept in run_cells(cells, options.traces, store, options.jobs):
                done.add(cell)
                bar.set_postfix_str(f"{len(done)}/{len(cells)} runs, {cell.workload}", False)
                bar.update(0 if was_kept else plan.weight(cell))
        except KeyboardInterrupt:
            code, why = 130, "INTERRUPTED"
        except OSError as error:
            code, why = 74, f"STOPPED, {error.strerror or error}"
        except BrokenProcessPool:
            code, why = 70, "STOPPED, a worker was killed (out of memory? see --jobs)"
        except ValueError:
            raise
        except Exception as error:  # noqa: BLE001 - what is measured must be reported
            traceback.print_exc()
            code, why = 70, f"STOPPED, {type(error).__name__}: {error}"
    return [cell for cell in cells if cell in done], code, why


def _versions() -> dict[str, str]:
    found = {"time": datetime.datetime.now().astimezone().isoformat(timespec="seconds")}
    for name in ("sglang", "numpy", "msgspec"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _about(workloads: list[str], options: argparse.Namespace) -> dict[str, Any]:
    described = {spec: make_workload(spec, options.traces).description for spec in workloads}
    seeds: dict[str, str] = {}
    if not (options.target or options.model):
        seeds["seeds"] = f"0 to {(options.seeds or SEEDS) - 1}"
        if not (options.no_server or options.workload):
            seeds["seeds"] += f"; on the server 0 to {servers.TWIN_SEEDS - 1}"
    return {
        **report.machine(),
        **_versions(),
        **seeds,
        "baseline": plan.BASELINE,
        "workloads": described,
    }


if __name__ == "__main__":
    sys.exit(main())
