"""Writes the folder of a report: rows as they come, then the figures, then the page."""

import gzip
import os
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import msgspec

from bench.html.page import page
from bench.html.series import Series
from bench.outcome import Outcome
from bench.statistics import Run, compare_runs

ROWS = "rows.jsonl.gz"
RESULT = "result.json"
PAGE = "report.html"
COMPRESSION = 4
"""Of zlib: 6 takes twice as long for 5 % less."""


def write_report(
    folder: Path, outcomes: Iterable[Outcome], about: dict[str, Any], notes: list[str]
) -> Path:
    """Write `result.json`, `rows.jsonl.gz` and `report.html` into `folder`; gives the page's path.

    `about` is shown in the header as it is, but for three keys: `baseline` (an arm's name; without
    it the first arm), `workloads` (name -> description) and `ttft_bound_ms` (of goodput, 2000).
    `notes` stand at the top: what was skipped or interrupted. Outcomes may come from a generator,
    their rows are written and let go one by one. The same input gives the same bytes. Each file
    replaces an older one only when it is complete; OSError (no room on disk) passes through.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bound = float(about.get("ttft_bound_ms", 2000.0))
    series: list[Series] = []
    with _replacing(folder / ROWS) as rows, _gzip(rows.file) as packed:
        for outcome in outcomes:
            packed.write(msgspec.json.encode(outcome) + b"\n")
            series.append(Series.of(outcome, Run.of(outcome, bound)))
    runs = [each.run for each in series]
    baseline = str(about.get("baseline") or (runs[0].arm if runs else ""))
    comparisons = compare_runs(runs, baseline)
    result = {"about": about, "notes": notes, "runs": runs, "comparisons": comparisons}
    with _replacing(folder / RESULT) as out:
        out.file.write(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    with _replacing(folder / PAGE) as out, TextIOWrapper(out.file, "utf-8") as html:
        html.write(page(series, comparisons, {**about, "baseline": baseline}, notes))
    return folder / PAGE


def read_outcomes(rows: Path) -> Iterator[Outcome]:
    """The outcomes of a `rows.jsonl.gz`."""
    with gzip.open(rows) as packed:
        for line in packed:
            yield msgspec.json.decode(line, type=Outcome)


def _gzip(file: IO[bytes]) -> gzip.GzipFile:
    return gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=COMPRESSION, mtime=0)


class _replacing:
    """A file that takes its name when it is complete; without that it leaves nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.part")

    def __enter__(self) -> "_replacing":
        self.file = self._part.open("wb")
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            self.file.close()
        except OSError:
            self._part.unlink(missing_ok=True)
            raise
        if failed:
            self._part.unlink(missing_ok=True)
        else:
            os.replace(self._part, self._path)
