"""One run of the virtual model as data: what a pool of processes works through, and resumes."""

import contextlib
import gzip
import hashlib
import os
import signal
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import cache
from pathlib import Path

import msgspec

from bench.arms import make_arm
from bench.live.children import die_with_parent
from bench.model.server import ServerSpec
from bench.model.simulate import simulate
from bench.outcome import Outcome
from bench.workloads import Workload, make_workload

# What a result depends on besides its cell; a change there makes kept results worthless.
_CODE = ("bench/model", "bench/arms", "bench/workloads", "bench/outcome.py", "sidecar")


class Cell(msgspec.Struct, frozen=True):
    """One arm on one workload with one seed."""

    workload: str
    arm: str
    seed: int
    server: ServerSpec = ServerSpec()


def run_cell(cell: Cell, traces: Path) -> Outcome:
    """Run it. Raises WorkloadError, ArmError or ValueError, which name what is wrong."""
    outcome = simulate(_workload(cell.workload, traces), make_arm(cell.arm), cell.seed, cell.server)
    return msgspec.structs.replace(outcome, workload=cell.workload)


@cache
def _workload(spec: str, traces: Path) -> Workload:
    return make_workload(spec, traces)


def server_from(pairs: Sequence[str]) -> ServerSpec:
    """`steps.shared=0.3`, `rank.cache_tokens=262144`, `lockstep=false` ... -> a server.

    Raises ValueError, which names the field and the bound.
    """
    values: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        *outer, field = name.split(".")
        if not equals or len(outer) > 1:
            raise ValueError(f"server {pair!r}: write field=value or part.field=value")
        place = values.setdefault(outer[0], {}) if outer else values
        if not isinstance(place, dict):
            raise ValueError(f"server {pair!r}: {outer[0]} has no fields")
        place[field] = value
    if "rank.page_tokens" in [pair.partition("=")[0] for pair in pairs]:
        raise ValueError("server: rank.page_tokens is the workload's, its prompts are in pages")
    try:
        return msgspec.convert(values, ServerSpec, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"server: {error}") from None


def code_digest(root: Path) -> str:
    """Digest of the code that the results depend on."""
    digest = hashlib.sha256()
    for name in _CODE:
        path = root / name
        files = sorted(path.rglob("*.[pj]*")) if path.is_dir() else [path]
        for file in files:
            if file.suffix in (".py", ".json"):
                digest.update(file.relative_to(root).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


class BadCell(Exception):
    """A stored cell cannot be read."""


class Store:
    """Finished cells, a compressed file each; a file is there whole or not at all."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder = folder
        self._code = code
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, cell: Cell) -> Path:
        data = msgspec.json.encode((self._code, cell))
        return self.folder / f"{hashlib.sha256(data).hexdigest()[:24]}.json.gz"

    def save(self, cell: Cell, outcome: Outcome) -> None:
        path = self.path(cell)
        half = path.with_suffix(f".{os.getpid()}.part")
        try:
            half.write_bytes(gzip.compress(msgspec.json.encode(outcome), 4, mtime=0))
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)

    def load(self, cell: Cell) -> Outcome:
        """Raises BadCell, after which the cell is no longer stored if it can be helped."""
        path = self.path(cell)
        try:
            return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Outcome)
        except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise BadCell(f"{path}: {error or type(error).__name__}") from None


def run_cells(
    cells: Sequence[Cell], traces: Path, store: Store, jobs: int
) -> Iterator[tuple[Cell, bool]]:
    """Run those that are not stored yet; yields each with whether it was stored before.

    Leaving early (an exception, Ctrl-C) stops the processes; what is stored stays.
    """
    todo = []
    for cell in cells:
        if store.path(cell).exists():
            yield cell, True
        else:
            todo.append(cell)
    # Long ones first would make the time left hard to tell; cells come as the plan orders them.
    pool = ProcessPoolExecutor(jobs, initializer=_in_worker)
    try:
        futures = {pool.submit(_run_and_store, cell, traces, store): cell for cell in todo}
        pending = set(futures)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
                yield futures[future], False
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_worker() -> None:
    die_with_parent(signal.SIGKILL)
    # Ctrl-C is the parent's to handle: it lets the cell under way end and cancels the rest.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run_and_store(cell: Cell, traces: Path, store: Store) -> None:
    store.save(cell, run_cell(cell, traces))
