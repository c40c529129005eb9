"""What every bench prints: the machine, the command, a table, or `--json`."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from sidecar import __version__


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--json`; the first line of the module's docstring is the description."""
    parser = argparse.ArgumentParser(description=(doc or "").strip().splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "sidecar": __version__,
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
    }


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else "?"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum of repeated measurements."""
    return {
        "min": round(min(values), 3),
        "median": round(median(values), 3),
        "max": round(max(values), 3),
    }


def show(result: Mapping[str, Any], rows: Sequence[Sequence[str]], *, as_json: bool) -> None:
    """Print the result; rows: a table, the header first."""
    if as_json:
        print(json.dumps({"machine": machine(), **result}))
        return
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, Python {about['python']}: {about['command']}")
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = zip(row, widths, strict=True)
        print("  ".join(cell.rjust(width) for cell, width in cells))
