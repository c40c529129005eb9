"""Reading traces: where the files are, JSON lines, and errors that name file, line and field."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.workloads.common import MissingTraces, WorkloadError

T = TypeVar("T")


def find(folder: Path, names: Sequence[str], origin: str) -> Path:
    """The first of `names` in the folder; origin: where to get it, for the message."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise missing(folder, names, origin)


def missing(folder: Path, names: Sequence[str], origin: str) -> MissingTraces:
    return MissingTraces(
        f"no trace in {folder} (looked for {', '.join(names)}): "
        f"get the public original, {origin}, and put it there, or name its folder with TRACES"
    )


def read_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Line number and record of every line that is not blank, of a .jsonl or .jsonl.gz file."""
    decoder = msgspec.json.Decoder(kind)
    number = found = 0
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found += 1
                    yield number, _decoded(decoder, line, path, number)
    except (EOFError, OSError, zlib.error) as error:
        raise WorkloadError(f"{path}: cannot be read after line {number}: {error}") from error
    if not found:
        raise WorkloadError(f"{path}: the trace is empty")


def read_file(path: Path, kind: type[T]) -> T:
    """The record of a file that is one JSON object."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error}") from error
    return _decoded(msgspec.json.Decoder(kind), data, path, 1)


def at_line(path: Path, number: int, problem: object) -> WorkloadError:
    return WorkloadError(f"{path}: line {number}: {problem}")


def _decoded(decoder: "msgspec.json.Decoder[T]", data: bytes, path: Path, number: int) -> T:
    try:
        return decoder.decode(data)
    # msgspec reports bytes that are no UTF-8 with Python's own error.
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise at_line(path, number, error) from error
