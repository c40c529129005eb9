"""deploy/container, taken apart instruction by instruction."""

import io
import re
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "deploy" / "container"
SIDECAR = CONTAINER / "Dockerfile"
HOOK = CONTAINER / "sglang-hook.Dockerfile"
REQUIREMENTS = CONTAINER / "requirements.txt"

Stage = list[tuple[str, str]]


def stages(file: Path) -> list[Stage]:
    """Instructions and their values; the first list is what stands before the first FROM."""
    found: list[Stage] = [[]]
    for line in DockerfileParser(fileobj=io.BytesIO(file.read_bytes())).structure:
        if line["instruction"] == "FROM":
            found.append([])
        if line["instruction"] != "COMMENT":
            found[-1].append((line["instruction"], line["value"]))
    return found


def values(stage: Stage, instruction: str) -> list[str]:
    return [value for name, value in stage if name == instruction]


def pinned() -> dict[str, str]:
    """Versions of deploy/container/requirements.txt by normalised name; the first where markers
    choose between several."""
    found: dict[str, str] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", REQUIREMENTS.read_text(), re.M):
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found
