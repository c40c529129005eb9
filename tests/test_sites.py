"""What keeps HTTP and the control socket from being made keeps nobody from being told."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.outside import distribution
from tests.processes import Asker, clean_env, short_directory, sidecar_process, wait_for
from tests.support import keyed

HALF = """
import sys

class Half:
    def find_spec(self, name, path, target=None):
        if name == "sidecar.admin":
            raise AttributeError("half installed")

sys.meta_path.insert(0, Half())
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


def test_an_import_that_fails_in_any_way_is_told(directory: Path) -> None:
    (directory / "sitecustomize.py").write_text(HALF)
    env = clean_env(PYTHONPATH=str(directory))
    with sidecar_process(f"ipc://{directory}/q", ready=False, env=env) as sidecar:
        wait_for(lambda: sidecar.lines("ERROR", "no HTTP", "AttributeError: half installed"))
        with Asker(sidecar.endpoint) as asker:
            assert len(asker.query([keyed("k")]).ranks) == 1
        assert sidecar.stop() == 0


def test_a_package_with_unsound_metadata_keeps_nothing_from_listening(directory: Path) -> None:
    distribution(directory, "unsound", {})
    (directory / "unsound-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe")
    env = clean_env(PYTHONPATH=str(directory))
    with sidecar_process(f"ipc://{directory}/q", env=env) as sidecar:
        assert Path(f"{directory}/q.control").exists()
        assert sidecar.stop() == 0
