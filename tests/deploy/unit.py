"""The sidecar's systemd unit, read as systemd reads it."""

import functools
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

SYSTEMD = Path(__file__).parents[2] / "deploy" / "systemd"
SERVICE = SYSTEMD / "sglang-dp-sidecar.service"
DROP_IN = SYSTEMD / "sglang.service.d" / "10-dp-sidecar.conf"


def settings(unit: Path) -> dict[str, list[str]]:
    """Every value of each key, in order; section names do not matter to these units."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            found.setdefault(key, []).append(value)
    return found


def analyze(*arguments: str, env: Mapping[str, str] | None = None) -> "Result":
    """Run systemd-analyze."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze: install the Debian packages of .ci/debian-packages")
    return subprocess.run(
        [tool, *arguments],
        env=dict(os.environ, SYSTEMD_PAGER="", **(env or {})),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


Result = subprocess.CompletedProcess[str]


@functools.cache
def _members(group: str) -> frozenset[str]:
    """Names of system calls and groups in a group such as @system-service."""
    result = analyze("syscall-filter", "--no-pager", group)
    assert result.returncode == 0, result.stderr
    words = (line.split("#")[0].strip() for line in result.stdout.splitlines()[1:])
    return frozenset(word for word in words if word)


def _calls(names: Iterable[str]) -> set[str]:
    calls: set[str] = set()
    for name in names:
        calls |= _calls(_members(name)) if name.startswith("@") else {name}
    return calls


def allowed_calls(unit: Path) -> set[str]:
    """What SystemCallFilter= leaves: later lines change earlier ones, ~ takes away."""
    allowed: set[str] = set()
    for value in settings(unit)["SystemCallFilter"]:
        if value.startswith("~"):
            allowed -= _calls(value[1:].split())
        else:
            allowed |= _calls(value.split())
    return allowed | _calls(["@default"])  # always allowed, says systemd.exec(5)
