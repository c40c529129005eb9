"""Start and stop a simulated server from a test or a demo."""

import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
STOP_SECONDS = 12.0
_POLL_SECONDS = 0.25
_LOG_TAIL = 4000


class ServerDied(RuntimeError):
    """The server ended before it was ready; the message ends with the tail of its log."""


# Below what the kernel gives to connections (32768 on Linux): SGLang takes ports from its own + 233
# on, and about one start in five found one of them in use by the server's own process.
_PORTS = range(12_000, 32_000)
_SGLANG_OFFSETS = (0, *range(233, 241))


def free_port() -> int:
    """A port for a server, and those after it that SGLang derives are free as well."""
    for _ in range(100):
        # Not of the seeded generator: processes with one seed would meet at one port.
        port = random.SystemRandom().choice(_PORTS)
        if all(_is_free(port + offset) for offset in _SGLANG_OFFSETS):
            return port
    raise RuntimeError(f"no free ports from {_PORTS.start} to {_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class SimulatedServer:
    """A server in its own session; as a context manager it is started, not awaited."""

    def __init__(
        self,
        dp_size: int = 8,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        port: int | None = None,
        python_path: Sequence[str] = (),
        log_path: Path | None = None,
    ) -> None:
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path or Path(tempfile.mkstemp(".log", "simulated-server-")[1])
        module = [sys.executable, "-m", "bench.simulated.server"]
        self._command = [*module, "--port", str(self.port), "--dp-size", str(dp_size), *args]
        # PYTHONSAFEPATH: whoever set it has the checkout on the path, behind what is installed.
        checkout = "" if os.environ.get("PYTHONSAFEPATH") else str(REPOSITORY)
        paths = [*python_path, checkout, os.environ.get("PYTHONPATH", "")]
        search = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        self._environment = {**os.environ, **(env or {}), **search}
        self._process: subprocess.Popen[bytes] | None = None
        self._before_exec: Callable[[], None] | None = None

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._before_exec,
            )

    def wait_ready(
        self, timeout: float = 180.0, on_progress: Callable[[float], None] | None = None
    ) -> float:
        """Wait until a scheduler has answered; returns the seconds it took."""
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < timeout:
            if self._process is None or self._process.poll() is not None:
                raise ServerDied(f"the simulated server ended early:\n{self.log_tail()}")
            if self._is_healthy():
                return elapsed
            if on_progress is not None:
                on_progress(elapsed)
            time.sleep(_POLL_SECONDS)
        raise TimeoutError(f"not ready after {timeout:.0f} s:\n{self.log_tail()}")

    def _is_healthy(self) -> bool:
        # 503 until SGLang's own warm-up is over, so a test never counts warm-up requests.
        try:
            with urllib.request.urlopen(f"{self.base_url}/health_generate", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-_LOG_TAIL:]

    def pids(self) -> dict[str, list[int]]:
        """Process ids by role; schedulers in the order of their ranks."""
        found: dict[str, list[tuple[int, int]]] = {"controller": [], "schedulers": []}
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                found.setdefault(_role(title), []).append((_rank(title), process.pid))
        return {role: [pid for _, pid in sorted(pairs)] for role, pairs in found.items()}

    def memory_bytes(self) -> int:
        """Proportional set size of the whole tree: shared pages count once."""
        total = 0
        for process in self._tree():
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def _tree(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def stop(self) -> None:
        """End every process of the server; may be called again, or without a start."""
        tree = self._tree()
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        # The supervisor has done this already, unless it was itself stuck or killed.
        for each in tree:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()

    def __enter__(self) -> "SimulatedServer":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _role(title: str) -> str:
    roles = {"scheduler_": "schedulers", "data_parallel": "controller", "detok": "detokenizer"}
    for prefix, role in roles.items():
        if title.startswith(f"sglang::{prefix}"):
            return role
    modules = {"bench.simulated.serve ": "server", "bench.simulated.server ": "supervisor"}
    return next((role for module, role in modules.items() if module in title), "other")


def _rank(title: str) -> int:
    match = re.search(r"_DP(\d+)", title)
    return int(match[1]) if match else 0
