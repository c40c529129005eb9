"""Command line: every verb."""

import argparse
import os
import resource
import sys
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import uvloop

from sidecar import __version__, config, logs, top
from sidecar.errors import ConfigError, ControlError, EndpointError, RefusedError
from sidecar.journal_cli import VERBS, add_verbs, obey_log
from sidecar.keygen import keygen
from sidecar.logs import logger
from sidecar.policy_cli import TAKE_PARAMS, add_policy, obey
from sidecar.server import Server

USAGE_EXIT = 2  # as argparse
# EX_UNAVAILABLE of sysexits.h: the address is held by somebody else, or no sidecar listens there
UNAVAILABLE_EXIT = 69
_MANY_FILES = 65_536

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def parser() -> argparse.ArgumentParser:
    """Every setting of `sidecar.config` is a flag of `serve`, `run`, `config` and `check`."""
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
        ("check", "say what is wrong with the settings and the environment, and how to fix it"),
    ):
        sub = verbs.add_parser(verb, help=text, description=text)
        _add_settings(sub, [key.flag for key in config.settings()])
        if verb == "run":
            _add_server(sub)
        if verb == "serve":
            sub.add_argument(
                "--take-over",
                action="store_true",
                help="take the place of the sidecar that serves the endpoint, if there is one",
            )
        if verb == "check":
            sub.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_policy(verbs, _add_settings)
    add_verbs(verbs)
    _add_top(verbs)
    _add_keygen(verbs)
    return top


def _add_server(sub: argparse.ArgumentParser) -> None:
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


def _add_settings(sub: argparse.ArgumentParser, flags: Container[str]) -> None:
    sub.add_argument("--config", metavar="FILE", help="TOML file; deploy/config has the defaults")
    for key in config.settings():
        if key.flag in flags:
            default = f" (default: {key.default}; {key.env})".replace("%", "%%")
            sub.add_argument(
                key.flag, dest=key.flag, metavar="VALUE", help=key.description + default
            )


def _add_top(verbs: "Verbs") -> None:
    text = "watch a running sidecar in the terminal"
    sub = verbs.add_parser("top", help=text, description=text)
    _add_settings(sub, top.SETTINGS)
    top.add_arguments(sub)


def _add_keygen(verbs: "Verbs") -> None:
    text = "make the CURVE keys that encrypt and guard TCP, and say what goes where"
    sub = verbs.add_parser("keygen", help=text, description=text)
    sub.add_argument("directory", metavar="DIR", help="where to write them; nothing is overwritten")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `sglang-dp-sidecar`; returns the exit code."""
    known, more = parser().parse_known_args(argv)
    arguments = vars(known)
    if more and arguments.get("action") not in TAKE_PARAMS and arguments["verb"] != "replay":
        parser().error(f"unrecognized arguments: {' '.join(more)}")
    try:
        return _obey(arguments, more)
    except (ConfigError, ControlError) as error:
        print(f"sglang-dp-sidecar: {error}", file=sys.stderr)
        usage = isinstance(error, ConfigError | RefusedError)
        return USAGE_EXIT if usage else UNAVAILABLE_EXIT
    except EndpointError as error:
        logger.error("cannot serve: %s", error)
        return UNAVAILABLE_EXIT


def _obey(arguments: dict[str, Any], more: Sequence[str]) -> int:
    if arguments["verb"] == "keygen":
        sys.stdout.write(keygen(arguments["directory"]))
        return 0
    if arguments["verb"] in VERBS:
        return obey_log(arguments, more)
    flags = {
        name: value for name, value in arguments.items() if name[:2] == "--" and value is not None
    }

    def load() -> config.Config:
        return config.load(arguments["config"], os.environ, flags)

    if arguments["verb"] == "check":  # a configuration that cannot be read is a finding
        # Late, as it needs what a sidecar imports only once it serves.
        from sidecar.check import check

        return check(load, as_json=arguments["json"])
    return _configured(load, arguments, flags, more)


def _configured(
    load: config.Loader, arguments: dict[str, Any], flags: dict[str, str], more: Sequence[str]
) -> int:
    """Obey a verb that needs a sound configuration."""
    settings, verb = load(), arguments["verb"]
    if verb == "config":
        sys.stdout.write(config.render(settings))
        return 0
    if verb == "policy":
        return obey(settings, arguments, more)
    if verb == "top":
        return top.top(settings.admin.host, settings.admin.port, arguments)
    logs.configure(settings.log.level, settings.log.format)
    if verb == "run":
        from sidecar.run import run

        server, module = arguments["server"], arguments["server_module"]
        return run(settings, arguments["config"], flags, server, module)
    again = [sys.executable, "-m", "sidecar", "serve", "--take-over"]
    again += [f"--config={arguments['config']}"] if arguments["config"] else []
    again += [f"{flag}={value}" for flag, value in flags.items()]
    _allow_files()
    uvloop.run(
        _serve(
            settings,
            load,
            take_over=arguments["take_over"],
            successor=again,
            file=arguments["config"],
        )
    )
    return 0


def _allow_files() -> None:
    """Raise the limit of open files: libzmq aborts the process if it has none left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < many:
        resource.setrlimit(resource.RLIMIT_NOFILE, (many, hard))


async def _serve(settings: config.Config, load: config.Loader, **how: Any) -> None:
    await Server(settings, load, **how).run()
