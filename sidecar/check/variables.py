"""Environment variables, and what the hook makes of them in a process of its own."""

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sidecar.check.finding import Finding, note, ok, problem, warning
from sidecar.config import ENV_PREFIX, Config, settings

ENDPOINT = ENV_PREFIX + "ENDPOINT"
_PATIENCE = 60  # seconds; an interpreter and a few imports


def findings(config: Config | None) -> Iterator[Finding]:
    """config: None if it cannot be read."""
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes"):
        yield problem(
            "SGLANG_RUST_SERVER is set: that server has no Python controller to hook",
            "unset SGLANG_RUST_SERVER",
        )
    told = ask_hook()
    yield from _imports(told)
    if config is not None:
        yield from _endpoint(config.serve.endpoint)
    if "error" in told:
        yield problem(f"hook: {told['error']}", "see the lines above; else reinstall")
    if "variables" in told:
        if told["problem"]:
            yield problem(f"hook: {told['problem']}", "correct the variable for SGLang")
        yield from _unknown([key.env for key in settings()] + told["variables"])


def ask_hook() -> dict[str, Any]:
    """What `python -m sglang_hook.check` says here: the imports of SGLang, not those of ours."""
    command = [sys.executable, "-m", "sglang_hook.check"]
    try:
        ran = subprocess.run(  # noqa: S603 - ours
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
        told = json.loads(ran.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"{' '.join(command[1:])}: {error}"}
    except ValueError:
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        return {"error": f"{' '.join(command[1:])}: {last}"}
    return told if isinstance(told, dict) else {"error": "no sense in its answer"}


def _imports(told: dict[str, Any]) -> Iterator[Finding]:
    """Whether `import sidecar` and `import sglang_hook` give ours, from this directory."""
    root = Path(__file__).resolve().parents[2]
    for package in ("sidecar", "sglang_hook"):
        file = told.get("packages", {}).get(package)
        if file is None:
            continue  # it could not even be started: an error of its own
        where = Path(file).resolve()
        if where == root / package / "__init__.py":
            yield ok(f"import {package}: {where.parent}")
            continue
        if _same(where.parent, root / package):
            yield ok(f"import {package}: {where.parent}, the same as the one installed")
            continue
        yield problem(
            f"import {package} gives {where}, not {root / package}",
            "start SGLang in another directory, or take that one out of PYTHONPATH; "
            "PYTHONSAFEPATH=1 keeps the working directory out",
        )


def _same(one: Path, other: Path) -> bool:
    """Whether two packages hold the same code: a checkout, and what was installed from it."""

    def code(root: Path) -> dict[str, bytes]:
        return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*.py")}

    try:
        return code(one) == code(other)
    except OSError:
        return False


def _endpoint(endpoint: str) -> Iterator[Finding]:
    given = os.environ.get(ENDPOINT)
    if given is None:
        yield note(f"{ENDPOINT} is not set here", f"for SGLang, set it to {endpoint}")
    elif given != endpoint:
        yield problem(
            f"{ENDPOINT} is {given}, the sidecar's endpoint {endpoint}: they would not meet",
            "the same in both",
        )
    else:
        yield ok(f"{ENDPOINT} is the sidecar's endpoint")


def _unknown(known: list[str]) -> Iterator[Finding]:
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            yield warning(
                f"{name}: no setting has this name; it does nothing",
                f"did you mean {near[0]}?" if near else "unset it",
            )
