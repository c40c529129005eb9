"""The pages that tell people what to type, taken apart: blocks, and the commands in them."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from tests.processes import ROOT

PAGES = (
    "README.md",
    "docs/operations.md",
    "docs/policies.md",
    "docs/deploy.md",
    "docs/published.md",
    "docs/security.md",
)
PROGRAMS = {
    *("curl", "docker", "grep", "install", "kill", "kubectl", "make", "pip", "python", "python3"),
    *("rm", "sglang-dp-sidecar", "ssh", "systemctl", "systemd-analyze", "uv"),
}
_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


class Block(NamedTuple):
    """A fenced block: its language, "" for commands, and its text."""

    page: str
    language: str
    text: str


def blocks() -> list[Block]:
    """Every fenced block of every page, in order."""
    return [
        Block(page, language, textwrap.dedent(text))
        for page in PAGES
        for _, language, text in _FENCED.findall((ROOT / page).read_text())
    ]


def _is_command(text: str) -> bool:
    """Whether a piece of code in a sentence is a whole command line."""
    program, _, rest = text.partition(" ")
    name = program.rpartition("/")[2]
    return bool(rest) and (name in PROGRAMS or name.endswith(".sh") or program == "policy")


def commands() -> dict[str, list[str]]:
    """Each command line of the pages -> the pages that have it.

    Those of blocks, line by line, and those that stand in sentences and tables. `policy ...` in a
    sentence is short for `sglang-dp-sidecar policy ...`.
    """
    found: dict[str, list[str]] = {}
    for block in blocks():
        for line in block.text.splitlines() if not block.language else ():
            found.setdefault(" ".join(line.split()), []).append(block.page)
    for page in PAGES:
        for text in _INLINE.findall(_FENCED.sub("", (ROOT / page).read_text())):
            if _is_command(text):
                whole = f"sglang-dp-sidecar {text}" if text.startswith("policy ") else text
                found.setdefault(whole, []).append(page)
    found.pop("", None)
    return found


def links() -> list[tuple[Path, str]]:
    """Every link that leads to a file of ours, with the page that has it."""
    found: list[tuple[Path, str]] = []
    for page in (*PAGES, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))):
        targets = re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text())
        found += [(ROOT / page, target) for target in targets if "://" not in target]
    return sorted(set(found))
