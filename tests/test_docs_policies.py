"""docs/policies.md: the example policy, its test and its configuration do what the page says."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.control import Control
from tests.processes import Asker, clean_env, short_directory, sidecar_process, wait_for
from tests.support import keyed

PAGE = Path(__file__).parent.parent / "docs" / "policies.md"
FILES = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.S)


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        files = dict(FILES.findall(PAGE.read_text()))
        assert sorted(files) == ["sticky.py", "sticky.toml", "test_sticky.py"]
        for name, text in files.items():
            (path / name).write_text(text)
        yield path


def test_it_is_about_thirty_lines(directory: Path) -> None:
    lines = (directory / "sticky.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 30


def test_its_test_passes_and_can_fail(directory: Path) -> None:
    def run() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sticky.py"],
            check=False,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(directory)},
            capture_output=True,
            text=True,
            timeout=120,
        )

    assert run().returncode == 0
    policy = directory / "sticky.py"
    policy.write_text(policy.read_text().replace("<= self.params", ">= self.params"))
    assert run().returncode == 1


def test_a_reload_puts_it_in_force(directory: Path) -> None:
    env = clean_env()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(directory), env.get("PYTHONPATH")]))
    config = directory / "sidecar.toml"
    config.write_text("")
    endpoint = f"ipc://{directory}/q"
    with sidecar_process(endpoint, config=config, env=env) as sidecar, Asker(endpoint) as asker:
        control = Control(f"{directory}/q.control", timeout=30)
        assert asker.query([keyed("a")]).policy == "kv_affinity"
        config.write_text((directory / "sticky.toml").read_text())
        state = control.reload()
        assert (state.name, state.params) == ("sticky", {"max_requests": 32})
        assert asker.query([keyed("a")]).reasons == ["placed"]
        # Changed and broken: what runs stays.
        policy = directory / "sticky.py"
        good = policy.read_text()
        policy.write_text(good.replace("def choose", "def chose"))
        with pytest.raises(Exception, match="choose"):
            control.reload()
        assert asker.query([keyed("a")]).policy == "sticky"
        policy.write_text(good.replace("Reason.PLACED", "Reason.FALLBACK"))
        control.reload()
        wait_for(lambda: asker.query([keyed("a")]).reasons == ["fallback"])
        assert sidecar.metric("policy_version") == 3
