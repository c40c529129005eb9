"""Every SGLang release that the hook supports: its contract tests and a live server.

    python -m tests.matrix [VERSION ...]

Installs each release into .sglang/VERSION, runs `tests/contract` and
`tests/integration/test_release.py` on it, prints a table, and writes docs/compatibility.md. With
versions: only these are run, the other rows stay as they were. It ends with 1 if a test failed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

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
LIVE = ("test_plugin_loads", "test_dispatch", "test_reports")
CONTRACT_SECONDS, LIVE_SECONDS = 900, 600  # on two busy cores; a minute or two otherwise
HEAD = ("SGLang", "contract tests", "plugin loads", "dispatch", "reports", "server", "seconds")


def environment(release: str) -> dict[str, str]:
    """With this release before the environment's own."""
    path = "" if release == INSTALLED else str(ROOT / ".sglang" / release)
    return {**os.environ, "PYTHONPATH": path}


def outcomes(release: str, tests: str, seconds: int) -> dict[str, str]:
    """Name of each test -> passed, failed, skipped; empty if they did not end in time."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        log = ROOT / ".sglang" / f"{release}-{Path(tests).stem}.log"
        command = [sys.executable, "-m", "pytest", "-q", tests, f"--junitxml={report}"]
        with log.open("wb") as out:
            run = subprocess.Popen(
                command, cwd=ROOT, env=environment(release), stdout=out, stderr=subprocess.STDOUT
            )
            try:
                run.wait(seconds)
            except subprocess.TimeoutExpired:
                end(run.pid)
                run.wait()
        if not report.exists():
            return {}
        # Of our own pytest, a moment ago.
        return {case.get("name", ""): outcome(case) for case in ET.parse(report).iter("testcase")}


def end(pid: int) -> None:
    """A process and those that it started."""
    root = psutil.Process(pid)
    for process in [*root.children(recursive=True), root]:
        process.kill()


def outcome(case: ET.Element) -> str:
    for tag in ("failure", "error", "skipped"):
        if case.find(tag) is not None:
            return "skipped" if tag == "skipped" else "FAILED"
    return "passed"


def examine(release: str) -> dict[str, str]:
    """One row of the table."""
    begun = time.monotonic()
    if release != INSTALLED:
        subprocess.run([".ci/venv", "sglang", release], cwd=ROOT, check=True)
    contract = list(outcomes(release, "tests/contract", CONTRACT_SECONDS).values())
    live = outcomes(release, "tests/integration/test_release.py", LIVE_SECONDS)
    passed, failed = contract.count("passed"), contract.count("FAILED")
    told = f"{passed} passed" + (f", {failed} FAILED" if failed else "")
    # As in tests/integration/conftest.py.
    shape = "plain DP, 2 ranks" if numbers(release) < (0, 5, 22) else "DP attention, 4 ranks"
    return dict(
        zip(
            HEAD,
            (
                release,
                told if passed else "FAILED",
                *(live.get(name, "FAILED") for name in LIVE),
                shape,
                f"{time.monotonic() - begun:.0f}",
            ),
            strict=True,
        )
    )


def numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:3]))


def table(rows: dict[str, dict[str, str]]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    lines += [
        "| " + " | ".join(rows[release][name] for name in HEAD) + " |"
        for release in VERSIONS
        if release in rows
    ]
    return "\n".join(lines)


def main() -> int:
    wanted = sys.argv[1:] or list(VERSIONS)
    KEPT.parent.mkdir(exist_ok=True)
    failed = False
    for release in wanted:
        row = examine(release)
        failed = failed or any("FAILED" in value for value in row.values())
        # Read again: two of us may share the releases.
        rows: dict[str, dict[str, str]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        rows[release] = row
        print(" | ".join(rows[release].values()), flush=True)
        KEPT.write_text(json.dumps(rows, indent=1))
        before, _, after = PAGE.read_text().partition(MARK)
        _, _, after = after.partition(MARK)
        PAGE.write_text(f"{before}{MARK}\n\n{table(rows)}\n\n{MARK}{after}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
