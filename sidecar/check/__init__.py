"""`sglang-dp-sidecar check`: is the configuration sound, and the environment fit for it?

It changes nothing and asks nobody for a decision: it reads files and versions, tries what can be
tried without binding, and asks a running sidecar for its state.
"""

import json
from collections.abc import Iterator

from sidecar.check import installed, running, sockets, variables
from sidecar.check.finding import Finding, problem
from sidecar.config import Config, Loader
from sidecar.errors import ConfigError

PROBLEM_EXIT = 1


def check(load: Loader, *, as_json: bool) -> int:
    """Print every finding, one a line; return 0, or 1 if one is a problem.

    load: reads the configuration; its ConfigError is a finding.
    """
    findings = list(everything(load))
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if as_json:
        told = [finding.as_dict() for finding in findings]
        print(json.dumps({"problems": problems, "warnings": warnings, "findings": told}, indent=2))
    else:
        for finding in findings:
            print(finding)
        print(f"{problems} problems, {warnings} warnings")
    return PROBLEM_EXIT if problems else 0


def everything(load: Loader) -> Iterator[Finding]:
    """All findings, the configuration's first."""
    try:
        config = load()
    except ConfigError as error:
        yield problem(
            f"configuration: {error}",
            "correct it; `sglang-dp-sidecar config` prints every key, flag and variable",
        )
        config = None
    if config is not None:
        yield from _of(config)
    yield from installed.findings()
    yield from variables.findings(config)


def _of(config: Config) -> Iterator[Finding]:
    """What depends on a configuration that can be read."""
    yield from sockets.settings(config)
    found = sockets.Place(config)
    yield from found.findings()
    yield from running.findings(config, found.holder)
