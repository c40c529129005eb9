"""`sglang-dp-sidecar top`: a running sidecar, live in the terminal."""

import argparse
from collections.abc import Mapping
from typing import Any

from sidecar.errors import ConfigError

LEAST_INTERVAL, MOST_INTERVAL = 0.1, 60.0
SETTINGS = ("--admin-host", "--admin-port")
"""Flags that `top` shares with `serve`: where the sidecar listens."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """The flags of `top` itself."""
    sub.add_argument("--url", help="the sidecar (default: its address by the settings)")
    sub.add_argument(
        "--interval",
        default="1",
        metavar="SECONDS",
        help=f"between two questions, {LEAST_INTERVAL:g} to {MOST_INTERVAL:g} (default: 1)",
    )
    sub.add_argument(
        "--once",
        action="store_true",
        help="print what one interval shows as plain text, every rank, and exit",
    )


def top(host: str, port: int, arguments: Mapping[str, Any]) -> int:
    """Obey; the exit code.

    host, port: where the settings say that the sidecar's HTTP is. Raises ConfigError, and with
    --once ControlError if no sidecar answers.
    """
    # rich costs some 0.1 s: no other verb pays for it.
    from sidecar.top.screen import print_once, watch
    from sidecar.top.source import Source, url_of

    interval = _interval(arguments["interval"])
    source = Source(arguments["url"] or url_of(host, port))
    return (print_once if arguments["once"] else watch)(source, interval)


def _interval(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not LEAST_INTERVAL <= seconds <= MOST_INTERVAL:  # nan too
        raise ConfigError(
            f"--interval {given!r}: must be {LEAST_INTERVAL:g} to {MOST_INTERVAL:g} seconds"
        )
    return seconds
