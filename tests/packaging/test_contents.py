"""What is in the wheel and in the sdist: the packages, whole, and nothing else."""

import ast
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement

from sidecar import __version__
from sidecar.entry import DAEMON_MODULES
from tests.processes import ROOT

from .conftest import HOOK_NEEDS, build

INFO = f"sglang_dp_sidecar-{__version__}.dist-info"
PACKAGES = ("sidecar", "sglang_hook")


def in_checkout() -> set[str]:
    """Every file of the packages: sources, py.typed, pages and other data."""
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{INFO}/METADATA").decode()


def test_the_wheel_holds_the_packages_and_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.testzip() is None
    expected = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    assert names == in_checkout() | expected | {f"{INFO}/licenses/LICENSE"}
    assert {"sidecar/py.typed", "sglang_hook/py.typed"} <= names
    assert wheel.name == f"sglang_dp_sidecar-{__version__}-py3-none-any.whl"


def test_the_sdist_holds_what_the_wheel_is_made_of_and_the_documents(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = [Path(member.name) for member in archive.getmembers() if member.isfile()]
    assert {path.parts[0] for path in files} == {f"sglang_dp_sidecar-{__version__}"}
    assert {path.parts[1] for path in files} == {
        *PACKAGES,
        *("deploy", "docs", ".gitignore", "PKG-INFO", "pyproject.toml"),
        *("README.md", "LICENSE", "CHANGELOG.md"),
    }
    assert in_checkout() <= {str(Path(*path.parts[1:])) for path in files}


def test_the_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    rebuilt = build("wheel", tmp_path / "dist", source)
    with zipfile.ZipFile(rebuilt) as first, zipfile.ZipFile(wheel) as second:
        assert first.namelist() == second.namelist()
        assert not [n for n in first.namelist() if first.read(n) != second.read(n)]


def test_the_metadata_is_valid_and_complete(wheel: Path) -> None:
    text = metadata(wheel)
    parsed = Metadata.from_email(text)  # raises for what an index would refuse
    assert (parsed.name, str(parsed.version)) == ("sglang-dp-sidecar", __version__)
    assert parsed.license_expression == "Apache-2.0"
    assert parsed.license_files == ["LICENSE"]
    assert str(parsed.requires_python) == ">=3.10"
    assert set(parsed.provides_extra or ()) == {"daemon", "bench", "test", "dev", "fuzz"}
    assert parsed.description_content_type == "text/markdown"
    body = Parser().parsestr(text).get_payload()
    assert body == (ROOT / "README.md").read_text()


def test_the_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(f"{INFO}/entry_points.txt").decode().split("\n")
    assert "sglang-dp-sidecar = sidecar.entry:main" in lines
    assert lines.index("dp_sidecar = sglang_hook.plugin:register") > lines.index(
        "[sglang.srt.plugins]"
    )


def needs(wheel: Path, extra: str) -> set[str]:
    """Names that the wheel requires on Python 3.10 with that extra, "" for none."""
    required = [
        Requirement(each) for each in Parser().parsestr(metadata(wheel)).get_all("Requires-Dist")
    ]
    environment = {"python_version": "3.10", "python_full_version": "3.10.0", "extra": extra}
    return {r.name for r in required if r.marker is None or r.marker.evaluate(environment)}


def imported(package: str) -> set[str]:
    """Top-level modules that a package imports anywhere, less the standard library and ours."""
    found: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {*PACKAGES, "tomllib"}


def test_what_is_imported_is_declared() -> None:
    hook = {"msgspec", "xxhash", "zmq"}
    assert imported("sglang_hook") <= hook | {"sglang"}
    assert imported("sidecar") <= hook | DAEMON_MODULES


def test_the_hook_needs_three_packages_and_the_daemon_names_its_own(wheel: Path) -> None:
    assert needs(wheel, "") == set(HOOK_NEEDS)
    daemon = needs(wheel, "daemon") - set(HOOK_NEEDS)
    assert {name.replace("-", "_") for name in daemon} == DAEMON_MODULES
    assert needs(wheel, "daemon") <= needs(wheel, "test")
