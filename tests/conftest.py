"""The packages under test are the installed ones; `bench` and `tests` come from the checkout.

Hypothesis profile: no deadlines (other work shares the machine), repeatable in CI.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

ROOT = Path(__file__).resolve().parents[1]
ON_PATH = str(ROOT) in sys.path[1:]
# `python -m pytest` puts the checkout first on the path, where it hides what is installed.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT] + [str(ROOT)]
# So would `python -m sidecar` in a child process, from Python 3.11 on.
os.environ["PYTHONSAFEPATH"] = "1"


def pytest_configure() -> None:
    """Refuse to test a wheel that was not built from this checkout."""
    if not ON_PATH:
        raise pytest.UsageError(
            "child processes will not find `bench` and `tests`: run `make venv` and the tests with "
            f".venv/bin/python, or put {ROOT} on the path of your environment with a .pth file"
        )
    for package in ("sidecar", "sglang_hook"):
        spec = importlib.util.find_spec(package)
        installed = Path(spec.origin).parent if spec and spec.origin else ROOT / package
        found = differing(ROOT / package, installed)
        if found:
            raise pytest.UsageError(
                f"{package} is installed in {installed} and differs from the checkout in "
                f"{', '.join(found[:5])}: run `make venv`"
            )


def differing(checkout: Path, installed: Path) -> list[str]:
    """Files that only one of two packages has, or that they have with different content."""
    if checkout == installed.resolve():
        return []  # editable, or not installed at all
    here, there = _contents(checkout), _contents(installed)
    return sorted(name for name in here | there if here.get(name) != there.get(name))


def _contents(package: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(package)): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
