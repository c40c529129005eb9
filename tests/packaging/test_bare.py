"""With the wheel and its base dependencies the hook works, and the sidecar names what it lacks."""

import json
import sys
from pathlib import Path

import pytest

import sglang_hook
from sidecar.entry import UNAVAILABLE_EXIT

from .conftest import run

HOOK_MODULES = sorted(
    f"sglang_hook.{path.stem}"
    for path in Path(sglang_hook.__file__).parent.glob("*.py")
    if path.stem != "__init__"
)


def test_every_module_of_the_hook_imports(bare: Path) -> None:
    code = f"import sys, {', '.join(HOOK_MODULES)}\nprint(sglang_hook.__file__)"
    done = run(bare / "bin" / "python", "-c", code, cwd="/")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(bare)


def test_the_plugin_is_found_and_registers(bare: Path) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "[found] = entry_points(group='sglang.srt.plugins')\n"
        "found.load()()\n"
    )
    done = run(bare / "bin" / "python", "-c", code, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("how", ["script", "module"])
@pytest.mark.parametrize("arguments", [["serve"], ["--help"], ["policy", "show"]], ids=" ".join)
def test_the_sidecar_names_the_extra(bare: Path, how: str, arguments: list[str]) -> None:
    binary = bare / "bin"
    start = (
        [binary / "sglang-dp-sidecar"] if how == "script" else [binary / "python", "-m", "sidecar"]
    )
    done = run(*start, *arguments, cwd="/")
    assert done.returncode == UNAVAILABLE_EXIT
    assert not done.stdout
    [line] = done.stderr.splitlines()
    assert "the extra `daemon`: pip install 'sglang-dp-sidecar[daemon]'" in line


def test_what_is_broken_is_not_taken_for_a_missing_extra(bare: Path, tmp_path: Path) -> None:
    """A module that the hook needs too: the traceback says more."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['msgspec'] = None\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sitecustomize, sidecar.entry\n"
    )
    done = run(bare / "bin" / "python", "-Sc", code + "sidecar.entry.main(['serve'])", cwd="/")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_installing_the_wheel_here_would_add_only_itself(wheel: Path) -> None:
    """Here is SGLang's environment where `make venv` made it; nothing is fetched."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    options = ["--no-deps", "--no-index", "--quiet", "--report", "-"]
    assert json.loads(run(*pip, *options, wheel).stdout)["install"][0]["is_direct"]
    pip.remove("--ignore-installed")
    done = run(*pip, "--no-index", "--quiet", "--report", "-", wheel)
    assert done.returncode == 0, done.stderr
    added = {each["metadata"]["name"] for each in json.loads(done.stdout)["install"]}
    assert added <= {"sglang-dp-sidecar"}
