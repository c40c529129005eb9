"""A sidecar that is not as installed: another version, another time of day.

Python imports `sitecustomize` before anything of ours; a folder with one in PYTHONPATH is enough.
"""

import struct
from pathlib import Path

from bench.chaos.process import environment

_VERSION = """
import sidecar
sidecar.__version__ = {version!r}
"""
_CLOCK = """
import mmap, struct, time
with open({path!r}, "r+b") as file:
    page = mmap.mmap(file.fileno(), 8)
real, real_ns = time.time, time.time_ns
step = lambda: struct.unpack("d", page)[0]
time.time = lambda: real() + step()
time.time_ns = lambda: real_ns() + int(step() * 1e9)
"""


def _customized(folder: Path, code: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    checkout = Path(__file__).resolve().parents[2]
    return environment(PYTHONPATH=f"{folder}:{checkout}")


def of_version(version: str, folder: Path) -> dict[str, str]:
    """Environment of a sidecar that calls itself that version."""
    return _customized(folder, _VERSION.format(version=version))


class WallClock:
    """The time of day of the processes that get `env`; it can be set while they run.

    Only the time of day: the kernel never steps the monotonic clock.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "clock"
        self.set(0.0)
        self.env = _customized(folder / "clocked", _CLOCK.format(path=str(self._path)))

    def set(self, seconds: float) -> None:
        """Step it to so many seconds from the true time."""
        mode = "r+b" if self._path.exists() else "w+b"
        with self._path.open(mode) as file:
            file.write(struct.pack("d", seconds))
