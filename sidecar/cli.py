"""Command line: serve, run, config."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import uvloop

from sidecar import __version__, config, logs
from sidecar.errors import ConfigError, EndpointError
from sidecar.logs import logger
from sidecar.server import Server

USAGE_EXIT = 2  # as argparse
UNAVAILABLE_EXIT = 69  # EX_UNAVAILABLE of sysexits.h: the address is held by somebody else


def parser() -> argparse.ArgumentParser:
    """Every setting of `sidecar.config` is a flag of `serve`, `run` and `config`."""
    top = argparse.ArgumentParser(
        prog="sglang-dp-sidecar",
        description="Chooses the data-parallel rank of each request of an SGLang server.",
    )
    top.add_argument("--version", action="version", version=__version__)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in (
        ("serve", "run the sidecar"),
        ("run", "run the sidecar and, after --, an SGLang server beside it"),
        ("config", "print the settings in force as a TOML file"),
    ):
        sub = verbs.add_parser(verb, help=text, description=text)
        sub.add_argument(
            "--config", metavar="FILE", help="TOML file; deploy/config has the defaults"
        )
        for key in config.settings():
            default = f" (default: {key.default}; {key.env})".replace("%", "%%")
            sub.add_argument(
                key.flag, dest=key.flag, metavar="VALUE", help=key.description + default
            )
        if verb == "run":
            sub.add_argument(
                "--server-module",
                default="sglang.launch_server",
                metavar="MODULE",
                help="what `python -m` starts as the server (default: sglang.launch_server)",
            )
            sub.add_argument(
                "server",
                nargs=argparse.REMAINDER,
                metavar="-- ARGUMENT ...",
                help="arguments of `python -m sglang.launch_server`",
            )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `sglang-dp-sidecar`; returns the exit code."""
    arguments = vars(parser().parse_args(argv))
    flags = {
        name: value for name, value in arguments.items() if name[:2] == "--" and value is not None
    }

    def load() -> config.Config:
        return config.load(arguments["config"], os.environ, flags)

    try:
        settings = load()
        if arguments["verb"] == "config":
            sys.stdout.write(config.render(settings))
            return 0
        logs.configure(settings.log.level, settings.log.format)
        if arguments["verb"] == "run":
            from sidecar.run import run

            return run(
                settings,
                arguments["config"],
                flags,
                arguments["server"],
                arguments["server_module"],
            )
        # Until the server handles it, a reload must not be the end of it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        uvloop.run(_serve(settings, load))
    except ConfigError as error:
        print(f"sglang-dp-sidecar: {error}", file=sys.stderr)
        return USAGE_EXIT
    except EndpointError as error:
        logger.error("cannot serve: %s", error)
        return UNAVAILABLE_EXIT
    return 0


async def _serve(settings: config.Config, load: config.Loader) -> None:
    await Server(settings, load).run()
