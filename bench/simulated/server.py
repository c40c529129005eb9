"""The real SGLang server with simulated schedulers.

    python -m bench.simulated.server --port P [--dp-size 8] [--plain-dp] [SGLang's arguments]

This process watches over the server, so that its temporary model, its children and its files under
/dev/shm go away however it ends, and keeps ranks under DP attention in step. Timing comes from
`bench.simulated.settings`.
"""

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from bench.model.steps import StepTimes
from bench.simulated.coordinator import Coordinator
from bench.simulated.model import write_model
from bench.simulated.settings import PREFIX, read_settings

# SGLang looks every five seconds whether its requests are drained, then kills itself. Nothing
# here is worth that wait.
STOP_SECONDS = 1.0
_LOAD_FILE = re.compile(r"/dev/shm/sglang_loads_\S+")
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def server_arguments(argv: list[str], model_path: str) -> list[str]:
    """SGLang's command line: what was given, and our defaults for what was not."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--plain-dp", action="store_true")
    parser.add_argument("--dp-size", "--data-parallel-size", type=int, default=8)
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int)
    own, rest = parser.parse_known_args(argv)
    plain = own.plain_dp or own.tp_size == 1 or own.dp_size == 1
    tp_size = own.tp_size or (1 if plain else own.dp_size)
    defaults = {
        "--model-path": model_path,
        "--served-model-name": "simulated",
        "--device": "cpu",
        "--load-format": "dummy",
        "--log-level": "warning",
        "--enable-cache-report": None,
    }
    if not plain:
        defaults |= {
            "--enable-dp-attention": None,
            "--enable-dp-attention-local-control-broadcast": None,
        }
    arguments = [*rest, "--dp-size", str(own.dp_size), "--tp-size", str(tp_size)]
    given = {argument.split("=")[0] for argument in rest}
    for name, value in defaults.items():
        if name not in given:
            arguments += [name] if value is None else [name, value]
    return arguments


def _environment(barrier: str) -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return quiet | os.environ | {f"{PREFIX}BARRIER": barrier}


def _die_with_supervisor() -> None:
    """Runs in the child before it is the server, so that not even a SIGKILL here orphans it."""
    with suppress(AttributeError):  # Linux only
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _start(arguments: list[str], barrier: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "bench.simulated.serve", *arguments],
        env=_environment(barrier),
        # Out of reach of Ctrl-C: the children must live until `_stop` has seen their files.
        start_new_session=True,
        preexec_fn=_die_with_supervisor,
    )


def _load_files(processes: list[psutil.Process]) -> set[str]:
    files: set[str] = set()
    for process in processes:
        with suppress(OSError):
            files |= set(_LOAD_FILE.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    return files


def _stop(server: "subprocess.Popen[bytes]") -> None:
    tree: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(server.pid)
        tree = [root, *root.children(recursive=True)]
    files = _load_files(tree)
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(STOP_SECONDS)
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(tree, timeout=2)
    for file in files:
        Path(file).unlink(missing_ok=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    # Only once: a second signal must not break off the cleaning up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    settings = read_settings()  # a mistake should show here, not in eight children
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    with tempfile.TemporaryDirectory(prefix="simulated-model-") as folder:
        write_model(Path(folder))
        barrier = str(Path(folder) / "barrier")
        coordinator = Coordinator(barrier, StepTimes(settings), settings.time_scale)
        server = _start(server_arguments(sys.argv[1:], folder), barrier)
        # Its thread starts after the fork, so that the child inherits no lock that it holds, and
        # ends after the ranks, which do not live without it.
        with coordinator:
            try:
                return server.wait()
            except KeyboardInterrupt:
                return 0
            finally:
                _stop(server)


if __name__ == "__main__":
    sys.exit(main())
