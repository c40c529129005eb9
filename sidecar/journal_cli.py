"""`sglang-dp-sidecar replay` and `explain`: what a decision log says."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sidecar.errors import ConfigError
from sidecar.policy_cli import parameters

# What reads a log is imported late: the command line is the sidecar's too, which starts with it.
if TYPE_CHECKING:
    from sidecar.journal.reader import Reader

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

VERBS = ("replay", "explain")
DIFFER_EXIT = 1
NOT_FOUND_EXIT = 1
_NAME = re.compile(r"(\d{1,12}-)?\d{1,18}")
_LOG = "a directory of a decision log (decision_log.directory), or files of one"


def add_verbs(verbs: "Verbs") -> None:
    """Add both to the command line."""
    text = "decide the requests of a decision log again, by the same policy or another"
    sub = verbs.add_parser("replay", help=text, description=text, allow_abbrev=False)
    sub.add_argument("log", nargs="+", metavar="LOG", help=_LOG)
    sub.add_argument(
        "--policy",
        metavar="NAME",
        help="compare with this policy, its parameters behind it, PARAM=VALUE or --param VALUE; "
        "without: check that each decision is made again",
    )
    _add_common(sub)
    text = "say why a request of a decision log went where it went"
    sub = verbs.add_parser("explain", help=text, description=text, allow_abbrev=False)
    sub.add_argument("log", nargs="+", metavar="LOG", help=_LOG)
    which = sub.add_mutually_exclusive_group(required=True)
    which.add_argument("--seq", type=int, metavar="N", help="sequence number of its query")
    which.add_argument("--at", metavar="NAME", help="its name, as `--key` and `replay` print it")
    which.add_argument("--key", metavar="KEY", help="list the requests of this routing key")
    sub.add_argument(
        "--index", type=int, default=0, metavar="I", help="its place in the query (default: 0)"
    )
    sub.add_argument("--instance", default="", metavar="NAME", help="of this SGLang server only")
    _add_common(sub)


def _add_common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--secret", metavar="FILE", help="the log's secret (default: the one beside the log)"
    )
    sub.add_argument(
        "--load",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="a policy that is not ours and that no installed package offers",
    )
    sub.add_argument("--json", action="store_true", help="as JSON")


def obey_log(arguments: dict[str, Any], more: Sequence[str]) -> int:
    """Do what the command line says; prints the answer.

    more: arguments that the parser does not know, parameters of the policy. Raises ConfigError.
    """
    from sidecar.journal.account import Progress
    from sidecar.journal.reader import Reader

    verb = arguments["verb"]
    progress = Progress(verb)
    paths = arguments["log"]
    if verb == "replay":
        more = [*(path for path in paths if _is_parameter(path)), *more]
        paths = [path for path in paths if not _is_parameter(path)]
    reader = Reader(paths, arguments["secret"], _warn, progress)
    try:
        code, told, text = (_replay if verb == "replay" else _explain)(reader, arguments, more)
    finally:
        progress.end()
    if arguments["json"]:
        text = msgspec.json.format(msgspec.json.encode(told), indent=2).decode()
    sys.stdout.write(_plain(text) + "\n")
    return code


def _replay(
    reader: "Reader", arguments: dict[str, Any], more: Sequence[str]
) -> tuple[int, dict[str, Any], str]:
    from sidecar.journal.compare import Contest
    from sidecar.journal.tables import comparison, verification
    from sidecar.journal.verify import Verification

    load = tuple(arguments["load"])
    params = parameters("replay", more)
    if arguments["policy"]:
        told = Contest(reader, arguments["policy"], params, load).run()
        return 0, told, comparison(told)
    if params:
        raise ConfigError("replay: parameters need --policy NAME, whose they are")
    told = Verification(reader, load).run()
    return DIFFER_EXIT if told["differ"] else 0, told, verification(told)


def _explain(
    reader: "Reader", arguments: dict[str, Any], more: Sequence[str]
) -> tuple[int, dict[str, Any], str]:
    from sidecar.journal.explain import Wanted, explain, history_of
    from sidecar.journal.tables import history, one_decision

    if more:
        raise ConfigError(f"explain: unrecognized arguments: {' '.join(more)}")
    if arguments["key"] is not None:
        if not arguments["key"].strip():
            raise ConfigError("--key: is empty; requests without a key have no session")
        told = history_of(reader, arguments["key"].encode(errors="surrogatepass"))
        return 0 if told["requests"] else NOT_FOUND_EXIT, told, history(told)
    name = arguments["at"] or ""
    if arguments["seq"] is None and not _NAME.fullmatch(name):
        raise ConfigError(f"--at: {name!r} is not NUMBER or START-NUMBER, as `--key` prints it")
    if arguments["index"] < 0:
        raise ConfigError("--index: must be at least 0")
    wanted = Wanted(arguments["seq"], arguments["index"], name, arguments["instance"])
    told = explain(reader, wanted, tuple(arguments["load"]))
    return 0, told, one_decision(told)


def _is_parameter(text: str) -> bool:
    return "=" in text and not os.path.exists(text)


def _warn(text: str) -> None:
    print(f"sglang-dp-sidecar: {_plain(text)}", file=sys.stderr)


def _plain(text: str) -> str:
    """What a log of anybody's says cannot steer the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
