"""The tests run what is installed, in this process and in those that they start."""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import bench
import sidecar
from bench.simulated.launch import SimulatedServer
from tests.conftest import differing
from tests.processes import ROOT, clean_env

PRINT = "import bench, sidecar, sglang_hook as hook, tests\n" + "".join(
    f"print({name}.__file__)\n" for name in ("sidecar", "hook", "bench", "tests")
)
# pip leaves this beside an editable installation alone.
EDITABLE = '"editable": true' in (
    distribution("sglang-dp-sidecar").read_text("direct_url.json") or ""
)


def test_the_packages_are_the_installed_ones() -> None:
    assert (Path(sidecar.__file__).parent == ROOT / "sidecar") == EDITABLE
    assert Path(bench.__file__).parent == ROOT / "bench"


@pytest.mark.parametrize("of", ["process", "server"])
def test_so_they_are_in_child_processes(of: str, tmp_path: Path) -> None:
    """Those of `tests.processes`, and the server with simulated ranks, started in the checkout."""
    server = SimulatedServer(log_path=tmp_path / "log")
    env = clean_env() if of == "process" else server._environment
    # Python 3.10 knows no PYTHONSAFEPATH: what starts there sees the checkout first.
    cwd = ROOT if sys.version_info >= (3, 11) else "/"
    command = [sys.executable, "-c", PRINT]
    done = subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    here = Path(sidecar.__file__).parents[1]
    packages = [here / "sidecar", here / "sglang_hook", ROOT / "bench", ROOT / "tests"]
    assert [Path(line).parent for line in done.stdout.split()] == packages, done.stderr


def test_a_wheel_of_other_sources_is_noticed(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        (folder / "page").mkdir(parents=True)
        (folder / "same.py").write_text("same")
        (folder / "changed.py").write_text(folder.name)
    (ours / "page" / "new.html").write_text("new")
    (theirs / "gone.py").write_text("gone")
    (theirs / "same.pyc").write_text("compiled")
    assert differing(ours, theirs) == ["changed.py", "gone.py", "page/new.html"]
    assert not differing(ours, ours)
