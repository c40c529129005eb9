"""SGLang's gateway `smg` as arms: it chooses the DP rank before SGLang sees the request.

An arm is `smg_<policy>`, and its parameters are flags of `smg launch`: assignment_mode=min_load is
`--assignment-mode min_load`, x=true is `--x`. A cell has a gateway process of its own, so that what
gateways remember of keys and prompts is as empty as the server's cache. smg 1.13.0 refuses token
ids on /v1/completions; on /generate it takes them, with the key in the header alone.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import msgspec

from bench.arms import ArmError, split_spec
from bench.live.children import die_with_parent
from bench.live.drive import DriveError
from bench.live.target import TargetError, fetch
from bench.simulated.launch import ServerDied, free_port

PREFIX = "smg_"
READY_SECONDS = 60.0
_POLL_SECONDS = 0.1
_CHECK_SECONDS = 60.0
_LOG_TAIL = 2000
_OURS = ("host", "port", "worker-urls", "dp-aware", "policy", "prometheus-host", "prometheus-port")
_INSTALL = (
    "install it in an environment of its own (python -m venv DIR && DIR/bin/pip install "
    "smg==1.13.0) and set SMG=DIR/bin/smg, or put it on PATH"
)


class Peer(msgspec.Struct, frozen=True):
    """What an arm starts."""

    executable: str
    version: str
    policy: str
    flags: tuple[str, ...] = ()

    def command(self, server: str, port: int, prometheus: int) -> list[str]:
        """Flags given come last, so they win."""
        own = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", server, "--dp-aware"]
        own += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus)]
        # Two lines a request otherwise.
        own += ["--log-level", "warn", "--policy", self.policy]
        return [self.executable, "launch", *own, *self.flags]

    def about(self) -> dict[str, object]:
        """For the report."""
        return {"version": self.version, "policy": self.policy, "flags": list(self.flags)}


def is_peer(spec: str) -> bool:
    """Whether an arm is a gateway's."""
    return spec.startswith(PREFIX)


def peer_of(spec: str) -> Peer:
    """What `spec` asks for, as far as smg itself finds it right. Raises ArmError."""
    name, given = split_spec(spec)
    wanted = os.environ.get("SMG") or "smg"
    executable = shutil.which(wanted)
    if executable is None:
        raise ArmError(f"arm {spec!r}: there is no executable {wanted!r}; {_INSTALL}")
    policy, flags = name.removeprefix(PREFIX), []
    for parameter, value in given.items():
        flag = parameter.replace("_", "-")
        if flag in _OURS:
            raise ArmError(f"arm {spec!r}: {parameter} is not for you to set")
        flags += [f"--{flag}"] if value == "true" else [f"--{flag}", value]
    told = _ask(spec, executable, "launch", "--policy", policy, *flags, "--help")
    for flag in flags:
        if flag.startswith("--") and not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", told):
            raise ArmError(f"arm {spec!r}: `smg launch` has no {flag}")
    version = _ask(spec, executable, "--version").strip()
    return Peer(executable, version, policy, tuple(flags))


def _ask(spec: str, executable: str, *arguments: str) -> str:
    """What it prints. argparse looks at the flags before `--help`, so wrong values are told."""
    try:
        found = subprocess.run(
            [executable, *arguments],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHECK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ArmError(f"arm {spec!r}: {error}; {_INSTALL}") from None
    if found.returncode:
        lines = found.stderr.strip().splitlines() or [f"exit code {found.returncode}"]
        raise ArmError(f"arm {spec!r}: {lines[-1]}")
    return found.stdout


def _environment() -> dict[str, str]:
    """Ours, without what would lead another environment's Python to our packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@contextlib.contextmanager
def gateway(peer: Peer, server: str, ranks: int, log: Path) -> Iterator[str]:
    """A gateway that knows every rank of the server; its URL. Stopped with all its processes.

    Raises ServerDied, TimeoutError.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = _start(peer.command(server, port, free_port()), log)
    try:
        _wait_ready(process, url, ranks, log)
        yield url
        _check_alive(process, log)
    except DriveError:
        _check_alive(process, log)
        raise
    finally:
        _end(process)


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGKILL),
        )


def _wait_ready(process: subprocess.Popen[bytes], url: str, ranks: int, log: Path) -> None:
    """It listens before it knows its workers."""
    end = monotonic() + READY_SECONDS
    found: set[int] = set()
    while monotonic() < end:
        _check_alive(process, log)
        with contextlib.suppress(TargetError):
            found = _ranks(url)
        if found == set(range(ranks)):
            return
        sleep(_POLL_SECONDS)
    raise TimeoutError(
        f"smg knows {len(found)} of {ranks} DP ranks after {READY_SECONDS:.0f} s:\n{_tail(log)}"
    )


def _ranks(url: str) -> set[int]:
    """DP ranks to which it would send. Raises TargetError."""
    try:
        workers = json.loads(fetch(f"{url}/workers", timeout=5.0))["workers"]
        return {int(each["dp_rank"]) for each in workers if each["is_healthy"]}
    except (ValueError, KeyError, TypeError):
        # Without dp_rank: a worker that it does not take for a DP rank.
        return set()


def _check_alive(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise ServerDied(f"smg ended early, exit code {process.returncode}:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_TAIL:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """At once: asked politely, it keeps its listener open for 5 s."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
