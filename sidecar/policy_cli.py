"""`sglang-dp-sidecar policy`: show, list, set, reload, history, shadow and canary."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sidecar import config
from sidecar.errors import ConfigError, EndpointError
from sidecar.listener import control_path
from sidecar.orders import Change, Listed
from sidecar.tokens import read_token
from sidecar.wire import check_endpoint

if TYPE_CHECKING:
    from sidecar.control import Control

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

SETTINGS = ("--endpoint", "--control", "--admin-token-file")
TAKE_PARAMS = ("set", "shadow", "canary")
"""Actions whose unknown arguments are parameters of the policy."""
OFF = "off"
_PARAMS = "its parameters, PARAM=VALUE or --param VALUE; those left out take defaults"
_ACTIONS = (
    ("show", "print the policies at work as JSON"),
    ("list", "print every policy there is, with its parameters"),
    ("set", "swap the policy, until a restart or a reload"),
    ("reload", "read the configuration again, as SIGHUP does"),
    ("history", "print what changed since the sidecar started"),
    ("shadow", "let a second policy decide every request too, without acting"),
    ("canary", "let a second policy decide for a share of the affinity keys"),
)


def add_policy(verbs: "Verbs", add_settings: Callable[..., None]) -> None:
    """Add the verb. add_settings: adds flags of `sidecar.config` to a parser."""
    text = "show or change the policy of a running sidecar"
    policy = verbs.add_parser("policy", help=text, description=text)
    actions = policy.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text in _ACTIONS:
        sub = actions.add_parser(action, help=text, description=text, allow_abbrev=False)
        add_settings(sub, SETTINGS)
        sub.add_argument(
            "--url",
            metavar="URL",
            help="http://HOST:PORT of a sidecar with admin.token_file, instead of the socket",
        )
        if action in ("show", "list", "history"):
            sub.add_argument(
                "--json",
                action="store_true",
                help="as JSON; `show` always is" if action == "show" else "as JSON",
            )
        if action in TAKE_PARAMS:
            off = "" if action == "set" else f"; {OFF}: end it"
            sub.add_argument("name", metavar="NAME", help=f"a policy of `policy list`{off}")
            sub.add_argument("params", nargs="*", metavar="PARAM=VALUE", help=_PARAMS)
        if action == "canary":
            sub.add_argument(
                "--share", type=float, metavar="SHARE", help="that share: 0.05 is one key in 20"
            )


def obey(settings: config.Config, arguments: dict[str, Any], more: Sequence[str]) -> int:
    """Do what the command line says; prints the answer.

    more: arguments that the parser does not know, parameters of the policy. Raises ConfigError and
    ControlError.
    """
    control = _control(settings, arguments)
    action = arguments["action"]
    if action == "list":
        _print(control.list(), arguments, _listing)
    elif action == "history":
        _print(control.history(), arguments, _history)
    else:
        state = _act(control, action, arguments, more)
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(state), indent=2).decode() + "\n")
    return 0


def _act(control: "Control", action: str, arguments: dict[str, Any], more: Sequence[str]) -> Any:
    if action == "show":
        return control.show()
    if action == "reload":
        _check_file(control.show().config, arguments["config"])
        return control.reload()
    name = arguments["name"]
    given = [*arguments["params"], *more]
    if name == OFF and action != "set":
        if given or arguments.get("share") is not None:
            raise ConfigError(f"policy {action} {OFF}: takes no parameters")
        return control.shadow_off() if action == "shadow" else control.canary_off()
    params = parameters(action, given)
    if action == "set":
        return control.set_policy(name, params)
    if action == "shadow":
        return control.set_shadow(name, params)
    if arguments["share"] is None:
        raise ConfigError("policy canary: say which share of the keys, --share 0.05 for instance")
    return control.set_canary(name, arguments["share"], params)


def _check_file(reads: str, given: str | None) -> None:
    """A reload reads the file that the sidecar was started with, whatever is named here."""
    if given is not None and os.path.realpath(given) != os.path.realpath(reads or os.devnull):
        raise ConfigError(
            f"--config: the sidecar reads {reads or 'no file'}, not {given}; start it with "
            f"--config {given}"
        )


def _control(settings: config.Config, arguments: dict[str, Any]) -> "Control":
    from sidecar.control import Control  # late: the command line is the sidecar's too

    if arguments["url"]:
        if not arguments["url"].startswith("http://"):
            raise ConfigError(f"--url: {arguments['url']!r} is not http://HOST:PORT")
        if not settings.admin.token_file:
            raise ConfigError("--url: needs --admin-token-file, the file that the sidecar has too")
        return Control(arguments["url"], token=read_token(settings.admin.token_file))
    try:
        check_endpoint(settings.serve.endpoint, allow_tcp=True)
    except EndpointError as error:
        raise ConfigError(f"serve.endpoint: {error}") from None
    path = control_path(settings.serve.endpoint, settings.serve.control)
    if not path:
        raise ConfigError(
            f"serve.control: a sidecar at {settings.serve.endpoint} has a control socket only if "
            "this names one (--control, DP_SIDECAR_CONTROL)"
        )
    return Control(path)


def parameters(action: str, given: Sequence[str]) -> dict[str, Any]:
    """`PARAM=VALUE`, `--param=VALUE` and `--param VALUE` as parameters. Raises ConfigError."""
    params: dict[str, Any] = {}
    rest = list(given)
    while rest:
        item = rest.pop(0)
        name, equals, value = item.partition("=")
        if not equals and name.startswith("--") and rest:
            equals, value = "=", rest.pop(0)
        if name.startswith("--"):
            name = name[2:].replace("-", "_")
        if not name or not equals:
            raise ConfigError(f"policy {action}: {item!r} is not PARAM=VALUE or --param VALUE")
        if name in params:
            raise ConfigError(f"policy {action}: {name} is given twice")
        params[name] = _scalar(value)
    return params


def _scalar(text: str) -> Any:
    """A JSON number, boolean or string; anything else is text as it stands."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str) else text


def _print(answer: Any, arguments: dict[str, Any], show: Callable[[Any], str]) -> None:
    if arguments["json"]:
        text = msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
    else:
        text = show(answer)
    sys.stdout.write(text + "\n")


def _listing(policies: list[Listed]) -> str:
    lines = []
    for policy in policies:
        lines.append(f"{policy.name}  ({policy.origin})")
        if policy.error:
            lines.append(f"  cannot be used: {policy.error}")
        for name, parameter in policy.params.items():
            bounds = f", {parameter.bounds}" if parameter.bounds else ""
            default = msgspec.json.encode(parameter.default).decode()
            lines.append(f"  {name} = {default}{bounds}")
            if parameter.description:
                lines.append(f"      {parameter.description}")
    return "\n".join(lines)


def _history(changes: list[Change]) -> str:
    lines = []
    for change in changes:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.at))
        share = "" if change.share is None else f" share {change.share:g}"
        params = msgspec.json.encode(change.params).decode()
        lines.append(
            f"{at}  version {change.version:<4} {change.what:<10} {change.policy} {params}{share}"
        )
        if change.note:
            lines.append(f"{'':21}{change.note}")
    return "\n".join(lines)
