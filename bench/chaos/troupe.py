"""One process that has imported everything and forks controllers and ranks off when told to.

`python -m bench.chaos.troupe` reads a line of JSON a process, and answers with its id. Whatever it
forked ends with it, and it ends with whoever holds its standard input.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from bench.chaos.controller import Cast, Controller
from bench.chaos.scheduler import Scheduler
from bench.live.children import die_with_parent


def fork(order: dict[str, Any]) -> int:
    """A process that plays the part; its id."""
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.close(nothing)
        cast = Cast(Path(order["folder"]), *order["cast"])
        if order["rank"] is None:
            Controller(cast).run()
        else:
            Scheduler(cast, order["rank"]).run()
    except BaseException:  # noqa: BLE001 - a child must not go on as its parent
        traceback.print_exc()
    finally:
        os._exit(1)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for line in sys.stdin:
        print(fork(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
