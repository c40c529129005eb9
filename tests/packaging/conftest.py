"""The wheel and the sdist of this checkout, and an environment with the hook's needs alone."""

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.processes import ROOT

HOOK_NEEDS = ("msgspec", "pyzmq", "xxhash")


def run(*command: str | Path, **options: object) -> "subprocess.CompletedProcess[str]":
    """A command's exit code and output; our environment without what would change its path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=env, **options
    )


def build(target: str, into: Path, source: Path = ROOT) -> Path:
    """Build `wheel` or `sdist` with the build backend, without the network."""
    command = ["-m", "hatchling", "build", "--target", target, "--directory", str(into)]
    done = run(sys.executable, *command, cwd=source)
    assert done.returncode == 0, done.stderr
    [built] = [path for path in into.iterdir() if path.suffix in (".whl", ".gz")]
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its base dependencies, and no more.

    The dependencies are links to ours: nothing is fetched.
    """
    folder = tmp_path_factory.mktemp("bare")
    assert run(sys.executable, "-m", "venv", "--without-pip", folder).returncode == 0
    python = folder / "bin" / "python"
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", query).stdout.strip())
    for name in HOOK_NEEDS:
        for top in {file.parts[0] for file in distribution(name).files or ()}:
            source = Path(str(distribution(name).locate_file(top))).resolve()
            if top not in {"..", "__pycache__"} and source.exists():
                (site / top).symlink_to(source)
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    done = run(*pip, "install", "--quiet", "--no-index", str(wheel))
    assert done.returncode == 0, done.stderr
    return folder
