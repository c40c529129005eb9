"""The steps of deploy/container, done in a fresh environment: what comes, and that it runs."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar import __version__
from tests.deploy.dockerfiles import HOOK, ROOT, SIDECAR, Stage, pinned, stages, values
from tests.processes import Running, Sidecar, clean_env, free_port, short_directory

PREFIX = "/opt/sglang-dp-sidecar"
MOST_MIB = 64
"""It is 46 MiB with Python 3.11 on x86-64, a third of it uvloop."""


def shell(script: str, cwd: Path, **env: str) -> str:
    """Output of a script whose `python` and `python3` are this environment's."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["/bin/sh", "-ec", script],
        cwd=cwd,
        env={**clean_env(PATH=path), "PYTHONPATH": "", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build context: the wheel, built as the documentation says, and the requirements."""
    folder = tmp_path_factory.mktemp("context")
    shell(f"python -m pip wheel -q --no-deps --wheel-dir {folder}/dist .", ROOT)
    (folder / "deploy").symlink_to(ROOT / "deploy")
    return folder


def copy(stage: Stage, context: Path, workdir: Path) -> None:
    for value in values(stage, "COPY"):
        sources, target = value.split()[:-1], value.split()[-1]
        assert target == "./"
        for pattern in sources:
            found = list(context.glob(pattern))
            assert found, f"COPY {value}"
            for file in found:
                shutil.copy(file, workdir)


@pytest.fixture(scope="module")
def installed(context: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the build stage leaves in its prefix."""
    prefix = tmp_path_factory.mktemp("opt") / "sglang-dp-sidecar"
    workdir = tmp_path_factory.mktemp("build")
    build = stages(SIDECAR)[1]
    copy(build, context, workdir)
    for script in values(build, "RUN"):
        shell(script.replace(PREFIX, str(prefix)), workdir)
    yield prefix
    shutil.rmtree(prefix)


def test_nothing_comes_along(installed: Path) -> None:
    names = json.loads(
        shell(
            f"{installed}/bin/python -c 'import json, importlib.metadata as m;"
            'print(json.dumps([d.metadata["Name"].lower().replace("_", "-")'
            " for d in m.distributions()]))'",
            installed,
        )
    )
    assert "sglang-dp-sidecar" in names
    assert set(names) <= {*pinned(), "sglang-dp-sidecar"}


def test_it_is_small(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = sum(f.lstat().st_size for f in installed.rglob("*") if not f.is_symlink()) / 2**20
    with capsys.disabled():
        print(f"\nsize of the installed sidecar: {size:.0f} MiB")
    assert size < MOST_MIB


class Installed(Sidecar):
    """ENTRYPOINT and CMD of the Dockerfile, on a socket and a port of our own."""

    def __init__(self, prefix: Path, endpoint: str) -> None:
        self.endpoint, self.path, self.port = endpoint, Path(endpoint[6:]), free_port()
        last = stages(SIDECAR)[-1]
        program, *rest = json.loads(values(last, "ENTRYPOINT")[0])
        rest += json.loads(values(last, "CMD")[0])
        rest += [f"--endpoint={endpoint}", f"--admin-port={self.port}"]
        Running.__init__(self, [f"{prefix}/bin/{program}", *rest], env=clean_env(PYTHONPATH=""))


def test_it_serves_and_its_health_check_sees_it(installed: Path) -> None:
    version = shell(f"{installed}/bin/sglang-dp-sidecar --version", installed)
    assert version.strip() == __version__
    (check,) = values(stages(SIDECAR)[-1], "HEALTHCHECK")
    program, *rest = json.loads(check[check.index("[") :])
    with short_directory() as directory:
        sidecar = Installed(installed, f"ipc://{directory}/q")
        try:
            sidecar.wait_ready()
            rest = [text.replace("9477", str(sidecar.port)) for text in rest]
            probe = [f"{installed}/bin/{program}", *rest]
            assert subprocess.run(probe, check=False).returncode == 0
            assert sidecar.stop() == 0
            dead = subprocess.run(probe, stderr=subprocess.DEVNULL, check=False)
            assert dead.returncode != 0
        finally:
            sidecar.end()


def test_the_hook_installs_into_an_sglang_environment(context: Path, tmp_path: Path) -> None:
    """As the Dockerfile does it, but beside this environment instead of into it."""
    (run,) = values(stages(HOOK)[-1], "RUN")
    script = run[run.index("python3 -m pip") :].replace("/dist/", f"{context}/dist/")
    script = script.replace("pip install", f"pip install -q --target {tmp_path}")
    script += " && python3 -c 'import sidecar, sglang_hook; print(sidecar.__file__)'"
    output = shell(script, tmp_path, PYTHONPATH=str(tmp_path))
    assert str(tmp_path) in output
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".dist-info") == sorted(
        ["bin", "sglang_hook", "sidecar"]
    )
