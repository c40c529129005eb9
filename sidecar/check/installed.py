"""Versions and entry points, from the metadata of what is installed: nothing of it is imported."""

import re
import sys
from collections.abc import Iterator
from importlib import metadata

from sidecar import __version__
from sidecar.check.finding import Finding, note, ok, problem, warning

DISTRIBUTION = "sglang-dp-sidecar"
PLUGINS = "sglang.srt.plugins"
PLUGIN, TARGET = "dp_sidecar", "sglang_hook.plugin:register"
# All are tested, see docs/compatibility.md.
OLDEST, NEWEST = (0, 5, 12), (0, 5, 23)
PACKAGES = ("sidecar", "sglang_hook")
REINSTALL = "pip install --force-reinstall sglang-dp-sidecar, in the environment of SGLang"


def findings() -> Iterator[Finding]:
    """Python, this distribution, its plugin, SGLang."""
    yield ok(f"Python {sys.version.split()[0]}: {sys.executable}")
    yield from _distribution()
    yield from _plugin()
    yield from _sglang()


def _distribution() -> Iterator[Finding]:
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield problem(f"{DISTRIBUTION} is not installed for this Python", REINSTALL)
        return
    if version != __version__:
        yield problem(
            f"{DISTRIBUTION} {version} is installed, but its code is {__version__}", REINSTALL
        )
    else:
        yield ok(f"{DISTRIBUTION} {version}")
    providers = metadata.packages_distributions()
    for package in PACKAGES:
        others = sorted({*providers.get(package, ())} - {DISTRIBUTION})
        if others:
            yield problem(
                f"the package `{package}` is also installed by {', '.join(others)}",
                f"pip uninstall {others[0]}, then {REINSTALL}; or use another environment",
            )


def _plugin() -> Iterator[Finding]:
    found = metadata.entry_points(group=PLUGINS, name=PLUGIN)
    values = sorted({entry.value for entry in found})
    if values == [TARGET]:
        yield ok(f"plugin {PLUGIN} is registered for SGLang")
    elif not values:
        yield problem(f"plugin {PLUGIN} is not registered: SGLang will not load it", REINSTALL)
    else:
        yield problem(
            f"plugin {PLUGIN} is registered as {', '.join(values)}, not {TARGET}", REINSTALL
        )


def _sglang() -> Iterator[Finding]:
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        yield note("SGLang is not installed for this Python", "install this package where it is")
        return
    # 0.5.23.post1 and 0.5.23rc2 count as 0.5.23.
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if OLDEST <= numbers <= NEWEST:
        yield ok(f"SGLang {version}")
    elif (0, 0, 1) <= numbers < OLDEST and len(numbers) == 3:
        yield problem(
            f"SGLang {version} loads no plugins: the hook would never run",
            f"use {_text(OLDEST)} or newer",
        )
    else:
        yield warning(
            f"SGLang {version}: not one of {_text(OLDEST)} to {_text(NEWEST)}",
            "look for dp_sidecar in its log: the hook attaches if all it needs is there",
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
