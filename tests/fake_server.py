"""Stands in for `sglang.launch_server`: notes how it was started and which signals it got.

FILE gets JSON: argv, endpoint, pid, signals. It ends at once with --exit N or --die-by SIGNAL;
else on SIGTERM or SIGINT with code N of --on-signal N, or, without it, on SIGUSR1 with code 0.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--exit", type=int)
    parser.add_argument("--die-by", type=int)
    parser.add_argument("--on-signal", type=int)
    arguments, _ = parser.parse_known_args()
    signals: list[str] = []
    tell(arguments.record, signals)
    if arguments.die_by:
        os.kill(os.getpid(), arguments.die_by)
    if arguments.exit is not None:
        return arguments.exit

    numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    tell(arguments.record, signals, ready=True)
    while True:
        number = signal.sigwait(numbers)
        signals.append(signal.Signals(number).name)
        tell(arguments.record, signals, ready=True)
        if number == signal.SIGUSR1:
            return 0
        if arguments.on_signal is not None and number in (signal.SIGTERM, signal.SIGINT):
            return arguments.on_signal


def tell(file: Path, signals: list[str], *, ready: bool = False) -> None:
    """Write the whole record at once."""
    record = {
        "argv": sys.argv[1:],
        "endpoint": os.environ.get("DP_SIDECAR_ENDPOINT"),
        "insecure": os.environ.get("DP_SIDECAR_ALLOW_INSECURE_TCP"),
        "pid": os.getpid(),
        "signals": signals,
        "ready": ready,
    }
    part = file.with_suffix(".part")
    part.write_text(json.dumps(record))
    part.replace(file)


if __name__ == "__main__":
    sys.exit(main())
