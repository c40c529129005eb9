"""Chooses what the corpus keeps: the fewest inputs that go through all steps that any goes through.

libFuzzer's own merge starts itself again, which a Python process under it cannot.
"""

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz import CORPUS
from tests.fuzz.targets import TARGETS

Step = tuple[str, int, int]
"""File, line before, line."""


def _sources() -> tuple[str, ...]:
    specs = [importlib.util.find_spec(name) for name in ("sidecar", "sglang_hook")]
    return tuple(str(Path(spec.origin).parent) for spec in specs if spec and spec.origin)


def steps(run: Callable[[bytes], None], data: bytes, sources: tuple[str, ...]) -> set[Step]:
    """From which line to which line of our code an input leads."""
    seen: set[Step] = set()

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        name, last = frame.f_code.co_filename, frame.f_lineno
        if not name.startswith(sources):
            return None

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            seen.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return line

        return line

    sys.settrace(enter)
    try:
        run(data)
    finally:
        sys.settrace(None)
    return seen


def fewest(inputs: Iterable[bytes], name: str) -> list[bytes]:
    """Those that add most first, and of equals the shortest; `Target.kept` at most."""
    sources, target = _sources(), TARGETS[name]
    found = {data: steps(target.run, data, sources) for data in sorted(set(inputs), key=len)}
    chosen: list[bytes] = []
    covered: set[Step] = set()
    while found and len(chosen) < target.kept:
        best = max(found, key=lambda data: len(found[data] - covered))
        if found[best] <= covered:
            break
        covered |= found.pop(best)
        chosen.append(best)
    return chosen


def merge(out: Path, names: list[str]) -> None:
    """Put what was found in `out` into the corpus that is kept."""
    for name in names:
        kept = CORPUS / name
        files = [*kept.glob("merged-*"), *(out / name).glob("*")]
        chosen = fewest((file.read_bytes() for file in files), name)
        with tempfile.TemporaryDirectory() as made:
            for number, data in enumerate(chosen):
                (Path(made) / f"merged-{number:02}").write_bytes(data)
            kept.mkdir(parents=True, exist_ok=True)
            for file in kept.glob("merged-*"):
                file.unlink()
            for file in Path(made).iterdir():
                shutil.copy(file, kept)
        print(f"{name}: {len(chosen)} of {len(files)} files kept", flush=True)
