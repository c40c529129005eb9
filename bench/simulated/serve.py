"""`sglang.launch_server` with simulated schedulers; `bench.simulated.server` starts it."""

import os
import sys

from bench.simulated.process import run_simulated_scheduler_process


def main() -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(sys.argv[1:])
    # Arguments resolve themselves from 0.5.21 on; before, they are already.
    getattr(server_args, "resolve_once", lambda: None)()
    try:
        launch_server(server_args, run_scheduler_process_func=run_simulated_scheduler_process)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
