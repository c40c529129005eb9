"""`sglang-dp-sidecar check`: what is installed, what is imported, which variables are set."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sidecar
from sidecar import __version__
from sidecar.check import installed, variables
from tests.processes import short_directory
from tests.test_check import NO_HTTP, bad, forget_settings, found, of


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_settings(monkeypatch)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook is asked in this process: an interpreter of its own takes half a second."""
    from sglang_hook.check import look

    monkeypatch.setattr(variables, "ask_hook", look)


# ---- what is installed


@pytest.mark.parametrize(
    ("version", "level"),
    [
        *(("0.5.12.post1", "ok"), ("0.5.23", "ok"), ("0.5.23.post1", "ok"), ("0.5.23rc1", "ok")),
        *(("0.5.11", "problem"), ("0.5.24", "warning"), ("1", "warning"), ("dev", "warning")),
    ],
)
def test_versions_of_sglang(version: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = installed.metadata.version
    monkeypatch.setattr(
        installed.metadata, "version", lambda name: version if name == "sglang" else real(name)
    )
    of(list(installed.findings()), level, f"SGLang {version}")


def test_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise installed.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installed.metadata, "version", missing)
    monkeypatch.setattr(installed.metadata, "entry_points", lambda **group: ())
    findings = list(installed.findings())
    of(findings, "note", "SGLang is not installed")
    of(findings, "problem", "sglang-dp-sidecar is not installed", "pip install")
    of(findings, "problem", "plugin dp_sidecar is not registered", "pip install")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("version", lambda name: "0.0.1", ["0.0.1", __version__]),
        (
            "packages_distributions",
            lambda: {"sidecar": ["sglang-dp-sidecar", "motorcycle"]},
            ["`sidecar`", "motorcycle", "pip uninstall motorcycle"],
        ),
        (
            "entry_points",
            lambda **group: [installed.metadata.EntryPoint("dp_sidecar", "other:f", "g")],
            ["other:f"],
        ),
    ],
)
def test_a_broken_installation(
    name: str, change: Callable[..., Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed.metadata, name, change)
    of(list(installed.findings()), "problem", *words)


# ---- variables


@pytest.mark.usefixtures("quick")
def test_variables(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = directory / "q"
    of(found(NO_HTTP, at=at), "note", "DP_SIDECAR_ENDPOINT is not set here", f"ipc://{at}")
    monkeypatch.setenv("DP_SIDECAR_ENDPOINT", f"ipc://{at}")
    of(found(NO_HTTP), "ok", "DP_SIDECAR_ENDPOINT")
    monkeypatch.setenv("DP_SIDECAR_HEARTBEAT_MS", "250")  # the hook's
    monkeypatch.setenv("DP_SIDECAR_STALE_SECONDS", "4")  # the sidecar's
    assert not bad(found(NO_HTTP))
    of(found(NO_HTTP, at=directory / "p"), "problem", f"{directory}/p", "would not meet")
    monkeypatch.setenv("DP_SIDECAR_DEADLINE_MSEC", "5")
    of(found(NO_HTTP), "warning", "DP_SIDECAR_DEADLINE_MSEC", "did you mean DP_SIDECAR_DEADLINE_MS")
    monkeypatch.setenv("DP_SIDECAR_HEARTBEAT_MS", "many")
    of(found(NO_HTTP), "problem", "DP_SIDECAR_HEARTBEAT_MS", "int")
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    of(found(NO_HTTP), "problem", "SGLANG_RUST_SERVER")


@pytest.mark.parametrize("package", ["sidecar", "sglang_hook"])
def test_a_package_of_that_name_is_in_the_way(
    package: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the working directory, as for an SGLang that is started there."""
    (directory / package).mkdir()
    (directory / package / "__init__.py").write_text("")
    monkeypatch.chdir(directory)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    findings = list(variables.findings(None))
    where = "import sidecar gives" if package == "sidecar" else "sglang_hook"
    problems = [line for line in bad(findings) if where in line]
    assert problems
    # Where we are installed, or the checkout if that is editable.
    monkeypatch.setenv("PYTHONPATH", str(Path(sidecar.__file__).parents[1]))
    if sys.version_info >= (3, 11):
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
        assert not bad(list(variables.findings(None)))
