"""Entry point of `sglang-dp-sidecar`: says what to install where only the hook is installed."""

import signal
import sys
from collections.abc import Sequence

UNAVAILABLE_EXIT = 69  # EX_UNAVAILABLE of sysexits.h: a program or file that is needed is not there

# Import names of the extra `daemon` in pyproject.toml. The hook's own are not here: without them
# the installation is broken, and the traceback says more.
DAEMON_MODULES = frozenset({"aiohttp", "prometheus_client", "rich", "tomli", "uvloop"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 69 if the extra `daemon` is not installed."""
    if list(sys.argv[1:] if argv is None else argv)[:1] == ["serve"]:
        # Until the server handles them, a reload or an upgrade must not be the end of it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        # Late, like what it imports late itself: this is what may be missing.
        from sidecar import cli

        return cli.main(argv)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in DAEMON_MODULES:
            raise
        print(
            f"sglang-dp-sidecar: {package} is not installed: the hook does without it, the sidecar "
            "needs the extra `daemon`: pip install 'sglang-dp-sidecar[daemon]', or '.[daemon]' in "
            "a checkout",
            file=sys.stderr,
        )
        return UNAVAILABLE_EXIT
