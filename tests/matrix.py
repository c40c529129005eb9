"""Every SGLang release that the hook supports: its contract tests and live servers.

    python -m tests.matrix [--only "PART ..."] [VERSION ...]

Installs each release into .sglang/VERSION and runs on it the parts

    contract   tests/contract, on its own classes
    attention  tests/integration/test_release.py on a server with DP attention
    plain      the same with plain DP, and SGLANG_USE_PICKLE_IPC=0 where there is such a thing
    ways       tests/integration/test_ways_in.py, on the first and the last release

then prints its row and writes the table of docs/compatibility.md. Parts and releases that are not
run now stay as they were. It ends with 1 if a test failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = "0.5.23"
VERSIONS = (
    *("0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1"),
    *("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", INSTALLED),
)
KEPT = ROOT / ".sglang" / "matrix.json"
PAGE = ROOT / "docs" / "compatibility.md"
MARK = "<!-- the table: written by make test-matrix -->"
RELEASE = "tests/integration/test_release.py"
PARTS: dict[str, tuple[str, dict[str, str]]] = {
    "contract": ("tests/contract", {}),
    "attention": (RELEASE, {"LIVE_SHAPE": "attention"}),
    "plain": (RELEASE, {"LIVE_SHAPE": "plain", "SGLANG_USE_PICKLE_IPC": "0"}),
    "ways": ("tests/integration/test_ways_in.py", {"EVERY_WAY": "1"}),
}
"""Name -> what to run, and the variables that it gets."""
LIVE = {
    "plugin loads": ("test_plugin_loads",),
    "dispatch": ("test_dispatch", "test_prompts_without_a_key", "test_a_session_stays"),
    "reports": ("test_reports",),
    "faults": ("test_faults",),
}
"""Column -> its tests on each server."""
OFF = (
    "test_without_its_variable_nothing_is_touched",
    "test_without_the_hook_sglang_dispatches_as_ever",
)
HEAD = ("SGLang", "contract tests", "hook off", *LIVE, "servers", "other ways in")
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"
SECONDS = 1200
"""Longest time of a part, on two busy cores; a minute otherwise, of `ways` four."""

Outcomes = dict[str, str]
"""Name of each test -> passed, skipped, FAILED; empty if they did not end in time."""


def outcomes(release: str, part: str) -> Outcomes:
    """Run a part."""
    tests, variables = PARTS[part]
    path = "" if release == INSTALLED else str(ROOT / ".sglang" / release)
    # Bytecode: six processes a server import SGLang, which takes half as long with it.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "", **variables}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", tests, f"--junitxml={report}"]
        with (ROOT / ".sglang" / f"{release}-{part}.log").open("wb") as out:
            run = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
            )
            try:
                run.wait(SECONDS)
            except subprocess.TimeoutExpired:
                end(run.pid)
                run.wait()
        if not report.exists():
            return {}
        # Of our own pytest, a moment ago.
        cases = ET.parse(report).iter("testcase")
        return {f"{case.get('classname')}.{case.get('name')}": outcome(case) for case in cases}


def end(pid: int) -> None:
    """A process and those that it started."""
    root = psutil.Process(pid)
    for process in [*root.children(recursive=True), root]:
        process.kill()


def outcome(case: ET.Element) -> str:
    for tag in ("failure", "error", "skipped"):
        if case.find(tag) is not None:
            return "skipped" if tag == "skipped" else FAILED
    return PASSED


def all_of(found: Outcomes | None, names: Iterable[str]) -> str:
    """Whether each of these tests was run and passed."""
    if found is None:
        return NOT_RUN
    those = [[told for test, told in found.items() if test.endswith(f".{name}")] for name in names]
    return PASSED if all(told == [PASSED] for told in those) else FAILED


def counted(found: Outcomes | None) -> str:
    """How many tests passed, and failed if any."""
    if found is None:
        return NOT_RUN
    passed, failed = (list(found.values()).count(word) for word in (PASSED, FAILED))
    return f"{passed} passed" + (f", {failed or 'all'} {FAILED}" if failed or not passed else "")


def row(release: str, parts: dict[str, Outcomes]) -> list[str]:
    """The release's cells, in the order of HEAD."""
    live = {shape: parts[shape] for shape in ("attention", "plain") if shape in parts}
    cells = [release, counted(parts.get("contract")), all_of(parts.get("contract"), OFF)]
    for names in LIVE.values():
        bad = [shape for shape, found in live.items() if all_of(found, names) == FAILED]
        cells.append(f"{FAILED}: {', '.join(bad)}" if bad else PASSED if live else NOT_RUN)
    ends = release in (VERSIONS[0], VERSIONS[-1])
    return [*cells, ", ".join(live) or NOT_RUN, counted(parts.get("ways")) if ends else ""]


def kept() -> dict[str, dict[str, Outcomes]]:
    """Release -> part -> outcomes, of all runs so far."""
    found: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return {
        release: {part: tests for part, tests in parts.items() if part in PARTS}
        for release, parts in found.items()
    }


def keep(release: str, part: str, found: Outcomes) -> None:
    """Note what came out, and write the page."""
    rows = kept()  # read again: two of us may share the releases
    rows.setdefault(release, {})[part] = found
    KEPT.write_text(json.dumps(rows, indent=1))
    lines = [HEAD, ["---"] * len(HEAD)]
    lines += [row(each, rows.get(each, {})) for each in VERSIONS]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    before, _, after = PAGE.read_text().partition(MARK)
    _, _, after = after.partition(MARK)
    PAGE.write_text(f"{before}{MARK}\n\n{table}\n\n{MARK}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=" ".join(PARTS), metavar="PARTS")
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    options = parser.parse_args()
    KEPT.parent.mkdir(exist_ok=True)
    failed = False
    for release in options.versions or VERSIONS:
        if release != INSTALLED:
            subprocess.run([".ci/venv", "sglang", release], cwd=ROOT, check=True)
        for part in options.only.split():
            if part == "ways" and release not in (VERSIONS[0], VERSIONS[-1]):
                continue
            begun = time.monotonic()
            found = outcomes(release, part)
            keep(release, part, found)
            failed = failed or not found or FAILED in found.values()
            seconds = time.monotonic() - begun
            print(f"{release} {part}: {counted(found)}, {seconds:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
