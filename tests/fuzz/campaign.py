"""Runs targets by coverage, several processes at a time, and says what they did."""

import ctypes
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import CORPUS, MEMORY_MIB, TIMEOUT
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

_DONE = re.compile(rb"^#(\d+)\t", re.MULTILINE)
_STAT = re.compile(rb"^stat::(\w+):\s+(\d+)", re.MULTILINE)
_COVERAGE = re.compile(rb"cov: (\d+) ft: (\d+)")
TELL_SECONDS = 30.0
TAIL_BYTES = 1 << 16


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@dataclass
class Job:
    """One process that fuzzes one target."""

    name: str
    runs: int
    log: Path
    process: "subprocess.Popen[bytes] | None" = None
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    stopped: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than by having done its runs, or by us."""
        return self.process is not None and self.process.returncode != 0 and not self.stopped

    def tail(self) -> bytes:
        """The end of what libFuzzer says."""
        with open(self.log, "rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return file.read()

    def done(self) -> int:
        """Inputs so far."""
        told = dict(_STAT.findall(self.tail()))
        if b"number_of_executed_units" in told:
            return int(told[b"number_of_executed_units"])
        return max([int(n) for n in _DONE.findall(self.tail())], default=0)

    def summary(self) -> str:
        """A row of the table."""
        told = dict(_STAT.findall(self.tail()))
        covered = _COVERAGE.findall(self.tail())[-1:] or [(b"?", b"?")]
        rate = self.done() / max(1.0, self.seconds)
        cells = (
            self.name,
            f"{self.done():,}",
            f"{self.seconds:.0f}",
            f"{rate:,.0f}",
            told.get(b"peak_rss_mb", b"?").decode(),
            covered[0][1].decode(),
            "FAILED" if self.failed else "stopped" if self.stopped else "ok",
        )
        return "| " + " | ".join(cells) + " |"


class Campaign:
    """out: where crashes, logs and new inputs go; only: names of targets with commas; "": all."""

    def __init__(self, out: Path, only: str) -> None:
        self.out = out.resolve()
        names = only.split(",") if only else list(TARGETS)
        unknown = [name for name in names if name not in TARGETS]
        if unknown:
            sys.exit(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
        self.names = names
        self._running: list[Job] = []
        self.finished: list[Job] = []

    def run(self, runs: int, jobs: int) -> int:
        """So many inputs, all targets together; 1 if any broke a promise."""
        (self.out / "crashes").mkdir(parents=True, exist_ok=True)
        shares = sum(TARGETS[name].share for name in self.names)
        waiting = [(name, runs * TARGETS[name].share // shares) for name in self.names]
        waiting.sort(key=lambda one: -TARGETS[one[0]].cost * one[1])
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with tempfile.TemporaryDirectory(prefix="dpsfuzz") as scratch:
            try:
                while waiting or self._running:
                    while waiting and len(self._running) < jobs:
                        self._running.append(self._start(*waiting.pop(0), scratch))
                    self._wait()
            except KeyboardInterrupt:
                print("stopped", flush=True)
            finally:
                while self._running:
                    job = self._running[-1]
                    if job.process is not None and job.process.poll() is None:
                        job.process.kill()
                        job.process.wait()
                        job.stopped = True
                    self._ended(job)
        return self._tell()

    def _start(self, name: str, runs: int, scratch: str) -> Job:
        found = self.out / name
        found.mkdir(exist_ok=True)
        for number, seed in enumerate(seeds(name)):
            (found / f"seed-{number}").write_bytes(seed)
        kept = CORPUS / name
        job = Job(name, runs, self.out / f"{name}.log")
        command = [sys.executable, "-m", "tests.fuzz", "--child", name]
        command += [str(found), *([str(kept)] if kept.is_dir() else []), f"-runs={runs}"]
        command += [f"-max_len={TARGETS[name].most}", f"-timeout={TIMEOUT}"]
        command += [f"-rss_limit_mb={MEMORY_MIB}", "-print_final_stats=1", "-len_control=20"]
        command += [f"-artifact_prefix={self.out}/crashes/{name}-"]
        with open(job.log, "wb") as log:
            job.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - there are no threads here
                env=environment(scratch),
            )
        print(f"{name}: {runs:,} inputs, log {job.log}", flush=True)
        return job

    def _wait(self) -> None:
        """Until one has ended, or it is time to tell how far they are."""
        until = time.monotonic() + TELL_SECONDS
        while time.monotonic() < until:
            for job in list(self._running):
                if job.process is not None and job.process.poll() is not None:
                    self._ended(job)
                    return
            time.sleep(0.2)
        for job in self._running:
            spent = time.monotonic() - job.began
            done = job.done()
            print(f"{job.name}: {done:,} of {job.runs:,}, {done / spent:,.0f}/s", flush=True)

    def _ended(self, job: Job) -> None:
        job.seconds = time.monotonic() - job.began
        self._running.remove(job)
        self.finished.append(job)
        print(job.summary(), flush=True)
        with open(self.out / "runs.md", "a") as file:
            file.write(job.summary() + "\n")

    def _so_far(self) -> int:
        """Inputs of all runs that wrote to this place."""
        rows = (self.out / "runs.md").read_text().splitlines()
        return sum(int(row.split("|")[2].replace(",", "")) for row in rows)

    def _tell(self) -> int:
        print("\n| target | inputs | seconds | per second | peak RSS MiB | features | |")
        print("|---|---|---|---|---|---|---|")
        for job in sorted(self.finished, key=lambda job: self.names.index(job.name)):
            print(job.summary())
        print(f"\n{sum(job.done() for job in self.finished):,} inputs")
        print(f"with all earlier runs into {self.out}: {self._so_far():,}")
        crashes = sorted((self.out / "crashes").iterdir())
        for crash in crashes:
            print(f"broke a promise: {crash}")
        return int(bool(crashes) or any(job.failed for job in self.finished))


def environment(scratch: str) -> dict[str, str]:
    """Of a child: files of an input stand in `scratch`, which the parent removes."""
    import os

    kept = {k: v for k, v in os.environ.items() if not k.startswith("DP_SIDECAR")}
    return {**kept, "TMPDIR": scratch, "PYTHONHASHSEED": "0"}
