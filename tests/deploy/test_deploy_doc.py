"""docs/deploy.md: its commands name what is there; those that need no root and no cluster run."""

import re
import shlex
import subprocess
from pathlib import Path

from sidecar.cli import parser
from tests.deploy.manifests import OVERLAYS, every_container
from tests.deploy.unit import SERVICE, settings

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "deploy.md"
BLOCKS = re.findall(r"^```\n(.*?)^```", DOC.read_text(), re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]


def beginning(*words: str) -> list[list[str]]:
    """Commands that begin so, as words."""
    split = [shlex.split(line.replace("$(", "(")) for line in COMMANDS]
    return [command for command in split if command[: len(words)] == list(words)]


def test_every_path_is_there() -> None:
    named = re.findall(r"(?:deploy|docs|tests|overlays|base)/[\w./-]*\w", DOC.read_text())
    assert len(named) > 10
    for path in named:
        found = [ROOT / path, ROOT / "deploy" / "kubernetes" / path]
        assert any(one.exists() for one in found), path


def test_files_go_where_the_unit_looks(tmp_path: Path) -> None:
    copies = [c for c in beginning("install") if "-D" in c]
    assert len(copies) == 3
    for command in copies:
        here = [f"{tmp_path}{word}" if word.startswith("/") else word for word in command]
        subprocess.run(here, cwd=ROOT, check=True)
    made = {str(Path("/") / f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()}
    start = settings(SERVICE)["ExecStart"][0].split()
    assert start[start.index("--config") + 1] in made
    assert f"/etc/systemd/system/{SERVICE.name}" in made
    assert "/etc/systemd/system/sglang.service.d/10-dp-sidecar.conf" in made
    assert any(line.startswith(f"python3 -m venv {Path(start[0]).parents[1]}") for line in COMMANDS)


def test_our_own_commands_parse() -> None:
    ours = beginning("sglang-dp-sidecar")
    for command in beginning("kubectl", "exec"):
        ours.append(command[command.index("--") + 1 :])
    inline = re.findall(r"`kubectl exec \S+ -c \S+ -- (sglang-dp-sidecar [^`]+)`", DOC.read_text())
    ours += [text.split() for text in inline]
    assert len(ours) == 2
    for command in ours:
        parser().parse_args(command[1:])


def test_overlays_and_images_are_the_manifests() -> None:
    for command in beginning("kubectl", "apply"):
        assert Path(command[-1]).name in OVERLAYS
    built = {c[c.index("-t") + 1] for c in beginning("docker", "build")}
    assert built == {one["image"] for _, one in every_container()}


def test_the_secrets_hold_what_the_pods_read() -> None:
    text = (ROOT / "deploy/kubernetes/overlays/multi-node/leaderworkerset.yaml").read_text()
    made = beginning("kubectl", "create", "secret", "generic")
    assert len(made) == 2
    for command in made:
        assert f"secretName: {command[4]}" in text
        for source in command[5:]:
            assert re.search(rf"{re.escape(Path(source).name)}$", text, re.M)
