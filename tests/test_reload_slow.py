"""Reloads whose policy takes long to import, or forever."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.control import Control
from tests.outside import sound
from tests.processes import Sidecar, clean_env, short_directory, sidecar_process, wait_for

SLOW = """
import os
os.close(os.open({begun!r}, os.O_WRONLY | os.O_CREAT))
os.close(os.open({gate!r}, os.O_RDONLY))  # a FIFO: waits until somebody opens the other end
"""


class Slow:
    """A sidecar that is told to import a module which waits."""

    def __init__(self, sidecar: Sidecar, path: Path) -> None:
        self.sidecar, self.path = sidecar, path
        self.control = Control(f"{path}/q.control")

    def begin(self) -> None:
        (self.path / "c.toml").write_text('[policy]\nname = "slow:Mine"\n')
        self.sidecar.signal(signal.SIGHUP)
        wait_for((self.path / "begun").exists)


@pytest.fixture
def slow() -> Iterator[Slow]:
    with short_directory() as path:
        os.mkfifo(path / "gate")
        waits = SLOW.format(begun=f"{path}/begun", gate=f"{path}/gate")
        (path / "slow.py").write_text(waits + sound())
        (path / "c.toml").write_text("")
        env = clean_env(PYTHONPATH=str(path))
        with sidecar_process(f"ipc://{path}/q", config=path / "c.toml", env=env) as sidecar:
            wait_for(lambda: sidecar.lines("control on"))
            yield Slow(sidecar, path)


def test_it_can_be_stopped(slow: Slow) -> None:
    slow.begin()
    assert slow.sidecar.stop() == 0
    assert slow.sidecar.lines("stopped")


def test_many_hups_meanwhile_are_one_more_reload(slow: Slow) -> None:
    before = slow.control.show().version
    slow.begin()
    for _ in range(5):
        slow.sidecar.signal(signal.SIGHUP)
        assert slow.control.show().version == before  # a round of the loop: the signal was seen
    (slow.path / "c.toml").write_text("")
    with open(slow.path / "gate", "w"):
        wait_for(lambda: slow.control.show().version == before + 2)
    assert [one.policy for one in slow.control.history()[1:]] == ["mine", "kv_affinity"]
    assert slow.control.reload().version == before + 3, "nothing waited before it"
