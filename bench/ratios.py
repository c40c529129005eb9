"""Many cells of the model at once, and figures as ratios to a baseline on the same seeds."""

import math
import os
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from bench.cells import Cell, Store, code_digest, run_cells
from bench.statistics import METRICS, Run

K = TypeVar("K", bound=Hashable)


def run_all(cells: Mapping[K, Cell], traces: Path) -> dict[K, Run]:
    """Run every cell on all cores, with a progress bar; nothing is kept."""
    with tempfile.TemporaryDirectory(prefix="dps-ratios-") as folder:
        store = Store(Path(folder), code_digest(Path(__file__).resolve().parents[1]))
        done = run_cells(list(cells.values()), traces, store, os.cpu_count() or 1)
        for _ in tqdm(done, total=len(cells), desc="virtual time"):
            pass
        return {key: Run.of(store.load(cell)) for key, cell in cells.items()}


def ratios(pairs: Iterable[tuple[Run, Run]], figures: Sequence[str]) -> dict[str, float]:
    """Geometric means of run / baseline over pairs of one seed; nan where a figure is unknown."""
    runs = list(pairs)
    found = {}
    for metric in METRICS:
        if metric.name in figures:
            logs = (
                math.log(
                    (metric.of(run.summary) or math.nan) / (metric.of(base.summary) or math.nan)
                )
                for run, base in runs
            )
            found[metric.name] = round(math.exp(sum(logs) / len(runs)), 4)
    return found
