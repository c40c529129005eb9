"""Command line: serve, run, config, policy."""

import argparse
import os
import signal
import sys
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from sidecar import __version__, config, logs
from sidecar.control import Control, control_path
from sidecar.errors import ConfigError, ControlError, EndpointError, RefusedError
from sidecar.logs import logger
from sidecar.server import Server

USAGE_EXIT = 2  # as argparse
# EX_UNAVAILABLE of sysexits.h: the address is held by somebody else, or no sidecar listens there
UNAVAILABLE_EXIT = 69

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


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
        _add_settings(sub, [key.flag for key in config.settings()])
        if verb == "run":
            _add_server(sub)
    _add_policy(verbs)
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


def _add_policy(verbs: "Verbs") -> None:
    text = "show or swap the policy of a running sidecar"
    policy = verbs.add_parser("policy", help=text, description=text)
    actions = policy.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text in (
        ("show", "print the policy in force as JSON"),
        ("set", "swap the policy, until a restart or a reload; parameters left out take defaults"),
    ):
        sub = actions.add_parser(action, help=text, description=text)
        _add_settings(sub, ("--endpoint", "--control"))
        if action == "set":
            sub.add_argument("name", metavar="NAME", help="a policy of docs/policies.md")
            sub.add_argument(
                "params",
                nargs="*",
                metavar="PARAM=VALUE",
                help="one of its parameters: a number, true, false, or text",
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `sglang-dp-sidecar`; returns the exit code."""
    arguments = vars(parser().parse_args(argv))
    try:
        return _obey(arguments)
    except (ConfigError, ControlError) as error:
        print(f"sglang-dp-sidecar: {error}", file=sys.stderr)
        usage = isinstance(error, ConfigError | RefusedError)
        return USAGE_EXIT if usage else UNAVAILABLE_EXIT
    except EndpointError as error:
        logger.error("cannot serve: %s", error)
        return UNAVAILABLE_EXIT


def _obey(arguments: dict[str, Any]) -> int:
    flags = {
        name: value for name, value in arguments.items() if name[:2] == "--" and value is not None
    }

    def load() -> config.Config:
        return config.load(arguments["config"], os.environ, flags)

    settings, verb = load(), arguments["verb"]
    if verb == "config":
        sys.stdout.write(config.render(settings))
        return 0
    if verb == "policy":
        return _policy(settings, arguments)
    logs.configure(settings.log.level, settings.log.format)
    if verb == "run":
        from sidecar.run import run

        server, module = arguments["server"], arguments["server_module"]
        return run(settings, arguments["config"], flags, server, module)
    # Until the server handles it, a reload must not be the end of it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    uvloop.run(_serve(settings, load))
    return 0


async def _serve(settings: config.Config, load: config.Loader) -> None:
    await Server(settings, load).run()


def _policy(settings: config.Config, arguments: dict[str, Any]) -> int:
    """`policy show`, `policy set`. Raises ConfigError and ControlError."""
    path = control_path(settings.serve.endpoint, settings.serve.control)
    if not path:
        raise ConfigError(
            f"serve.control: a sidecar at {settings.serve.endpoint} has a control socket only if "
            "this names one (--control, DP_SIDECAR_CONTROL)"
        )
    control = Control(path)
    if arguments["action"] == "show":
        state = control.show()
    else:
        state = control.set_policy(arguments["name"], _params(arguments["params"]))
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(state), indent=2).decode() + "\n")
    return 0


def _params(given: Iterable[str]) -> dict[str, Any]:
    """`PARAM=VALUE ...` as parameters. Raises ConfigError."""
    params: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise ConfigError(f"policy set: {item!r} is not PARAM=VALUE")
        if name in params:
            raise ConfigError(f"policy set: {name} is given twice")
        params[name] = _scalar(value)
    return params


def _scalar(text: str) -> Any:
    """A JSON number, boolean or string; anything else is text as it stands."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str) else text
